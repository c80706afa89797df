"""What `IndexIVFGMM` asks of its arguments before it touches anything."""

import numbers
from typing import Any

import numpy as np

from gmm_ivf._coarse import Centroids
from gmm_ivf._faiss import address, faiss
from gmm_ivf._vectors import check_count
from gmm_ivf.quantizer import GMMQuantizer
from gmm_ivf.rules import RULES, Rule

DEFAULT_REPLICATION = 1.5

# Codecs in which one id may lie in several lists, be searched there and be removed again. Types
# that are not named here keep data beside the lists, or have not been tried.
_CODECS = (
    "IndexIVFFlat",
    "IndexIVFFlatDedup",
    "IndexIVFPQ",
    "IndexIVFScalarQuantizer",
    "IndexIVFRaBitQ",
    "IndexIVFEDEN",
    "IndexIVFSpectralHash",
    "IndexIVFResidualQuantizer",
    "IndexIVFLocalSearchQuantizer",
    "IndexIVFProductResidualQuantizer",
    "IndexIVFProductLocalSearchQuantizer",
)


def checked_ivf(index: Any) -> Any:
    """Return the IVF index wrapped, or inside an IndexPreTransform, as its own type.

    Raises
    ------
    ValueError
        When copies in it would be lost, wrong, or corrupt memory.
    """
    name = type(index).__name__
    if name.startswith("GpuIndex"):
        raise ValueError(f"index is a {name}: wrap the CPU index, GPU search is not available yet.")
    if not isinstance(index, faiss.Index):
        raise ValueError(f"index must be a faiss.IndexIVF; got {name}.")
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    name = type(index).__name__
    if name in _CODECS:
        return index
    if "FastScan" in name:
        plain = name.replace("FastScan", "")
        way = (
            f"copies corrupt its packed blocks. Wrap a faiss.{plain} (4-bit codes for PQ) with "
            "fast_scan=True, which converts it"
        )
    elif "Panorama" in name:
        way = "its lists have a layout of their own. Wrap a faiss.IndexIVFFlat"
    elif isinstance(index, faiss.IndexRefine):
        way = 'wrap the index inside (faiss.downcast_index(index.base_index)) with refine="flat"'
    elif isinstance(index, (faiss.IndexIDMap, faiss.IndexIDMap2)):
        way = "wrap the IVF index inside (index.index): add_with_ids keeps the ids"
    elif isinstance(index, faiss.IndexIVF):
        way = f"it may keep data beside its lists. Wrap one of {', '.join(_CODECS)}"
    else:
        way = "only an IVF index has lists. Wrap for example a faiss.IndexIVFFlat"
    raise ValueError(f"index must be a plain faiss.IndexIVF, got {name}: {way}.")


def checked_rule(rule: Any, tau: float | None, replication: float | None) -> Rule | None:
    """Return the rule of geometry, None for "responsibility"; only that one has a budget."""
    if isinstance(rule, Rule):
        chosen = rule
    elif isinstance(rule, str) and rule == "responsibility":
        return None
    elif isinstance(rule, str) and rule in RULES:
        chosen = RULES[rule]()
    else:
        names = ", ".join(map(repr, ("responsibility", *RULES)))
        raise ValueError(f"rule must be one of {names}, or a gmm_ivf.rules.Rule; got {rule!r}.")
    for name, value in (("tau", tau), ("replication", replication)):
        if value is not None:
            raise ValueError(
                f'{name}={value!r} belongs to rule="responsibility"; {chosen!r} has no such '
                f"threshold. Leave {name} None: max_lists and the rule's own options limit copies."
            )
    return chosen


