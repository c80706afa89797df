"""Index files: `write_index` and `read_index`.

One file, laid out as safetensors: the mixture, the structure of the FAISS index (codec and means in
FAISS's own form), the entries of the lists and our bookkeeping, each with a checksum.
"""

import os
from typing import Any

import numpy as np

from gmm_ivf._checks import checked_ivf
from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._description import prefix_names
from gmm_ivf._faiss import faiss
from gmm_ivf._list_data import (
    fill_lists,
    list_blocks,
    list_sizes,
    map_lists,
    nbytes,
    structure,
)
from gmm_ivf._quantizer_parts import quantizer_of_parts, quantizer_parts
from gmm_ivf._sections import Sections, Stream, write_sections
from gmm_ivf.index import IndexIVFGMM

_ORIGINALS = "index.originals"


def write_index(index: IndexIVFGMM, path: str | os.PathLike) -> None:
    """Write an index as one file, replacing an older one only when the new one is complete.

    Parameters
    ----------
    index : IndexIVFGMM
        Trained. No other thread may search or change it meanwhile.
    path : path

    Raises
    ------
    ValueError
        When it is another kind of index, is not trained, or has a rule of a class of your own;
        or when the path names a folder, a device or a pipe.
    FileNotFoundError
        When the folder does not exist.
    OSError
        When the disk is full and the like; an older file is untouched then.

    Notes
    -----
    Options of the mixture that are arrays or random generators are not kept, as only training
    again would use them; nor are its device and backend.
    """
    if not isinstance(index, IndexIVFGMM):
        raise ValueError(
            f"index must be an IndexIVFGMM; got {type(index).__name__}. faiss.write_index writes "
            "those of FAISS."
        )
    if not index.is_trained:
        raise ValueError("index is not trained: call train(x) before writing it.")
    index._ready()
    write_sections(path, *_contents(index))


def _contents(index: IndexIVFGMM) -> tuple[dict[str, Any], dict[str, np.ndarray | Stream]]:
    """Settings and arrays of a file."""
    # A graph over the means is built at the first search: there shall be one to write.
    CoarseRanker(index.quantizer, index.quantizer.mixture)
    ivf = index._ivf
    values, mixture = quantizer_parts(index.quantizer)
    state, kept = index.state()
    sizes = list_sizes(ivf)
    settings = {
        "quantizer": values,
        "index": state,
        "max_codes": ivf.max_codes,
        "prefixes": index._prefixes or prefix_names(index.index),
    }
    # What may be mapped comes first: it is aligned there.
    arrays: dict[str, np.ndarray | Stream] = {
        "lists": Stream(nbytes(sizes, ivf.code_size), list_blocks(ivf, sizes)),
        **{f"mixture.{name}": array for name, array in mixture.items()},
        **{f"index.{name}": array for name, array in kept.items()},
        "faiss": structure(index.index, ivf),
        "sizes": sizes,
    }
    if index.quantizer.graph is not None:
        arrays["graph"] = faiss.serialize_index(index.quantizer.graph)
    return settings, arrays


def read_index(path: str | os.PathLike, *, mmap: bool = False, verify: bool = True) -> IndexIVFGMM:
    """Read an index that `write_index` wrote.

    Parameters
    ----------
    path : path
    mmap : bool, default=False
        Leave the entries of the lists, and originals (`refine`), in the file, for indexes larger
        than memory. Such an index is read-only, and the file must not be changed or cut while it
        is in use (`write_index` to the same path is no such change: it makes a new file). A packed
        or cell-wise copy of codes is made in memory all the same.
    verify : bool, default=True
        False skips the checksum of `lists` and of what is left in the file, which costs reading
        the whole file once. All else is always checked.

    Returns
    -------
    IndexIVFGMM
        It gives the results of the one written, and goes on with the ids where that stopped.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        When it is truncated, tampered with, of another kind, or of a newer version; or when it was
        replaced meanwhile.

    Notes
    -----
    Nothing in the file is run. Checksums tell damage, not forgery: who can write a file can give it
    right ones, and FAISS's reader does not stand everything.
    """
    file = Sections(path)
    try:
        if verify:
            file.verify("lists")
        index = _read(file, mmap, verify)
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        file.check_in_place()
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{path} holds no index that this version can read: {error}") from error
    file.check_in_place()
    return index


def _read(file: Sections, mmap: bool, verify: bool) -> IndexIVFGMM:
    settings = file.settings
    q = quantizer_of_parts(settings["quantizer"], _arrays(file, "mixture."), file.path)
    # FAISS's own reader may abort on garbage, so it sees only bytes that were checked.
    stock = faiss.deserialize_index(file.array("faiss"))
    if "graph" in file:
        q.restore_graph(faiss.deserialize_index(file.array("graph")))
    ivf = checked_ivf(stock)
    _fill(ivf, file, mmap)
    ivf.max_codes, stock.ntotal = settings["max_codes"], ivf.ntotal
    kind = MappedIndexIVFGMM if mmap else IndexIVFGMM
    kept = _arrays(file, "index.", leave=_ORIGINALS if mmap else "")
    if mmap and _ORIGINALS in file:
        kept |= _mapped_originals(file, verify)
    index = kind.from_state(stock, q, settings["index"], kept)
    if settings["prefixes"]:
        index._prefixes = tuple(settings["prefixes"])
    return index


def _arrays(file: Sections, prefix: str, leave: str = "") -> dict[str, np.ndarray]:
    names = [name for name in file.names(prefix) if name != leave]
    return {name.removeprefix(prefix): file.array(name) for name in names}


def _mapped_originals(file: Sections, verify: bool) -> dict[str, np.ndarray]:
    if verify:
        file.verify(_ORIGINALS)
    return {_ORIGINALS.removeprefix("index."): file.mapped(_ORIGINALS)}


def _fill(ivf: Any, file: Sections, mmap: bool) -> None:
    """Put the entries of a file into an index that has none."""
    sizes, data = file.array("sizes"), file.mapped("lists")
    right = sizes.shape == (ivf.nlist,) and int(sizes.min()) >= 0
    if not right or len(data) != nbytes(sizes, ivf.code_size):
        raise ValueError(f"{file.path} is damaged: its lists are of other sizes than it says.")
    if mmap:
        map_lists(ivf, sizes, file.path, file.start("lists"))
    else:
        fill_lists(ivf, sizes, data)


class MappedIndexIVFGMM(IndexIVFGMM):
    """An index whose entries lie in a file: for searching only. Made by `read_index`."""


def _refusal(name: str) -> Any:
    def method(self, *args: Any, **kwargs: Any):
        raise RuntimeError(
            f"{name}: this index is mapped from a file, and read-only. read_index without mmap "
            "reads it into memory, where it can change."
        )

    method.__name__ = name
    method.__doc__ = "Not allowed: the index is mapped from a file."
    return method


for _name in (
    "train",
    "add",
    "add_with_ids",
    "add_preassigned",
    "remove_ids",
    "update_vectors",
    "merge_from",
    "reset",
):
    setattr(MappedIndexIVFGMM, _name, _refusal(_name))
