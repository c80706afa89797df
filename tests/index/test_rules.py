"""Rules of geometry: against loops over single vectors in float64, and on awkward means."""

import faiss
import numpy as np
import pytest
import torch

from gmm_ivf import GMMQuantizer, IndexIVFGMM
from gmm_ivf._rule_pairs import pairs_by_rule, pairs_on_gpu
from gmm_ivf.rules import RULES, Air, Near, Ratio, Soar, Spann, Top2, option_names


def residuals(x, means, candidates):
    """Candidates of one vector, nearest first, and their residuals c_j - x."""
    r = means.astype("f8") - x.astype("f8")
    order = np.argsort(np.linalg.norm(r, axis=1), kind="stable")[:candidates]
    return order, r[order]


def naive_pair(rule, x, means, loss):
    order, r = residuals(x, means, rule.candidates)
    losses = [loss(r[0], r_j) for r_j in r]
    if rule.strict:
        losses[0] = np.inf
    best = int(np.argmin(losses))
    return {order[0], order[best]} if len(order) > 1 else {order[0]}


def naive_air(rule, x, means, max_lists):
    return naive_pair(rule, x, means, lambda r_1, r_j: r_j @ r_j + rule.lambda_ * (r_1 @ r_j))


def naive_soar(rule, x, means, max_lists):
    order, r = residuals(x, means, rule.candidates)
    bound = np.inf if rule.strict else (1 + rule.lambda_) * (r[0] @ r[0])
    kept = [0]
    while len(kept) < min(max_lists, len(order)):
        along = [sum((r[i] @ r_j) ** 2 / (r[i] @ r[i]) for i in kept) for r_j in r]
        losses = [r_j @ r_j + rule.lambda_ * a for r_j, a in zip(r, along, strict=True)]
        best = min(set(range(len(order))) - set(kept), key=losses.__getitem__)
        if not losses[best] < bound:
            break
        kept.append(best)
    return set(order[kept])


def naive_spann(rule, x, means, max_lists):
    order, r = residuals(x, means, rule.candidates)
    d = np.linalg.norm(r, axis=1)
    kept = [0]
    for j in range(1, len(order)):
        near = rule.eps is None or d[j] <= (1 + rule.eps) * d[0]
        apart = all(rule.rng_factor * np.linalg.norm(r[j] - r[i]) >= d[j] for i in kept)
        if near and apart and len(kept) < max_lists:
            kept.append(j)
    return set(order[kept])


def naive_top2(rule, x, means, max_lists):
    return set(residuals(x, means, 2)[0])


def naive_ratio(rule, x, means, max_lists):
    order, r = residuals(x, means, rule.candidates)
    d = np.linalg.norm(r, axis=1)
    return set(order[d <= (1 + rule.eps) * d[0]][:max_lists])


NAIVE = {
    Air: naive_air,
    Soar: naive_soar,
    Spann: naive_spann,
    Top2: naive_top2,
    Ratio: naive_ratio,
}
CASES = [
    Air(),
    Air(lambda_=0.1),
    Air(lambda_=2.0, strict=True, candidates=4),
    Soar(),
    Soar(lambda_=0.3, candidates=5),
    Soar(lambda_=0.55),
    Soar(strict=True),
    Spann(),
    Spann(rng_factor=0.8, candidates=6),
    Spann(rng_factor=1.5, eps=0.3),
    Top2(),
    Ratio(),
    Ratio(eps=0.4, candidates=3),
]
ALL = pytest.mark.parametrize("rule", CASES, ids=str)


def lists_of(index, x, entries_of):
    """Set of lists of every vector of an index that holds just x."""
    index.add(x)
    found = [set() for _ in x]
    for number, ids in enumerate(entries_of(index.index)):
        for i in ids:
            found[i].add(number)
    return found


def over(means, rule, max_lists=2, metric=faiss.METRIC_L2):
    q = GMMQuantizer.from_centroids(means, metric)
    flat = faiss.IndexIVFFlat(q, q.d, q.nlist, metric)
    return IndexIVFGMM(flat, q, rule=rule, max_lists=max_lists)