def checked_budget(
    tau: float | None, replication: float | None, max_lists: int, nlist: int, rule: Rule | None
) -> tuple[float | None, float | None, int]:
    """Return (tau, replication, max_lists): at most one of the first two, and defaults filled in.

    max_lists is clamped to nlist. A rule of geometry has neither tau nor replication.
    """
    max_lists = check_count(max_lists, "max_lists")
    if tau is not None and replication is not None:
        raise ValueError(
            f"tau={tau} and replication={replication} exclude each other: replication solves for "
            "tau. Give one."
        )
    if tau is not None and not (isinstance(tau, numbers.Real) and 0 < tau < 1):
        raise ValueError(f"tau must be a number in (0, 1), such as 1 / nlist; got {tau!r}.")
    if replication is not None:
        if not (isinstance(replication, numbers.Real) and replication >= 1):
            raise ValueError(f"replication must be a number of at least 1; got {replication!r}.")
        # With fewer lists than max_lists no vector has so many; such an index was made, and copies
        # and files of it have max_lists=nlist.
        if replication > max_lists and max_lists < nlist:
            raise ValueError(
                f"replication={replication} exceeds max_lists={max_lists}: no vector has more "
                "lists than that. Raise max_lists or lower replication."
            )
    max_lists = min(max_lists, nlist)
    if rule is None and tau is None and replication is None and max_lists > 1:
        replication = DEFAULT_REPLICATION
    return tau, replication, max_lists


def referenced_by(index: Any) -> list:
    """Python objects that an index keeps alive, and those that the indexes among them do."""
    found = list(getattr(index, "referenced_objects", []))
    return [*found, *(deep for o in found for deep in referenced_by(o))]


def checked_quantizer(index: Any, q: Any, referenced: list) -> GMMQuantizer:
    """Return the GMMQuantizer that the index really uses, or say that q is not it.

    Parameters
    ----------
    index : faiss.IndexIVF
    q : GMMQuantizer or None
        None looks for it among the objects that the index refers to.
    referenced : list
        Those objects.
    """
    if q is None:
        mine = [o for o in referenced if isinstance(o, GMMQuantizer)]
        mine = [o for o in mine if address(o) == address(index.quantizer)]
        if not mine:
            raise ValueError(
                "q is None and the index refers to no GMMQuantizer (clone_index and read_index "
                "drop it): pass q, after q.attach(index) on an empty index."
            )
        return mine[0]
    if not isinstance(q, GMMQuantizer):
        raise ValueError(f"q must be a GMMQuantizer; got {type(q).__name__}.")
    for name in ("d", "nlist", "metric_type"):
        if getattr(index, name) != getattr(q, name):
            raise ValueError(
                f"index and q must agree; index has {name}={getattr(index, name)}, q has "
                f"{getattr(q, name)}."
            )
    if address(index.quantizer) != address(q):
        raise ValueError(
            "index.quantizer is not q: build the index with q, or call q.attach(index) while it "
            "is empty."
        )
    return q


def checked_adaptive(adaptive: Any, metric: int) -> bool:
    """The option `adaptive`.

    Raises
    ------
    ValueError
        When it is no bool, or True where lists are not ranked by distance.
    """
    if not isinstance(adaptive, bool):
        raise ValueError(f"adaptive must be True or False; got {adaptive!r}.")
    if adaptive and metric != faiss.METRIC_L2:
        raise ValueError(
            "adaptive=True compares squared distances to the means and needs METRIC_L2; for "
            "cosine normalise the vectors, and use METRIC_L2."
        )
    return adaptive


def check_posteriors(q: GMMQuantizer, rule: Rule | None, max_lists: int) -> None:
    """Refuse to go by the posteriors of a quantizer that has none."""
    if rule is None and max_lists > 1 and isinstance(q.mixture, Centroids):
        raise ValueError(
            'rule="responsibility" needs a mixture, and q was made from centroids: choose one of '
            f"{', '.join(map(repr, RULES))}, or max_lists=1."
        )


def checked_refine(refine: Any, k_factor: Any) -> tuple[str | None, float]:
    """Return (refine, k_factor), or refuse what they cannot be."""
    if refine not in (None, "flat"):
        raise ValueError(f'refine must be None or "flat"; got {refine!r}.')
    if not isinstance(k_factor, numbers.Real) or not 1 <= float(k_factor) < np.inf:
        raise ValueError(f"k_factor must be a number of at least 1; got {k_factor!r}.")
    if refine is None and k_factor != 1:
        raise ValueError(f'k_factor={k_factor} needs the originals: give refine="flat".')
    return refine, float(k_factor)


def check_no_direct_map(index: Any) -> None:
    """Refuse a direct map, which knows one place per id and loses the other copies."""
    if index.direct_map.type != faiss.DirectMap.NoMap:
        raise ValueError(
            "index has a direct map, which keeps one place per id: copies would stay behind as "
            "ghosts. Call index.set_direct_map_type(faiss.DirectMap.NoMap)."
        )
