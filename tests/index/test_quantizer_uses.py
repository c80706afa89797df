"""GMMQuantizer: copies, attaching to existing indexes, and what would part it from its mixture."""

import copy
import gc
import pickle

import faiss
import numpy as np
import pytest
from sklearn.mixture import GaussianMixture as SklearnMixture

from gmm_ivf import GaussianMixture, GMMQuantizer, IndexIVFGMM

METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)


@METRICS
def test_copies_and_pickles(blobs, trained, metric, table):
    x = blobs(800, 6)
    q = trained(x, 5, metric, max_points_per_centroid=100)
    for other in (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert type(other) is GMMQuantizer
        assert (other.is_trained, other.nlist, other.metric_type) == (True, 5, metric)
        np.testing.assert_array_equal(table(other), table(q))
        assert other.train_report == q.train_report
        other.check_intact()
        index = faiss.IndexIVFFlat(other, 6, 5, metric)
        index.add(x)
        other.reset()
        other.train(x)
        assert other.train_report["rows"] == 500
    assert copy.copy(q).mixture is q.mixture
    assert copy.deepcopy(q).mixture is not q.mixture
    q.check_intact()


def test_untrained_copies():
    q = GMMQuantizer(6, 5, tol=0.5)
    for other in (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert (other.is_trained, other.ntotal, other.mixture) == (False, 0, None)


def test_subclasses_copy_as_themselves():
    class Mine(GMMQuantizer):
        pass

    assert type(copy.copy(Mine(3, 2))) is Mine


@METRICS
def test_from_mixture(blobs, metric):
    x = blobs(1000, 5)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    gmm = GaussianMixture(7, random_state=0, tol=1e-2, covariance_type="diag").fit(x)
    q = GMMQuantizer.from_mixture(gmm, metric=metric)
    assert q.mixture is gmm
    assert (q.is_trained, q.ntotal, q.metric_type) == (True, 7, metric)
    q.reset()
    q.train(x)
    np.testing.assert_allclose(q.mixture.means_, gmm.means_, atol=1e-5)


@METRICS
def test_from_centroids(blobs, metric, table):
    means = blobs(7, 5).astype("f8") + 1e-9  # not of float32
    q = GMMQuantizer.from_centroids(means, metric)
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    unit = means / norms if metric == faiss.METRIC_INNER_PRODUCT else means
    for other in (q, copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert (other.is_trained, other.d, other.nlist, other.metric_type) == (True, 5, 7, metric)
        np.testing.assert_allclose(table(other), unit, rtol=1e-6)
        np.testing.assert_array_equal(other.mixture.means_, means)
        other.check_intact()
    with pytest.raises(RuntimeError, match="call reset"):
        q.train(means)
    x = blobs(400, 5, seed=2)
    q.reset()
    q.train(x)
    assert isinstance(q.mixture, GaussianMixture)


def test_from_centroids_does_not_keep_the_array(blobs):
    means = blobs(7, 5).astype("f8")
    q = GMMQuantizer.from_centroids(means)
    means[:] = 0
    assert q.mixture.means_.any()


@pytest.mark.parametrize(
    ("bad", "metric", "message"),
    [
        ([1.0, 2.0], faiss.METRIC_L2, r"centroids must have shape \(n, 2\); got \(2,\)"),
        (3.0, faiss.METRIC_L2, "centroids must have shape"),
        (np.empty((0, 2)), faiss.METRIC_L2, "nlist must be an integer of at least 1; got 0"),
        ([[1.0, 2.0], [np.nan, 0.0]], faiss.METRIC_L2, "centroids: row 1 holds NaN"),
        ([[1.0, 2.0], [0.0, 0.0]], faiss.METRIC_INNER_PRODUCT, "centroids: row 1 is zero"),
        ([["a", "b"]], faiss.METRIC_L2, "centroids must hold real numbers"),
    ],
)
def test_from_centroids_refuses(bad, metric, message):
    with pytest.raises(ValueError, match=message):
        GMMQuantizer.from_centroids(bad, metric)


def test_from_mixture_refuses_others(blobs):
    with pytest.raises(ValueError, match="not fitted"):
        GMMQuantizer.from_mixture(GaussianMixture(3))
    for other, message in (
        (None, "mixture must be a fitted gmm_ivf.GaussianMixture; got None"),
        (GMMQuantizer(3, 2), "got gmm_ivf.quantizer.GMMQuantizer. Give its attribute mixture"),
        (GMMQuantizer.from_centroids(blobs(2, 3)).mixture, "Means alone, .* are no mixture"),
    ):
        with pytest.raises(ValueError, match=message):
            GMMQuantizer.from_mixture(other)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_a_mixture_of_sklearn_is_converted_as_the_message_says(blobs, kind):
    x = blobs(400, 3)
    m = SklearnMixture(2, covariance_type=kind, random_state=0, tol=1e-6, max_iter=2000).fit(x)
    with pytest.raises(ValueError, match=r"got sklearn\.mixture\..*GaussianMixture\.") as refused:
        GMMQuantizer.from_mixture(m)
    call = str(refused.value).split("parameters: gmm_ivf.")[1].rstrip(".")
    own = eval(call, {"GaussianMixture": GaussianMixture, "m": m, "X": x})
    q = GMMQuantizer.from_mixture(own)
    assert (q.is_trained, q.nlist, q.mixture.covariance_type) == (True, 2, kind)
    for name in ("weights_", "means_", "covariances_"):
        np.testing.assert_allclose(getattr(own, name), getattr(m, name), atol=0.02)


@pytest.mark.parametrize("spec", ["IVF6,Flat", "IVF6,PQ4x4", "IVF6,SQ8", "IVF6,PQ4x4fs"])
def test_attach_to_factory_index(blobs, trained, spec, table):
    x = blobs(1200, 8)
    index = faiss.index_factory(8, spec)
    index.train(x)
    q = trained(x, 6)
    q.attach(index)
    assert index.is_trained == (spec == "IVF6,Flat")
    index.train(x)
    index.add(x)
    same = faiss.downcast_index(index.quantizer)
    np.testing.assert_array_equal(table(same), table(q))
    del q, same
    gc.collect()
    index.nprobe = 6
    assert (index.search(x[:20], 5)[1] == np.arange(20)[:, None]).any(axis=1).mean() > 0.8


def test_attach_replaces_a_quantizer_that_python_owns(blobs, trained):
    x = blobs(800, 4)
    old = faiss.IndexFlatL2(4)
    index = faiss.IndexIVFFlat(old, 4, 5)
    index.train(x)
    q = trained(x, 5)
    q.attach(index)
    q.attach(index)
    del old
    gc.collect()
    assert index.referenced_objects == [q]
    assert index.is_trained
    index.add(x)
    assert index.ntotal == 800


def test_attach_untrained(blobs):
    x = blobs(800, 4)
    index = faiss.index_factory(4, "IVF5,Flat")
    index.train(x)
    q = GMMQuantizer(4, 5, random_state=0, tol=1e-2)
    q.attach(index)
    assert not index.is_trained
    with pytest.raises(RuntimeError, match="'is_trained' failed"):
        index.train(x)
    q.train(x)
    index.train(x)
    index.add(x)


def test_attach_refuses(blobs, trained):
    x = blobs(800, 4)
    q = trained(x, 5)
    with pytest.raises(ValueError, match="nlist=6, this quantizer has 5"):
        q.attach(faiss.index_factory(4, "IVF6,Flat"))
    with pytest.raises(ValueError, match="d=3, this quantizer has 4"):
        q.attach(faiss.index_factory(3, "IVF5,Flat"))
    with pytest.raises(ValueError, match="metric_type=0, this quantizer has 1"):
        q.attach(faiss.index_factory(4, "IVF5,Flat", faiss.METRIC_INNER_PRODUCT))
    with pytest.raises(ValueError, match="d=3, this quantizer has 4"):
        q.attach(faiss.index_factory(4, "PCA3,IVF5,Flat"))
    with pytest.raises(ValueError, match="got IndexFlat"):
        q.attach(faiss.IndexFlatL2(4))
    with pytest.raises(ValueError, match="got str"):
        q.attach("IVF5,Flat")
    full = faiss.index_factory(4, "IVF5,Flat")
    full.train(x)
    full.add(x[:3])
    with pytest.raises(ValueError, match="holds 3 vectors"):
        q.attach(full)


@pytest.mark.parametrize(
    "name", ["add", "add_with_ids", "add_sa_codes", "remove_ids", "merge_from", "permute_entries"]
)
def test_table_cannot_be_changed_by_hand(blobs, trained, name):
    q = trained(blobs(400, 3), 2)
    with pytest.raises(RuntimeError, match=rf"GMMQuantizer\.{name} would part"):
        getattr(q, name)(blobs(5, 3))
    q.check_intact()


def test_reset_and_second_training(blobs, trained, table):
    x = blobs(400, 3)
    q = trained(x, 2)
    means = table(q)
    with pytest.raises(RuntimeError, match=r"is trained.*call reset"):
        q.train(x)
    q.reset()
    assert (q.is_trained, q.ntotal, q.mixture, q.train_report) == (False, 0, None, None)
    q.train(x)
    np.testing.assert_array_equal(table(q), means)


def test_replaced_table_is_noticed(blobs, trained):
    """An index of another nlist makes FAISS run k-means into the quantizer; nothing can stop it."""
    x = blobs(1000, 3)
    q = trained(x, 4)
    faiss.IndexIVFFlat(q, 3, 8).train(x)
    with pytest.raises(RuntimeError, match="8 centroids that are not the 4 means"):
        q.check_intact()
    # Trained once more their number is right, and they are not.
    index = faiss.IndexIVFFlat(q, 3, 4)
    index.train(x)
    assert q.ntotal == 4
    for use in (q.check_intact, lambda: q.attach(index), lambda: soft_search(q, x)):
        with pytest.raises(RuntimeError, match="4 centroids that are not the 4 means"):
            use()


def soft_search(q, x):
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 3, 4), q)
    index.train(x)
    index.add(x)
    return index.search(x[:1], 1)


def test_refitted_mixture_is_noticed(blobs, trained):
    x = blobs(400, 3)
    q = trained(x, 4)
    q.mixture.fit(x)
    with pytest.raises(RuntimeError, match="fitted again"):
        q.check_intact()


def test_unknown_attributes_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'mixtrue'"):
        GMMQuantizer(3, 4).mixtrue = 1