@ALL
@pytest.mark.parametrize("max_lists", [2, 3, 8])
def test_rules_equal_loops(blobs, entries_of, rule, max_lists):
    x, means = blobs(400, 6), blobs(40, 6, seed=1)
    found = lists_of(over(means, rule, max_lists), x, entries_of)
    assert found == [NAIVE[type(rule)](rule, row, means, max_lists) for row in x]
    assert 1 < max(map(len, found)) <= max_lists


@ALL
def test_rules_under_inner_products_compare_unit_rows(blobs, entries_of, rule):
    x, means = blobs(300, 5), blobs(30, 5, seed=1)
    index = over(means, rule, 3, faiss.METRIC_INNER_PRODUCT)
    found = lists_of(index, x, entries_of)
    unit = [a / np.linalg.norm(a.astype("f8"), axis=1)[:, None] for a in (x, means)]
    want = [NAIVE[type(rule)](rule, row, unit[1], 3) for row in unit[0]]
    # Rows are normalised in float32 here: a decision on the edge may fall either way.
    assert np.mean([a == b for a, b in zip(found, want, strict=True)]) > 0.99
    nearest = index.quantizer.search(x, 1)[1][:, 0]
    assert all(first in lists for first, lists in zip(nearest, found, strict=True))


@ALL
def test_rules_on_the_means_of_a_mixture(blobs, trained, codec, entries_of, table, rule):
    x = blobs(600, 6)
    q = trained(x, 12)
    index = IndexIVFGMM(codec("Flat", q), q, rule=rule, max_lists=3)
    assert index.is_trained  # nothing is left to train
    assert index.tau is None
    found = lists_of(index, x, entries_of)
    assert found == [NAIVE[type(rule)](rule, row, table(q), 3) for row in x]


@ALL
def test_rules_do_not_change_far_from_the_origin(blobs, entries_of, rule):
    # Multiples of 1/16 are exact at 1e6 in float32.
    x, means = (np.rint(64 * a) / np.float32(16) for a in (blobs(400, 6), blobs(40, 6, seed=1)))
    plain = lists_of(over(means, rule, 3), x, entries_of)
    index = over(means + np.float32(1e6), rule, 3)
    far = lists_of(index, x + np.float32(1e6), entries_of)
    assert index._layout._assigner.ranker.is_centred
    # Centring rounds, which decides where two distances are equal.
    assert np.mean([a == b for a, b in zip(plain, far, strict=True)]) > 0.98


@pytest.mark.parametrize("name", RULES)
def test_a_name_means_the_defaults(blobs, entries_of, name):
    x, means = blobs(200, 4), blobs(20, 4, seed=1)
    by_name = lists_of(over(means, name), x, entries_of)
    assert by_name == lists_of(over(means, RULES[name]()), x, entries_of)


@ALL
@pytest.mark.parametrize("nlist", [1, 2])
def test_few_lists(blobs, entries_of, rule, nlist):
    x, means = blobs(100, 4), blobs(nlist, 4, seed=1)
    found = lists_of(over(means, rule, 8), x, entries_of)
    assert found == [NAIVE[type(rule)](rule, row, means, 8) for row in x]


