"""`to_faiss`: each vector once, in the list of its nearest mean, for stock FAISS."""

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM, index_factory


def stock_of(index, x):
    """Stock FAISS with the codec and the means of an index, and the vectors under ids of FAISS."""
    stock = faiss.clone_index(index._ivf)
    stock.reset()
    stock.add(x)
    return stock


@pytest.mark.parametrize("name", ["Flat", "PQ", "SQ8", "SQfp16"])
@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
@pytest.mark.parametrize("max_lists", [1, 3])
def test_equals_stock_faiss(blobs, soft, entries_of, tmp_path, name, metric, max_lists):
    x = blobs(500, 8)
    index = soft(x, 10, name, metric, max_lists=max_lists)
    index.add(x)
    index.nprobe = 3
    before = index.index.ntotal
    faiss.write_index(index.to_faiss(), str(tmp_path / "plain"))
    plain, stock = faiss.read_index(str(tmp_path / "plain")), stock_of(index, x)
    assert (type(plain), plain.ntotal, plain.nprobe) == (type(stock), 500, 3)
    assert index.index.ntotal == before
    same = [
        len(np.intersect1d(ours, theirs))
        for ours, theirs in zip(entries_of(plain), entries_of(stock), strict=True)
    ]
    # A codec of 4 bits for two dimensions moves a few vectors past the middle of two means.
    assert sum(same) >= (500 if name in ("Flat", "SQfp16") or max_lists == 1 else 460)
    if name == "Flat":
        for ours, theirs in zip(plain.search(x[:50], 5), stock.search(x[:50], 5), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_originals_tell_the_nearest_mean(blobs, entries_of):
    x = blobs(600, 8)
    index = index_factory(8, "PCA6,GMM8x3,PQ2x4,RFlat", random_state=0, tol=1e-2)
    index.train(x)
    index.add(x)
    plain = index.to_faiss()
    held = [set(ids) for ids in entries_of(faiss.downcast_index(plain.index))]
    first = index.quantizer.search(index._inner(x), 1)[1][:, 0]
    assert all(i in held[number] for i, number in enumerate(first))


def test_ids_and_lists_of_the_caller(blobs, soft, entries_of):
    x = blobs(300, 6)
    index = soft(x, 6)
    index.add_preassigned(x, np.tile([4, 5], (300, 1)), np.arange(300) * 7)
    plain = index.to_faiss()
    sizes = [len(ids) for ids in entries_of(plain)]
    assert sizes[:4] == [0] * 4
    assert sum(sizes) == plain.ntotal == 300
    assert sorted(np.concatenate(entries_of(plain))) == list(range(0, 2100, 7))


def test_behind_a_transform(blobs):
    x = blobs(600, 8)
    stock = faiss.index_factory(8, "PCA6,IVF8,Flat")
    q = GMMQuantizer(6, 8, random_state=0, tol=1e-2)
    q.attach(stock)
    index = IndexIVFGMM(stock, q)
    index.train(x)
    index.add(x)
    index.nprobe = 8
    plain = index.to_faiss()
    faiss.extract_index_ivf(plain).nprobe = 8
    assert (type(plain), plain.ntotal) == (faiss.IndexPreTransform, 600)
    np.testing.assert_array_equal(plain.search(x[:30], 5)[1], index.search(x[:30], 5)[1])


def test_far_from_the_origin(blobs, soft, entries_of):
    x = blobs(400, 6) + np.float32(3000)
    index = soft(x, 8, max_lists=2)
    index.add(x)
    held = [set(ids) for ids in entries_of(index.to_faiss())]
    first = index._layout._ready().ranker.nearest(x)
    assert all(i in held[number] for i, number in enumerate(first))


def test_what_cannot_be_exported(blobs, soft, trained, codec):
    q = trained(blobs(300, 8), 5)
    with pytest.raises(RuntimeError, match="not trained"):
        IndexIVFGMM(codec("PQ", q), q).to_faiss()
    x = blobs(300, 8)
    assert soft(x, 5).to_faiss().ntotal == 0
