"""GM-G3: assignment and probing do not change when all vectors are shifted."""

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM
from gmm_ivf._coarse import CoarseRanker

GRID = 16  # 1/16 is the spacing of float32 at 1e6: shifts of multiples of it are exact
SHIFTS = pytest.mark.parametrize("shift", [1e3, 1e4, 1e6])


@pytest.fixture
def grid_points(blobs):
    return lambda n, d, seed=0: np.rint(4 * blobs(n, d, seed) * GRID) / np.float32(GRID)


def built(x, nlist, kind="spherical", **options):
    q = GMMQuantizer(x.shape[1], nlist, random_state=0, tol=1e-2, covariance_type=kind)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, x.shape[1], nlist), q, **options)
    index.train(x)
    index.add(x)
    return index


@SHIFTS
@pytest.mark.parametrize("kind", ["spherical", "diag", "tied", "full"])
def test_ix_g3_lists_and_results_stay(grid_points, entries_of, shift, kind):
    x, queries = grid_points(1500, 6), grid_points(100, 6, seed=1)
    plain, far = built(x, 8, kind), built(x + np.float32(shift), 8, kind)
    np.testing.assert_array_equal((x + np.float32(shift)) - np.float32(shift), x)
    assert far._layout._assigner.ranker.is_centred
    assert not plain._layout._assigner.ranker.is_centred
    moved = sum(
        len(np.setxor1d(a, b))
        for a, b in zip(entries_of(plain.index), entries_of(far.index), strict=True)
    )
    assert moved <= 4  # posteriors at the threshold, to rounding
    plain.nprobe = far.nprobe = 3
    want, got = plain.search(queries, 10), far.search(queries + np.float32(shift), 10)
    assert (want[1] == got[1]).mean() > 0.999
    np.testing.assert_array_equal(plain.last_search.coarse, far.last_search.coarse)


@SHIFTS
def test_ix_g3_recall_stays(grid_points, shift):
    """The data as they are, rounded by the shift: recall against the exact answer on them."""
    x, queries = grid_points(2000, 8), grid_points(100, 8, seed=1)
    truth = faiss.IndexFlatL2(8)
    truth.add(x)
    exact = truth.search(queries, 10)[1]
    index = built(x + np.float32(shift), 16)
    index.nprobe = 16
    found = index.search(queries + np.float32(shift), 10)[1]
    hits = [len(np.intersect1d(a, b)) for a, b in zip(exact, found, strict=True)]
    assert np.mean(hits) > 9.95  # ties at the tenth place


def test_offset_at_which_centring_begins(trained):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 10)).astype("f4")
    for offset, centred in ((0, False), (5, False), (7.5, False), (8.5, True), (100, True)):
        q = trained(x + np.float32(offset), 5)
        assert CoarseRanker(q, q.mixture).is_centred == centred


def test_ordinary_data_use_the_quantizer_itself(blobs, trained):
    x = blobs(1000, 12)
    q = trained(x, 9)
    got, want = CoarseRanker(q, q.mixture).search(x, 4), q.search(x, 4)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("kind", ["spherical", "diag", "tied", "full"])
def test_centred_distances_are_true(grid_points, trained, kind):
    x = grid_points(1000, 6) + np.float32(1e6)
    q = trained(x, 7, covariance_type=kind)
    ranker = CoarseRanker(q, q.mixture)
    distances, lists = ranker.search(x[:50], 7)
    exact = ((x[:50, None].astype("f8") - q.mixture.means_) ** 2).sum(axis=2)
    np.testing.assert_allclose(distances, np.sort(exact, axis=1), rtol=1e-4)
    np.testing.assert_array_equal(lists[:, 0], exact.argmin(axis=1))
    assert ranker.nbytes == 7 * 6 * 4


def test_residual_codec_far_away(grid_points, trained):
    """IVFPQ takes the coarse distances into its own: they have to be the true ones."""
    x, shift = grid_points(2000, 8), np.float32(1e3)
    recall = []
    for data in (x, x + shift):
        q = trained(data, 8)
        index = IndexIVFGMM(faiss.IndexIVFPQ(q, 8, 8, 8, 4), q)
        index.train(data)
        index.add(data)
        index.nprobe = 8
        labels = index.search(data[:200], 10)[1]
        recall.append((labels == np.arange(200)[:, None]).any(axis=1).mean())
    assert recall[1] > recall[0] - 0.03


def test_inner_products_are_never_centred(blobs, trained):
    x = blobs(500, 4) + np.float32(50)
    q = trained(x, 3, faiss.METRIC_INNER_PRODUCT)
    assert not CoarseRanker(q, q.mixture).is_centred