@ALL
def test_one_list_equals_stock(blobs, entries_of, rule):
    x, means = blobs(300, 6), blobs(20, 6, seed=1)
    index = over(means, rule, 1)
    index.add(x)
    flat = faiss.IndexFlatL2(6)
    flat.add(means)
    stock = faiss.IndexIVFFlat(flat, 6, 20)
    stock.add(x)
    for ours, theirs in zip(entries_of(index.index), entries_of(stock), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    index.nprobe = stock.nprobe = 4
    for ours, theirs in zip(index.search(x, 5), stock.search(x, 5), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("rule", "copies"),
    [
        (Air(), 1),
        (Air(strict=True), 2),
        (Soar(), 1),
        (Soar(strict=True), 1),
        (Spann(), 2),  # |c_2 - c_1| = d_2 is enough
        (Spann(eps=0.5), 1),
        (Top2(), 2),
        (Ratio(eps=0.5), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e15])
def test_vectors_that_equal_their_mean(blobs, entries_of, rule, copies, scale):
    means = blobs(15, 5) * np.float32(scale)
    found = lists_of(over(means, rule), means, entries_of)
    assert {len(lists) for lists in found} == {copies}
    assert all(i in lists for i, lists in enumerate(found))


@pytest.mark.parametrize(
    ("rule", "copies"),
    [
        (Air(), 1),
        (Soar(), 1),
        (Spann(), 1),
        (Air(lambda_=0.1), 1),
        (Soar(lambda_=0.7), 1),
        (Top2(), 2),
        (Ratio(), 2),
    ],
    ids=str,
)
def test_a_duplicate_of_the_nearest_mean_gains_nothing(blobs, entries_of, rule, copies):
    x = blobs(300, 7)
    means = np.repeat(blobs(1, 7, seed=1), 3, axis=0)
    found = lists_of(over(means, rule), x, entries_of)
    assert all(lists == set(range(copies)) for lists in found)


@ALL
def test_duplicate_means_do_not_repeat_a_list(blobs, entries_of, rule):
    x, means = blobs(300, 5), np.tile(blobs(6, 5, seed=1), (4, 1))
    index = over(means, rule, 4)
    index.add(x)
    held = np.concatenate([np.unique(ids) for ids in entries_of(index.index)])
    assert len(held) == index.index.ntotal
    assert (np.bincount(held, minlength=300) >= 1).all()


def test_equal_distances_go_to_the_lower_number(entries_of):
    means = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], "f4")
    x = np.zeros((1, 2), "f4")
    assert lists_of(over(means, Top2()), x, entries_of) == [{0, 1}]
    assert lists_of(over(means, Ratio(eps=0.0), 3), x, entries_of) == [{0, 1, 2}]
    assert lists_of(over(means, Air()), x, entries_of) == [{0, 1}]  # opposite
    assert lists_of(over(means, Soar()), x, entries_of) == [{0, 2}]  # orthogonal


def test_primary_stays_where_another_mean_is_as_near():
    table = np.array([[1, 0], [-1, 0], [0, 3]], "f4")
    near = Near(np.zeros((2, 2), "f4"), table, np.array([1, 0]), np.array([[0, 2], [0, -1]]))
    assert near.lists.tolist() == [[1, 0], [0, -1]]
    assert near.squared[0].tolist() == [1.0, 1.0]
    assert near.between(np.zeros(2, int), np.array([0, 1]), np.array([1, 1])).tolist() == [4, 0]
    zero, one = np.zeros(2, int), np.array([0, 1])
    assert near.products(one, zero).tolist()[0] == [1.0, -1.0]


def test_rows_are_gathered_in_parts(blobs, entries_of, monkeypatch):
    x, means = blobs(300, 6), blobs(40, 6, seed=1)
    whole = lists_of(over(means, Spann(), 4), x, entries_of)
    monkeypatch.setattr("gmm_ivf._rule_pairs._GATHERED", 7 * 40 * 6)
    assert lists_of(over(means, Spann(), 4), x, entries_of) == whole


def test_search_finds_each_id_once(blobs):
    x, means = blobs(500, 6), blobs(20, 6, seed=1)
    index = over(means, Air(strict=True))
    index.add(x)
    assert index.stats()["entries_per_vector"] == 2
    index.nprobe = 20
    truth = faiss.IndexFlatL2(6)
    truth.add(x)
    np.testing.assert_array_equal(index.search(x[:50], 10)[1], truth.search(x[:50], 10)[1])
    assert index.remove_ids(np.arange(100)) == 100
    assert index.index.ntotal == 800
    assert "max_lists=2, rule=Air(lambda_=0.5, strict=True, candidates=10)" in repr(index)


