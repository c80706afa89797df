"""The methods that `eval.recall` compares: how each is built from trained centroids."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gmm_ivf.eval.environment import require_faiss
from gmm_ivf.eval.method_spec import (
    CELL_KEYS,
    DEFAULTS,
    RESPONSIBILITY,
    SOFT_BUDGET,
    MethodSpec,
    factory_string,
    rule_of,
)
from gmm_ivf.eval.searchers import Searcher, SoftSearcher, StockSearcher
from gmm_ivf.eval.training import BuildContext, filled, trained_kmeans, trained_mixture


def build(spec: MethodSpec, context: BuildContext) -> Searcher:
    """Train and fill the index of a method, timing both steps.

    Raises
    ------
    ValueError
        When the method cannot be built on this data.
    """
    return _BUILDERS[spec.name](spec, context)


def _build_kmeans(spec: MethodSpec, context: BuildContext) -> Searcher:
    trained = trained_kmeans(spec, context)
    return _stock(spec, context, trained.table, trained.seconds, trained.settings)


def _build_gmm(spec: MethodSpec, context: BuildContext) -> Searcher:
    quantizer, settings = trained_mixture(spec, context)
    table = quantizer.reconstruct_n(0, context.nlist)
    return _stock(spec, context, table, settings["fit_seconds"], settings)


def _stock(
    spec: MethodSpec, context: BuildContext, table: np.ndarray, seconds: float, settings: dict
) -> Searcher:
    """A stock FAISS index over given centres, as `faiss.index_factory` makes it."""
    faiss = require_faiss()
    text = factory_string(spec, context.nlist, context.d)
    start = time.perf_counter()
    index = _made(text, context)
    if isinstance(index, faiss.IndexPreTransform):
        # The rotation is learnt first: the centres go with it, and distances stay what they are.
        rotation = index.chain.at(0)
        rotation.train(context.train)
        table = rotation.apply(table)
    ivf = faiss.downcast_index(faiss.extract_index_ivf(index))
    faiss.downcast_index(ivf.quantizer).add(table)
    _spare_training(ivf)
    index.train(context.train)
    seconds += time.perf_counter() - start
    if spec.get("refine"):
        index = faiss.IndexRefineFlat(index)
    add_seconds = filled(index, context.base)
    return StockSearcher(index, seconds, add_seconds, settings | {"index": text})


def _spare_training(ivf: Any) -> None:
    """Leave out what costs a product quantizer's training minutes and changes no search here."""
    if hasattr(ivf, "pq"):
        ivf.pq.cp.min_points_per_centroid = 1  # FAISS warns once a sub-quantizer below 39
    if hasattr(ivf, "do_polysemous_training"):
        ivf.do_polysemous_training = False  # renumbers codes for a filter that nobody asks for


def _made(text: str, context: BuildContext) -> Any:
    try:
        return require_faiss().index_factory(context.d, text, context.faiss_metric)
    except RuntimeError as error:
        reason = str(error).split(": ")[-1].strip()
        raise ValueError(
            f"faiss.index_factory({context.d}, {text!r}) fails: {reason}; choose another codec"
        ) from None


def _quantizer(spec: MethodSpec, context: BuildContext) -> tuple[Any, float, dict[str, Any]]:
    """The quantizer of a method of ours, the seconds of its training, and its settings.

    For inner products the centroids of k-means are normalised, as rules and cells need.
    """
    from gmm_ivf.quantizer import GMMQuantizer

    metric, coarse = context.faiss_metric, spec.get("coarse", "flat")
    if spec.name.startswith("kmeans"):
        trained = trained_kmeans(spec, context)
        quantizer = GMMQuantizer.from_centroids(trained.table, metric, coarse=coarse)
        return quantizer, trained.seconds, trained.settings
    quantizer, settings = trained_mixture(spec, context)
    if coarse != "flat":
        quantizer = GMMQuantizer.from_mixture(quantizer.mixture, metric, coarse=coarse)
    return quantizer, settings["fit_seconds"], settings


def _build_soft(spec: MethodSpec, context: BuildContext) -> Searcher:
    return _ours(spec, context, _budget(spec, context))


def _build_cells(spec: MethodSpec, context: BuildContext) -> Searcher:
    cells = {key: value for key, value in spec.options if key in CELL_KEYS}
    return _ours(spec, context, {"layout": "cells", "cells": cells})


def _ours(spec: MethodSpec, context: BuildContext, options: dict[str, Any]) -> Searcher:
    """`IndexIVFGMM` with given options, over the codec of the method."""
    from gmm_ivf.index import IndexIVFGMM

    quantizer, seconds, settings = _quantizer(spec, context)
    options = options | {"refine": "flat" if spec.get("refine") else None}
    # The graph of an HNSW coarse quantizer is the quantizer's own.
    template = _made(factory_string(spec.without("coarse"), context.nlist, context.d), context)
    _spare_training(template)
    quantizer.attach(template)
    soft = IndexIVFGMM(template, quantizer, **options)
    start = time.perf_counter()
    # The centres are trained already, the rest is not. Cells are many, and learn more from all the
    # vectors that will lie in them than from rows that are enough for centres.
    in_cells = options.get("layout") == "cells"
    soft.train(context.base if in_cells else context.train)
    rest_seconds = time.perf_counter() - start
    settings = settings | options | {"rest_seconds": rest_seconds, "tau": soft.tau}
    settings |= {"rule": str(options["rule"])} if "rule" in options else {}
    settings |= {"rows_of_cells": len(context.base)} if in_cells else {}
    return SoftSearcher(soft, seconds + rest_seconds, filled(soft, context.base), settings)


def _budget(spec: MethodSpec, context: BuildContext) -> dict[str, Any]:
    """Rule, cap and budget of a soft method, as `IndexIVFGMM` takes them."""
    rule, defaults = rule_of(spec), DEFAULTS[spec.name]
    options = {"rule": rule}
    options |= {key: spec.get(key, defaults[key]) for key in ("adaptive", "max_lists")}
    if rule != RESPONSIBILITY:
        return options
    given = {key: value for key, value in spec.options if key in SOFT_BUDGET}
    if "tau" in given:
        given["tau"] = given["tau"].resolve(context.nlist)
    else:
        given.setdefault("replication", defaults["replication"])
    return options | given


_BUILDERS: dict[str, Callable[[MethodSpec, BuildContext], Searcher]] = {
    "kmeans": _build_kmeans,
    "gmm": _build_gmm,
    "gmm-soft": _build_soft,
    "kmeans-soft": _build_soft,
    "gmm-cells": _build_cells,
    "kmeans-cells": _build_cells,
}
