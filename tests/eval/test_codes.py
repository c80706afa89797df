"""Work and bytes of stock FAISS indexes, and searches of each kind."""

from typing import Any

import faiss
import numpy as np
import pytest

from gmm_ivf.eval.codes import code_work, index_bytes
from gmm_ivf.eval.method_spec import factory_string, parse_method
from gmm_ivf.eval.methods import build
from gmm_ivf.eval.searchers import Probe, StockSearcher, coarse_search
from gmm_ivf.eval.training import BuildContext

D, NLIST = 16, 8


@pytest.fixture(scope="module")
def rows(clustered):
    return clustered(600, 20, D)


@pytest.fixture(scope="module")
def context(rows):
    return BuildContext(rows.base, rows.base, "l2", NLIST, 0, 4, "cpu")


def made(text: str, rows: Any, refined: bool = False) -> Any:
    index = faiss.index_factory(D, text)
    ivf: Any = faiss.downcast_index(faiss.extract_index_ivf(index))
    faiss.downcast_index(ivf.quantizer).add(rows.base[:NLIST])
    if hasattr(ivf, "pq"):
        ivf.pq.cp.min_points_per_centroid = 1
    index.train(rows.base)
    index = faiss.IndexRefineFlat(index) if refined else index
    index.add(rows.base)
    return index


@pytest.mark.parametrize(
    ("codec", "per_entry", "per_list", "per_query"),
    [
        ("Flat", 1.0, 0.0, 0.0),
        ("SQ8", 1.0, 0.0, 0.0),
        # 8 look-ups a code; tables of 8 x 16 sums a list and of 16 distances a query.
        ("PQ8x4", 8 / D, 8 * 16 / D, 16.0),
        ("PQ8x4fs", 8 / D, 0.0, 16.0),
        ("PQ8x4fsr", 8 / D, 8 * 16 / D, 16.0),
        ("RaBitQ", 1 / 8, 1.0, 0.0),
        ("RaBitQ4", 4 / 8, 1.0, 0.0),
        ("RaBitQfs", 1 / 4, 5.0, 0.0),
    ],
)
def test_work_of_a_codec(rows, codec, per_entry, per_list, per_query):
    index = made(f"IVF{NLIST},{codec}", rows)
    work = code_work(index)
    assert (work.per_entry, work.per_list, work.per_query) == (per_entry, per_list, per_query)


def test_work_of_inner_products_has_no_table_a_list(rows):
    index = faiss.index_factory(D, f"IVF{NLIST},PQ8x4", faiss.METRIC_INNER_PRODUCT)
    assert code_work(index).per_list == 0


def test_bytes_count_what_a_search_needs(rows):
    n, lists = 600, NLIST * (48 + 4 * D)
    assert index_bytes(made(f"IVF{NLIST},Flat", rows)) == n * (4 * D + 8) + lists
    assert index_bytes(made(f"IVF{NLIST},SQ8", rows)) == n * (D + 8) + lists
    codebook, precomputed = 4 * 16 * D, 4 * NLIST * 8 * 16
    pq = index_bytes(made(f"IVF{NLIST},PQ8x4", rows))
    assert pq == n * (4 + 8) + lists + codebook + precomputed
    refined = made(f"IVF{NLIST},PQ8x4", rows, refined=True)
    assert index_bytes(refined) == pq + 4 * D * n
    rotated = index_bytes(made(f"RR{D},IVF{NLIST},SQ8", rows))
    assert rotated == n * (D + 8) + lists + 4 * D**2


def test_bytes_of_fast_scan_count_padded_blocks(rows):
    index = made(f"IVF{NLIST},PQ8x4fs", rows)
    sizes = [index.invlists.list_size(i) for i in range(NLIST)]
    padded = sum(-(-size // 32) * 32 for size in sizes)
    assert index_bytes(index) == padded * 4 + 600 * 8 + NLIST * (48 + 4 * D) + 4 * 16 * D


def test_a_graph_over_the_centres_has_bytes(rows):
    flat, graph = (index_bytes(made(f"IVF{NLIST}{g},Flat", rows)) for g in ("", "_HNSW4"))
    # 8 links a centre and more, of 4 bytes.
    assert graph >= flat + NLIST * 8 * 4


def test_comparisons_of_a_graph_are_those_that_faiss_counts(rows):
    graph = faiss.IndexHNSWFlat(D, 4)
    graph.add(rows.base)
    _, few = coarse_search(graph, rows.query, Probe(4, 8))
    lists, many = coarse_search(graph, rows.query, Probe(4, 128))
    assert lists.shape == (20, 4)
    assert 8 < few < many <= 600
    assert coarse_search(graph, rows.query, Probe(4))[1] == 600


@pytest.mark.parametrize(
    "options",
    [
        "coarse=hnsw4",
        "codec=PQ8x4,refine=true",
        "codec=PQ8x4fs,refine=true,coarse=hnsw4",
        "codec=RaBitQ,rotation=RR,refine=true",
        "codec=SQ8,rotation=RR",
    ],
)
@pytest.mark.parametrize("name", ["kmeans", "gmm"])
def test_all_lists_and_re_ranking_find_nearly_everything(rows, context, name, options):
    spec = parse_method(f"{name}:{options}")
    searcher = build(spec, context)
    probe = Probe(NLIST, 16 * ("hnsw" in options), 16 * ("refine" in options))
    ids, _ = searcher.search(rows.query, 5, probe)
    found = [len(set(a) & set(b)) / 5 for a, b in zip(ids, rows.ground_truth[:, :5], strict=True)]
    assert np.mean(found) > 0.95
    cost = searcher.cost(rows.query, 5, probe)
    assert set(cost.scanned) == {600.0}
    again = 5 * probe.refine_factor
    assert cost.ranking.min() >= again + D * ("rotation" in options)


def test_re_ranked_vectors_are_those_scanned_at_most(rows):
    index = made(f"IVF{NLIST},SQ8", rows, refined=True)
    cost = StockSearcher(index, 0.0, 0.0, {}).cost(rows.query, 10, Probe(1, 0, 64))
    np.testing.assert_array_equal(cost.ranking, np.minimum(cost.scanned, 640))


@pytest.mark.parametrize("name", ["gmm-soft", "kmeans-soft:rule=soar"])
def test_methods_of_ours_take_codec_graph_and_re_ranking(rows, context, name):
    spec = parse_method(f"{name}{',' if ':' in name else ':'}codec=SQ4,coarse=hnsw4,refine=true")
    searcher = build(spec, context)
    ids, _ = searcher.search(rows.query, 5, Probe(NLIST, 16, 8))
    found = [len(set(a) & set(b)) / 5 for a, b in zip(ids, rows.ground_truth[:, :5], strict=True)]
    assert np.mean(found) > 0.95
    cost = searcher.cost(rows.query, 5, Probe(NLIST, 16, 8))
    assert (cost.coarse > 0).all()
    assert (cost.ranking > 0).all()


def test_factory_string_of_a_method():
    spec = parse_method("kmeans:codec=PQ32x4fs,coarse=hnsw16,rotation=RR,refine=true")
    assert factory_string(spec, 256, 64) == "RR64,IVF256_HNSW16,PQ32x4fs"
    assert factory_string(parse_method("gmm:rotation=OPQ8"), 4, 16) == "OPQ8,IVF4,Flat"


def test_a_codec_that_does_not_fit_is_said_in_a_sentence(context):
    with pytest.raises(ValueError, match=r"faiss.index_factory\(16, 'IVF8,PQ5'\) fails: .*choose"):
        build(parse_method("kmeans:codec=PQ5"), context)
