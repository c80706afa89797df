"""Transforms before the lists: the mixture lives where the lists are."""

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM

SPECS = ["OPQ4_8,IVF6,PQ4x4", "PCA8,IVF6,Flat", "PCAR6,IVF6,SQ8", "L2norm,IVF6,Flat"]


@pytest.fixture
def behind():
    """``behind(spec, x, metric, **options)``: trained and empty, over a factory string."""

    def make(spec, x, metric=faiss.METRIC_L2, **options):
        index = faiss.index_factory(x.shape[1], spec, metric)
        inner = faiss.extract_index_ivf(index)
        q = GMMQuantizer(inner.d, inner.nlist, metric, random_state=0, tol=1e-2)
        q.attach(index)
        soft = IndexIVFGMM(index, q, **options)
        soft.train(x)
        return soft

    return make


@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"])
@pytest.mark.parametrize("spec", SPECS)
def test_equal_to_stock(blobs, behind, spec, metric):
    x, queries = blobs(900, 12), blobs(40, 12, seed=1)
    hard = behind(spec, x, metric, max_lists=1)
    hard.add(x)
    assert (hard.d, hard.quantizer.d, hard.index.ntotal) == (12, hard.index.index.d, 900)
    stock = faiss.deserialize_index(faiss.serialize_index(hard.index))
    inner = faiss.extract_index_ivf(stock)
    hard.nprobe = inner.nprobe = 3
    want, got = stock.search(queries, 10), hard.search(queries, 10)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("spec", SPECS[1:])
def test_mixture_is_that_of_the_transformed_rows(blobs, behind, spec):
    x = blobs(900, 12)
    index = behind(spec, x)
    chain = index.index.chain
    rows = x
    for i in range(chain.size()):
        rows = faiss.downcast_VectorTransform(chain.at(i)).apply(rows)
    q = GMMQuantizer(rows.shape[1], 6, random_state=0, tol=1e-2)
    q.train(rows)
    np.testing.assert_array_equal(q.mixture.means_, index.quantizer.mixture.means_)


@pytest.mark.parametrize("spec", SPECS)
def test_copies_behind_a_transform(blobs, behind, spec):
    x = blobs(900, 12)
    index = behind(spec, x, max_lists=3, replication=1.7)
    index.add(x)
    index.nprobe = 4
    labels = index.search(x[:50], 10)[1]
    assert all(len(set(row)) == 10 for row in labels)
    assert (labels == np.arange(50)[:, None]).any(axis=1).mean() > 0.6
    assert index.remove_ids(np.arange(100)) == 100
    assert index.index.ntotal == index.index.index.ntotal == index.stats()["entries"]
    assert not np.isin(index.search(x[:50], 10)[1], np.arange(100)).any()


def test_reconstruction_goes_back_through_the_transform(blobs, behind):
    x = blobs(900, 12)
    turned = behind("PCAR12,IVF6,Flat", x)
    turned.add(x)
    np.testing.assert_allclose(turned.reconstruct_batch([3, 800]), x[[3, 800]], atol=1e-4)
    reduced = behind("PCA8,IVF6,Flat", x)
    reduced.add(x)
    want = reduced.index.chain.at(0).reverse_transform(reduced.index.chain.at(0).apply(x[:5]))
    np.testing.assert_allclose(reduced.reconstruct_n(0, 5), want, atol=1e-5)


def test_a_transform_that_faiss_cannot_undo_is_named(blobs, behind):
    x = blobs(900, 12)
    index = behind("PCAW6,IVF6,Flat", x)
    index.add(x)
    with pytest.raises(NotImplementedError, match=r"cannot undo PCAMatrix that whitens.*refine"):
        index.reconstruct(0)


def test_bad_rows_are_named_before_the_transform(blobs, behind):
    x = blobs(900, 12)
    index = behind("PCA8,IVF6,Flat", x)
    with pytest.raises(ValueError, match=r"x must have shape \(n, 12\); got \(5, 8\)"):
        index.add(x[:5, :8])
    x[7, 3] = np.nan
    with pytest.raises(ValueError, match="x: row 7 holds NaN"):
        index.add(x)
    index.add(x[:7])
    assert (index.search(x[6:9], 2)[1][:, 0] >= 0).tolist() == [True, False, True]
    fresh = faiss.index_factory(12, "PCA8,IVF6,Flat")
    q = GMMQuantizer(8, 6, random_state=0)
    q.attach(fresh)
    with pytest.raises(ValueError, match="x: row 7 holds NaN"):
        IndexIVFGMM(fresh, q).train(x)


def test_rows_that_a_transform_makes_too_long_are_named(blobs, behind):
    x = blobs(900, 12)
    x[:, 0] *= 1e-15
    index = behind("PCAW12,IVF6,Flat", x, refine="flat")
    index.add(x)
    rows = x[:10].copy()
    rows[3, 0] = 1e10
    message = "x behind the transforms: row 3 is so long that its squared distances overflow"
    for change in (index.add, lambda rows: index.update_vectors(np.arange(10), rows)):
        with pytest.raises(ValueError, match=message):
            change(rows)
        np.testing.assert_array_equal(index.reconstruct_n(), x)


@pytest.mark.filterwarnings("ignore:training 6 lists on 12 rows:UserWarning")
def test_failed_training_leaves_nothing_for_the_next(blobs):
    x = blobs(900, 12)
    flat = x.copy()
    flat[:, 0] = 1  # whitening divides by its deviation
    cases = {
        "PCAW12,IVF6,Flat": (flat, "x behind the transforms: row 0 holds NaN"),
        "PCA4,IVF6,Flat": (x[:5], "n=5"),
        "PCA8,IVF6,PQ4x4": (x[:12], "training points"),
    }
    for spec, (rows, message) in cases.items():
        results = []
        for failing in (False, True):
            index = faiss.index_factory(12, spec)
            q = GMMQuantizer(faiss.extract_index_ivf(index).d, 6, random_state=0, tol=1e-2)
            q.attach(index)
            soft = IndexIVFGMM(index, q)
            if failing:
                with pytest.raises((ValueError, RuntimeError), match=message):
                    soft.train(rows)
                assert not (q.is_trained or soft.is_trained)
            soft.train(x)
            soft.add(x)
            results.append(soft.search(x[:20], 5)[0])
        np.testing.assert_array_equal(*results)


def test_quantizer_is_found_behind_the_transform(blobs):
    x = blobs(300, 12)
    q = GMMQuantizer(8, 3, random_state=0)
    ivf = faiss.IndexIVFFlat(q, 8, 3)
    index = faiss.IndexPreTransform(faiss.PCAMatrix(12, 8), ivf)
    soft = IndexIVFGMM(index)
    assert soft.quantizer is q
    assert not soft.is_trained
    soft.train(x)
    soft.add(x)
    assert soft.is_trained
    assert soft.index.is_trained
    assert soft.ntotal == 300


def test_an_index_whose_type_python_lost(blobs):
    x = blobs(300, 12)
    outer = faiss.IndexRefineFlat(faiss.index_factory(12, "PCA8,IVF3,Flat"))
    index = outer.base_index
    assert type(index) is faiss.Index
    q = GMMQuantizer(8, 3, random_state=0)
    q.attach(index)
    soft = IndexIVFGMM(index, q)
    soft.train(x)
    soft.add(x)
    soft.nprobe = 3
    assert (soft.search(x[:20], 1)[1][:, 0] == np.arange(20)).mean() > 0.9
