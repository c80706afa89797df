"""Other forms of an `IndexIVFGMM`: its name, a plain FAISS index, a copy on a GPU."""

from typing import Any

from gmm_ivf._adapter import Adapter
from gmm_ivf._description import Description, codec_name, prefix_names
from gmm_ivf._export import single_assigned
from gmm_ivf._graph import links_of
from gmm_ivf.gpu import GpuIndexIVFGMM
from gmm_ivf.lists import ListsLayout


class Converting(Adapter):
    """The methods that make something else of an index."""

    _refine: str | None
    #: Names of the transforms where a file gave them: FAISS forgets which one was OPQ.
    _prefixes: tuple[str, ...] | None = None

    @property
    def description(self) -> str | None:
        """What `index_factory` makes such an index of, None where it has no name for it.

        It does not say rule, threshold and `adaptive`, nor the options of the mixture.
        """
        options = self._layout.options()
        codec = codec_name(self._ivf, options.get("fast_scan", False))
        prefixes = self._prefixes or prefix_names(self.index)
        if codec is None or prefixes is None:
            return None
        described = Description(
            prefixes=prefixes,
            nlist=self.nlist,
            max_lists=options.get("max_lists", 1),
            cells="cells" in options,
            links=options.get("cells", {}).get("links"),
            hnsw=links_of(self.quantizer.coarse),
            codec=codec,
            refine=self._refine is not None,
        )
        return str(described)

    def to_faiss(self) -> Any:
        """Copy the vectors into a plain FAISS index, each in the list of its nearest mean only.

        ``faiss.write_index`` writes it for programs without gmm_ivf. No other thread may search
        or change this index meanwhile.

        Returns
        -------
        faiss.Index
            Of the type of `index`, with the same ids and codes. The nearest mean is told by the
            originals where they are kept (`refine`), else by what the codec kept of a vector. A
            FastScan copy and originals are left behind: convert and refine it by FAISS.

        Raises
        ------
        NotImplementedError
            Where FAISS cannot decode the codes of an index with copies.
        """
        layout = self._ready()
        # In layout "cells" the lists are those of hard assignment already.
        has_copies = isinstance(layout, ListsLayout) and layout.max_copies > 1
        ranker = layout._ready().ranker if has_copies else None
        originals = self._originals
        exact = None if originals is None else lambda ids: self._inner(originals.get(ids))
        return single_assigned(self.index, layout.ivf, ranker, exact)

    def to_gpu(self, device: int = 0, resources: Any = None) -> GpuIndexIVFGMM:
        """Copy the index to a GPU, for searching there.

        Parameters
        ----------
        device : int, default=0
            GPU by number.
        resources : faiss.StandardGpuResources, default=None
            None makes new ones.

        Returns
        -------
        GpuIndexIVFGMM
            With `search`, `nprobe` and `last_search` as here.

        Raises
        ------
        RuntimeError
            When faiss has no GPU support.
        NotImplementedError
            Naming a codec that faiss-gpu does not support: any but Flat, SQ and PQ of 8 bits.
        """
        return GpuIndexIVFGMM(self, device, resources)
