"""Builders and the count of distance computations, against brute force."""

from typing import Any

import faiss
import numpy as np
import pytest

from gmm_ivf.eval import methods, training
from gmm_ivf.eval.codes import list_sizes
from gmm_ivf.eval.method_spec import parse_method
from gmm_ivf.eval.methods import build
from gmm_ivf.eval.searchers import Probe, StockSearcher
from gmm_ivf.eval.training import BuildContext


@pytest.fixture
def context(tiny):
    return BuildContext(tiny.base, tiny.base, "l2", 12, 0, 5, "cpu")


def probed_sizes(quantizer, sizes, queries, nprobe):
    """Entries in the nprobe lists whose centres are nearest, one query and list at a time."""
    centres = quantizer.reconstruct_n(0, len(sizes)).astype(np.float64)
    totals = []
    for query in queries.astype(np.float64):
        order = np.argsort(((centres - query) ** 2).sum(axis=1))
        totals.append(sum(int(sizes[i]) for i in order[:nprobe]))
    return totals


@pytest.mark.parametrize("codec", ["Flat", "SQ8", "PQ4x4", "PQ4x4fs"])
def test_IX_R3_scanned_is_the_sum_of_probed_list_sizes_whatever_the_codec(tiny, codec):
    centres, _ = np.unique(tiny.base[:6], axis=0, return_index=True)
    quantizer: Any = faiss.IndexFlatL2(tiny.d)
    quantizer.add(centres)
    index: Any = faiss.index_factory(tiny.d, f"IVF{len(centres)},{codec}")
    faiss.extract_index_ivf(index).quantizer = quantizer
    quantizer.this.own(True)  # SWIG gave it away in the assignment
    index.own_fields = False
    index.train(tiny.base)
    index.add(tiny.base)
    searcher = StockSearcher(index, 0.0, 0.0, {})
    queries = tiny.query[:5]
    searcher.search(queries, 2, Probe(3))
    sizes = np.bincount(quantizer.search(tiny.base, 1)[1][:, 0], minlength=len(centres))
    expected = probed_sizes(quantizer, sizes, queries, 3)
    assert searcher.cost(queries, 2, Probe(3)).scanned.tolist() == expected


def test_IX_R3_copies_are_counted_in_scanned(tiny, context):
    quantizer = faiss.IndexFlatL2(tiny.d)
    quantizer.add(tiny.base[:4])
    index = faiss.IndexIVFFlat(quantizer, tiny.d, 4)
    twice = np.repeat(tiny.base, 2, axis=0)
    ids = np.repeat(np.arange(tiny.n), 2)
    lists = np.tile([0, 1], tiny.n)
    index.add_core(len(twice), *map(faiss.swig_ptr, (twice, ids, lists)))
    cost = StockSearcher(index, 0.0, 0.0, {}).cost(tiny.query[:3], 1, Probe(4))
    assert cost.scanned.tolist() == [2 * tiny.n] * 3


@pytest.mark.parametrize(
    "method",
    [
        "kmeans",
        "gmm",
        "gmm-soft:tau=1/K,max_lists=3",
        "gmm-soft:rule=air",
        "kmeans-soft:rule=top2",
    ],
)
@pytest.mark.parametrize("nprobe", [1, 4, 12])
def test_cost_of_every_method_equals_brute_force(tiny, context, method, nprobe, monkeypatch):
    built = {}
    real = methods.filled
    monkeypatch.setattr(methods, "filled", lambda i, base: built.update(index=i) or real(i, base))
    searcher = build(parse_method(method), context)
    searcher.search(tiny.query, 3, Probe(nprobe))
    cost = searcher.cost(tiny.query, 3, Probe(nprobe))
    index = getattr(built["index"], "index", built["index"])
    sizes = list_sizes(index)
    quantizer = faiss.downcast_index(index.quantizer)
    assert cost.scanned.tolist() == probed_sizes(quantizer, sizes, tiny.query, nprobe)
    assert set(cost.coarse) == {12.0}
    assert set(cost.ranking) == {0.0}
    assert searcher.report.entries_per_vector == pytest.approx(sizes.sum() / tiny.n)


def test_IX_R4_comparisons_with_centres_are_counted_and_kept_apart(clustered):
    data = clustered(5000, 20, 8)
    costs = {}
    for nlist, nprobe in ((100, 1), (500, 5)):
        context = BuildContext(data.base, data.base, "l2", nlist, 0, 3, "cpu")
        cost = build(parse_method("kmeans"), context).cost(data.query, 1, Probe(nprobe))
        costs[nlist] = (cost.scanned.mean(), cost.coarse.mean())
    assert [coarse for _, coarse in costs.values()] == [100, 500]
    # Scanning alone sees no difference; the total does.
    assert costs[500][0] == pytest.approx(costs[100][0], rel=0.5)
    assert sum(costs[500]) > 2 * sum(costs[100])


def test_kmeans_uses_all_training_rows_and_says_so(tiny, context):
    report = build(parse_method("kmeans"), context).report
    settings = {key: report.settings[key] for key in ("niter", "nredo", "index")}
    assert settings == {"niter": 5, "nredo": 1, "index": "IVF12,Flat"}
    assert report.settings["trainer"].startswith("faiss k-means, CPU, ")
    assert report.settings["max_points_per_centroid"] * context.nlist >= tiny.n


