"""Vectors back by id: decoded codes, whatever list they lie in."""

import faiss
import numpy as np
import pytest

from gmm_ivf import IndexIVFGMM

CODECS = pytest.mark.parametrize(
    "name", ["Flat", "SQ8", "SQ4", "SQfp16", "PQ", "RaBitQ", "Residual"]
)


@CODECS
def test_one_list_equals_stock(blobs, soft, trained, codec, name):
    x = blobs(500, 16)
    q = trained(x, 4)
    stock = codec(name, q)
    stock.train(x)
    stock.add(x)
    stock.make_direct_map()
    index = soft(x, 4, name, max_lists=1)
    index.add(x)
    np.testing.assert_array_equal(index.reconstruct_n(), stock.reconstruct_n(0, 500))
    np.testing.assert_array_equal(index.reconstruct_n(20, 30), stock.reconstruct_n(20, 30))
    keys = np.array([499, 0, 7, 7])
    np.testing.assert_array_equal(index.reconstruct_batch(keys), stock.reconstruct_batch(keys))
    np.testing.assert_array_equal(index.reconstruct(3), stock.reconstruct(3))


@CODECS
def test_of_several_copies_the_one_nearest_its_mean(blobs, soft, entries_of, table, name):
    x = blobs(500, 16)
    index = soft(x, 5, name, max_lists=3, replication=2.0)
    ids = np.random.default_rng(0).permutation(2000)[:500]
    index.add_with_ids(x, ids)
    means = table(index.quantizer)
    best = {}
    for number, held in enumerate(entries_of(index.index)):
        for place, key in enumerate(held):
            vector = np.empty(16, np.float32)
            index.index.reconstruct_from_offset(number, place, faiss.swig_ptr(vector))
            far = ((vector - means[number]) ** 2).sum()
            if key not in best or far < best[key][0]:
                best[key] = far, vector
    got = index.reconstruct_batch(ids)
    np.testing.assert_allclose(got, [best[key][1] for key in ids], rtol=1e-5, atol=1e-5)
    if name == "Flat":
        np.testing.assert_array_equal(got, x)


def test_after_changes(blobs, soft):
    x = blobs(500, 8)
    index = soft(x, 5)
    index.add(x[:400])
    np.testing.assert_array_equal(index.reconstruct(5), x[5])
    index.remove_ids([5])
    with pytest.raises(ValueError, match="ids must be stored; 5 is not"):
        index.reconstruct(5)
    index.add(x[400:])
    np.testing.assert_array_equal(index.reconstruct_batch([499, 6]), x[[499, 6]])
    with pytest.raises(ValueError, match="ids must be stored; 5 is not"):
        index.reconstruct_n()
    np.testing.assert_array_equal(index.reconstruct_n(6), x[6:])
    index.reset()
    assert index.reconstruct_n().shape == (0, 8)
    with pytest.raises(ValueError, match="0 is not"):
        index.reconstruct(0)


def test_search_and_reconstruct(blobs, soft):
    x = blobs(500, 8)
    index = soft(x, 5)
    index.add(x[:6])
    index.nprobe = 5
    distances, labels, vectors = index.search_and_reconstruct(x[:20], 9)
    want = index.search(x[:20], 9)
    np.testing.assert_array_equal(distances, want[0])
    np.testing.assert_array_equal(labels, want[1])
    assert vectors.shape == (20, 9, 8)
    np.testing.assert_array_equal(vectors[labels >= 0], x[labels[labels >= 0]])
    assert np.isnan(vectors[labels < 0]).all()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([[1, 2]], r"keys must have shape \(m,\); got \(1, 2\)"),
        ([0.5], "keys must be integers; got dtype float64"),
        ([-1], "ids must be stored; -1 is not"),
        ([3, 10**12], "ids must be stored; 1000000000000 is not"),
    ],
)
def test_bad_keys(blobs, soft, keys, message):
    x = blobs(300, 4)
    index = soft(x, 3)
    index.add(x)
    with pytest.raises(ValueError, match=message):
        index.reconstruct_batch(keys)
    assert index.reconstruct_batch([]).shape == (0, 4)
    for bad in (-1, 1.0, "3", None):
        with pytest.raises(ValueError, match=r"n0 must be an integer of at least 0; got"):
            index.reconstruct_n(bad, 1)
        with pytest.raises(ValueError, match=r"ni must be an integer of at least -1; got"):
            index.reconstruct_n(0, -2 if bad == -1 else bad)
    with pytest.raises(ValueError, match="300 is not"):
        index.reconstruct_n(299, 2)


def test_codec_without_a_way_back(blobs, trained):
    x = blobs(300, 8)
    q = trained(x, 3)
    hashes = faiss.IndexIVFSpectralHash(q, 8, 3, 16, 10.0)  # pyright: ignore
    index = IndexIVFGMM(hashes, q)
    index.train(x)
    index.add(x)
    with pytest.raises(NotImplementedError, match="cannot decode the codes of IndexIVFSpectralHa"):
        index.reconstruct(1)


def test_far_from_the_origin(blobs, soft):
    x = blobs(600, 8) + np.float32(500)
    index = soft(x, 5, "SQfp16", max_lists=3, replication=1.8)
    index.add(x)
    np.testing.assert_allclose(index.reconstruct_n(), x, atol=0.01)