@pytest.mark.parametrize("name", ["PQ", "SQ8", "RaBitQ"])
def test_training_needs_no_threshold(blobs, soft, name):
    x = blobs(800, 8)
    index = soft(x, 6, name, rule="soar")
    index.add(x)
    assert 1 < index.stats()["entries_per_vector"] < 2
    index.nprobe = 6
    labels = index.search(x[:50], 10)[1]
    assert all(len(set(row)) == 10 for row in labels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Air(lambda_=-0.1), r"lambda_ must be a finite number of at least 0; got -0.1"),
        (lambda: Soar(lambda_=float("nan")), "lambda_ must be"),
        (lambda: Soar(lambda_=float("inf")), "lambda_ must be a finite"),
        (lambda: Air(lambda_="1"), "lambda_ must be"),  # pyright: ignore
        (lambda: Air(strict=1), "strict must be True or False; got 1"),  # pyright: ignore
        (lambda: Air(candidates=1), "candidates must be an integer of at least 2; got 1"),
        (lambda: Spann(rng_factor=0), "rng_factor must be a finite number above 0; got 0"),
        (lambda: Spann(eps=-1), "eps must be"),
        (lambda: Ratio(eps=None), "eps must be"),  # pyright: ignore
    ],
)
def test_options_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_option_names():
    assert option_names("spann") == ("rng_factor", "eps", "candidates")
    assert option_names("top2") == ()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("budget", [{"tau": 0.1}, {"replication": 1.5}], ids=str)
def test_thresholds_belong_to_responsibilities(name, budget):
    q = GMMQuantizer(4, 3)
    with pytest.raises(ValueError, match=r"belongs to rule=.responsibility"):
        IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 3), q, rule=name, **budget)


def test_centroids_have_no_posteriors(blobs):
    means = blobs(5, 4)
    with pytest.raises(ValueError, match="needs a mixture, and q was made from centroids"):
        over(means, "responsibility")
    assert over(means, "responsibility", 1).tau == 1.0


@ALL
@pytest.mark.parametrize("max_lists", [2, 4])
def test_tensors_give_what_arrays_give(blobs, rule, max_lists):
    # Multiples of 1/8 make distances exact in float64 and equal ones frequent.
    x, table = (np.rint(8 * a) / np.float32(8) for a in (blobs(300, 5), blobs(20, 5, seed=1)))
    table[7], table[12], x[:20] = table[3], table[3], table
    flat = faiss.IndexFlatL2(5)
    flat.add(table)
    lists = flat.search(x, min(rule.candidates, 20))[1]
    lists[::9, -1] = -1
    arrays = x, table, lists[:, 0].copy(), lists
    near = Near(*arrays)
    tensors = Near(*map(torch.from_numpy, arrays))
    np.testing.assert_array_equal(tensors.lists.numpy(), near.lists)
    valid = near.lists >= 0
    np.testing.assert_array_equal(tensors.squared.numpy()[valid], near.squared[valid])
    np.testing.assert_array_equal(
        rule.choose(tensors, max_lists).numpy(), rule.choose(near, max_lists)
    )


@ALL
def test_the_path_of_a_gpu_on_the_cpu(blobs, rule, monkeypatch):
    x, table = blobs(400, 6), blobs(40, 6, seed=1)
    flat = faiss.IndexFlatL2(6)
    flat.add(table)
    lists = flat.search(x, min(rule.candidates, 40))[1]
    want = pairs_by_rule(rule, x, table, lists[:, 0], lists, 3)
    monkeypatch.setattr("gmm_ivf._rule_pairs._GATHERED_ON_GPU", 7 * 40 * 6)
    found = pairs_on_gpu(rule, x, table, 3, torch.device("cpu"))
    for ours, theirs in zip(found, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@ALL
def test_pairs_on_a_gpu_equal_those_of_the_cpu(blobs, rule):
    x, table = blobs(2000, 24), blobs(100, 24, seed=1)
    found = pairs_on_gpu(rule, x, table, 3, torch.device("cuda"))
    want = pairs_on_gpu(rule, x, table, 3, torch.device("cpu"))
    one, other = (set(zip(*map(np.ndarray.tolist, pairs), strict=True)) for pairs in (found, want))
    # Where a decision is equal to rounding, it may fall either way.
    assert len(one ^ other) < 1e-3 * len(other)
