"""Curves of operating points, and the cost or time that they have at a recall."""

from collections.abc import Callable, Iterable, Mapping

from gmm_ivf.eval.metrics import cost_at_recall, gap_at_recall
from gmm_ivf.eval.results import OperatingPoint
from gmm_ivf.eval.searchers import EF_SEARCH

Curve = list[OperatingPoint]
Curves = Mapping[tuple[int, str, int], Curve]


def curves(points: Iterable[OperatingPoint]) -> dict[tuple[int, str, int], Curve]:
    """Points by (nlist, method, seed), in the order met, each curve by rising effort."""
    result: dict[tuple[int, str, int], Curve] = {}
    for point in points:
        key = point.key
        result.setdefault((key.nlist, key.method, key.seed), []).append(point)
    for curve in result.values():
        curve.sort(key=lambda p: (p.key.nprobe, p.key.ef_search, p.key.refine_factor))
    return result


def strands(curve: Curve) -> list[Curve]:
    """Parts of a curve along which only the number of lists, or of entries, rises.

    A search with an HNSW coarse quantizer, or with re-ranking, has a second number to choose. Along
    the front of all points the two take turns in rising, with a step at each turn that nobody has
    to take: read along one at a time, the curve is smooth.
    """
    breadths = EF_SEARCH if any(point.key.ef_search for point in curve) else (0,)
    factors = sorted({point.key.refine_factor for point in curve})
    return [_strand(curve, ef, factor) for ef in breadths for factor in factors]


def _strand(curve: Curve, ef_search: int, factor: int) -> Curve:
    """Searches of one least breadth; more re-ranking than was tried would have found no more."""
    found: dict[tuple[int, int], OperatingPoint] = {}
    for point in curve:  # by rising factor
        key = point.key
        breadth = max(key.nprobe, ef_search) if ef_search else 0
        if key.ef_search == breadth and key.refine_factor <= factor:
            found[key.nprobe, key.max_codes] = point
    return list(found.values())


def curve_cost(curve: Curve | None, target: float) -> float | None:
    """Distance computations per query at a recall; None where the curve does not cross it."""
    return _least(curve, target, _cost)


def curve_seconds(curve: Curve | None, target: float) -> float | None:
    """Seconds per query at a recall; None where the curve does not cross it."""
    return _least(curve, target, lambda point: 1 / point.queries_per_second)


def curve_gap(curve: Curve, target: float) -> float | None:
    """Recall between the two points that `curve_cost` reads between; None where it reads none."""
    found = []
    for strand in strands(curve):
        recalls, costs = [point.recall for point in strand], [_cost(point) for point in strand]
        cost = cost_at_recall(recalls, costs, target)
        if cost is not None:
            found.append((cost, gap_at_recall(recalls, costs, target)))
    return min(found)[1] if found else None


def _cost(point: OperatingPoint) -> float:
    return point.distance_computations


def _least(
    curve: Curve | None, target: float, value: Callable[[OperatingPoint], float]
) -> float | None:
    """The least reading over the strands."""
    readings = [
        cost_at_recall([p.recall for p in strand], [value(p) for p in strand], target)
        for strand in strands(curve or [])
    ]
    return min((reading for reading in readings if reading is not None), default=None)