def test_kmeans_depends_on_the_seed_only(tiny):
    def answer(seed):
        context = BuildContext(tiny.base, tiny.base, "l2", 12, seed, 5, "cpu")
        return build(parse_method("kmeans"), context).cost(tiny.query, 1, Probe(2)).scanned.tolist()

    assert answer(3) == answer(3)
    assert answer(3) != answer(4)


def test_methods_that_differ_in_assignment_share_one_mixture(context, monkeypatch):
    from gmm_ivf.quantizer import GMMQuantizer

    trained = []
    real = GMMQuantizer.train
    monkeypatch.setattr(GMMQuantizer, "train", lambda q, x: (trained.append(q), real(q, x)))
    specs = ["gmm", "gmm-soft", "gmm-soft:tau=1/K", "gmm:covariance_type=diag"]
    reports = [build(parse_method(spec), context).report for spec in specs]
    assert len(trained) == 2
    seconds = [report.settings["fit_seconds"] for report in reports]
    assert seconds[0] == seconds[1] == seconds[2] != seconds[3]
    assert all(r.train_seconds >= s for r, s in zip(reports, seconds, strict=True))


def test_kmeans_is_trained_once_for_all_that_use_it(context, monkeypatch):
    trained = []
    real = faiss.Clustering.train
    monkeypatch.setattr(faiss.Clustering, "train", lambda c, *a: (trained.append(c), real(c, *a)))
    specs = ("kmeans", "kmeans:coarse=hnsw4", "kmeans-soft:rule=top2", "kmeans-soft:rule=soar")
    searchers = [build(parse_method(spec), context) for spec in specs]
    assert len(trained) == 1
    reports = [searcher.report for searcher in searchers]
    assert [report.entries_per_vector for report in reports[:3]] == [1.0, 1.0, 2.0]
    assert (
        min(r.train_seconds for r in reports)
        >= context.trained[parse_method("kmeans:niter=5")].seconds
    )
    assert reports[2].settings["rule"] == "Top2()"
    assert reports[2].settings["niter"] == 5
    assert reports[3].settings["rule"] == "Soar(lambda_=1.0, strict=False, candidates=10)"
    build(parse_method("kmeans:niter=1"), context)
    assert len(trained) == 2


@pytest.mark.parametrize(
    "options", ["links=4", "links=4,visit=list", "links=4,coarse=hnsw4", "links=4,codec=SQ8"]
)
def test_cells_store_once_and_stop_between_lists(tiny, context, options):
    searcher = build(parse_method(f"kmeans-cells:{options}"), context)
    assert searcher.report.entries_per_vector == 1.0
    assert searcher.report.settings["rows_of_cells"] == tiny.n
    probe = Probe(12, 16 * ("hnsw" in options))
    ids, _ = searcher.search(tiny.query, 5, probe)
    pairs = zip(ids, tiny.ground_truth[:, :5], strict=True)
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in pairs]) > 0.9
    assert searcher.cost(tiny.query, 5, probe).ranking.mean() > 0
    limited = Probe(1, probe.ef_search, 0, 40)
    searcher.search(tiny.query, 5, limited)
    cost = searcher.cost(tiny.query, 5, limited)
    assert cost.scanned.max() <= 40
    assert cost.coarse.min() > 0


def test_adaptive_probing_scans_by_distance(tiny, context):
    searcher = build(parse_method("kmeans-soft:adaptive=true,max_lists=1"), context)
    assert searcher.report.settings["adaptive"] is True
    assert searcher.report.entries_per_vector == 1
    searcher.search(tiny.query, 3, Probe(4))
    scanned = searcher.cost(tiny.query, 3, Probe(4)).scanned
    fixed = build(parse_method("kmeans-soft:max_lists=1"), context)
    fixed.search(tiny.query, 3, Probe(4))
    assert scanned.std() > 1.5 * fixed.cost(tiny.query, 3, Probe(4)).scanned.std()


def test_soft_settings_name_the_threshold_in_use(context):
    report = build(parse_method("gmm-soft:tau=2/K"), context).report
    assert report.settings["tau"] == pytest.approx(2 / 12)
    assert report.settings["max_lists"] == 2
    assert report.settings["covariance_type"] == "spherical"


@pytest.mark.parametrize("metric", ["ip", "cosine"])
def test_inner_product_is_searched_as_such(clustered, metric):
    data = clustered(600, 10, 6, metric)
    context = BuildContext(data.base, data.base, metric, 8, 0, 4, "cpu")
    for method in ("kmeans", "gmm", "gmm-soft:tau=1/K", "gmm-soft:rule=soar", "kmeans-soft"):
        ids, products = build(parse_method(method), context).search(data.query, 5, Probe(8))
        expected = np.sort(data.query @ data.base.T, axis=1)[:, ::-1][:, :5]
        np.testing.assert_allclose(products, expected, rtol=1e-5, atol=1e-6)
        assert all(len(set(row)) == 5 for row in ids.tolist())


def test_payload_counts_codes_ids_and_centres(tiny, context):
    report = build(parse_method("kmeans"), context).report
    per_vector, centres = 4 * tiny.d + 8, 12 * (4 * tiny.d + 48)
    assert report.bytes_per_vector == pytest.approx(per_vector + centres / tiny.n)


def test_blocks_cover_the_base_once(monkeypatch):
    monkeypatch.setattr(training, "_ADD_BYTES", 4 * 3 * 7)
    base = np.arange(60, dtype=np.float64).reshape(20, 3)
    parts = list(training.blocks(base))
    assert [len(part) for part in parts] == [7, 7, 6]
    assert {part.dtype for part in parts} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(np.concatenate(parts), base)
