"""`index_factory`: an `IndexIVFGMM` from a description in FAISS's manner."""

import dataclasses
from typing import Any

from gmm_ivf._cell_options import CellOptions
from gmm_ivf._checks import checked_ivf
from gmm_ivf._description import Description, check_prefixes, parse
from gmm_ivf._faiss import check_metric, faiss
from gmm_ivf._vectors import check_count
from gmm_ivf.index import IndexIVFGMM
from gmm_ivf.quantizer import GMMQuantizer
from gmm_ivf.rules import Rule

_DEFAULT_RULE = "responsibility"
#: What is no option here, and how to have it all the same.
_ELSEWHERE = {
    "nlist": "it is the K of GMM<K> in the description",
    "n_components": "it is the K of GMM<K> in the description",
    "max_lists": "write GMM<K>x<max_lists> in the description",
    "layout": 'write GMM<K>cells in the description for "cells", GMM<K>[x<max_lists>] for "lists"',
    "links": "write GMM<K>cells<links> in the description",
    "fast_scan": "take a codec of FastScan: PQ<M>x4fs, PQ<M>x4fsr or RaBitQfs",
    "refine": "end the description in ,RFlat",
    "k_factor": "set index.k_factor of the index made, whose description ends in ,RFlat",
    "nprobe": "set index.nprobe of the index made",
}


def index_factory(
    d: int,
    description: str,
    metric: int = faiss.METRIC_L2,
    *,
    rule: str | Rule = _DEFAULT_RULE,
    tau: float | None = None,
    replication: float | None = None,
    adaptive: bool = False,
    cells: Any = None,
    **gmm_options: Any,
) -> IndexIVFGMM:
    """Make an empty, untrained index.

    Parameters
    ----------
    d : int
        Dimensions of the vectors.
    description : str
        ``[prefix,]GMM<K>[x<max_lists> | cells<links>][_HNSW<M>],<codec>[,RFlat]``, such as
        ``"GMM1024,Flat"``, ``"GMM1024x2,PQ32"`` or ``"OPQ32,GMM4096cells128,PQ32,RFlat"``.

        - Prefixes are those of FAISS: OPQ<M>[_<d>], PCA[W][R]<d>, RR<d>, L2norm. The mixture is
          fitted on transformed vectors.
        - K components. Without a suffix each vector is in one list; ``x<max_lists>`` stores it in
          up to as many; ``cells`` is that layout, with as many links per component.
        - ``_HNSW<M>`` searches the means by a graph.
        - Codecs are named as in FAISS: Flat, SQ8, SQ6, SQ4, SQfp16, SQbf16, PQ<M>[x<bits>],
          RaBitQ[<bits>]; and for FastScan PQ<M>x4fs, PQ<M>x4fsr, RaBitQfs.
        - ``RFlat`` keeps the vectors, too, and ranks the best by exact distances.
    metric : int, default=faiss.METRIC_L2
    rule, tau, replication
        As in `IndexIVFGMM`, for ``x<max_lists>`` of at least 2.
    adaptive
        As there; not for ``cells``.
    cells : CellOptions, default=None
        For ``cells``.
    **gmm_options
        Options of `GMMQuantizer`, such as ``random_state`` and ``covariance_type``.

    Returns
    -------
    IndexIVFGMM
        Its `description` says the same, or None for what has no such name.

    Raises
    ------
    ValueError
        Naming the token that is at fault, and what may stand there, or an option that does not go
        with the description.
    TypeError
        For an option that is none, saying where it belongs.
    NotImplementedError
        For what cannot be done.
    """
    _check_names(gmm_options)
    parsed = parse(description)
    _check_single(parsed, rule, tau, description)
    check_prefixes(parsed.prefixes, check_count(d, "d"), description)
    index = _stock(d, parsed, check_metric(metric), description)
    if parsed.hnsw:
        graph = f"hnsw{parsed.hnsw}"
        if gmm_options.setdefault("coarse", graph) != graph:
            coarse = gmm_options["coarse"]
            raise ValueError(f"description {description!r} and coarse={coarse!r} contradict.")
    q = GMMQuantizer(checked_ivf(index).d, parsed.nlist, metric, **gmm_options)
    q.attach(index)
    given = _layout_options(parsed, cells, description)
    return IndexIVFGMM(
        index, q, rule=rule, tau=tau, replication=replication, adaptive=adaptive, **given
    )


def _check_names(options: dict[str, Any]) -> None:
    """Say of options of an index, which are none of the mixture, where they belong."""
    for name in options:
        if name in _ELSEWHERE:
            raise TypeError(f"index_factory has no option {name!r}: {_ELSEWHERE[name]}.")


def _check_single(parsed: Description, rule: Any, tau: Any, text: str) -> None:
    """Refuse a choice of further lists where each vector has one."""
    if parsed.cells or parsed.max_lists > 1:
        return
    for name, value, default in (("rule", rule, _DEFAULT_RULE), ("tau", tau, None)):
        if value != default:
            raise ValueError(
                f"{name}={value!r} chooses further lists of a vector, and description {text!r} "
                f"gives it one: write GMM{parsed.nlist}x2 in it for up to two, or leave {name} out."
            )


def _stock(d: int, parsed: Description, metric: int, text: str) -> Any:
    """The FAISS index that is wrapped, over a quantizer of FAISS's own."""
    tokens = [*parsed.prefixes, f"IVF{parsed.nlist}", parsed.plain_codec]
    try:
        index = faiss.index_factory(d, ",".join(tokens), metric)
    except RuntimeError as error:
        reason = str(error).split("Error: ")[-1].strip()
        raise ValueError(
            f"description {text!r}: FAISS does not make {','.join(tokens)} of {d} dimensions "
            f"({reason})."
        ) from error
    ivf = checked_ivf(index)
    if isinstance(ivf, faiss.IndexIVFPQ):
        # It would order the codes for filtering by Hamming distance, which nothing here does.
        ivf.do_polysemous_training = False
        ivf.by_residual = not parsed.fast_scan or parsed.codec.endswith("r")
    return index


def _layout_options(parsed: Description, cells: Any, text: str) -> dict[str, Any]:
    """Keywords of `IndexIVFGMM` that a description stands for."""
    given = {"fast_scan": parsed.fast_scan, "refine": "flat" if parsed.refine else None}
    if parsed.cells:
        return {**given, "layout": "cells", "cells": _cell_options(cells, parsed, text)}
    if cells is not None:
        raise ValueError(f"cells={cells!r} needs GMM<K>cells in the description {text!r}.")
    return {**given, "max_lists": parsed.max_lists}


def _cell_options(cells: Any, parsed: Description, text: str) -> CellOptions:
    """The options given, with the links of the description."""
    options = CellOptions.checked(cells)
    if parsed.links is None:
        return options
    if options.links not in (None, parsed.links):
        raise ValueError(f"description {text!r} and cells.links={options.links} contradict.")
    return dataclasses.replace(options, links=parsed.links)
