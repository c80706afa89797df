"""GMMQuantizer: training, and stock FAISS on top of it."""

import warnings

import faiss
import h5py
import numpy as np
import pytest
import torch

from gmm_ivf import GaussianMixture, GMMQuantizer

CODEC_NAMES = ["Flat", "PQ", "SQ8", "SQ4", "SQfp16", "RaBitQ"]
METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)


def test_training_makes_means_centroids(blobs, table):
    x = blobs(2000, 8)
    q = GMMQuantizer(8, 12, random_state=0, tol=1e-2)
    assert isinstance(q, faiss.IndexFlat)
    assert (q.is_trained, q.ntotal, q.mixture) == (False, 0, None)
    assert repr(q) == "GMMQuantizer(d=8, nlist=12, metric=METRIC_L2, untrained)"
    q.train(x)
    assert (q.is_trained, q.ntotal, q.nlist) == (True, 12, 12)
    assert q.mixture.covariance_type == "spherical"
    np.testing.assert_array_equal(table(q), q.mixture.means_.astype("f4"))
    assert q.train_report["rows"] == 2000
    assert q.train_report["seconds"] > 0
    assert q.train_report["empty_lists"] == 0
    assert q.reseeded == 0


def test_model_is_that_of_the_estimator(blobs):
    x = blobs(1500, 5)
    q = GMMQuantizer(5, 6, random_state=3, tol=1e-2, covariance_type="diag")
    q.train(x)
    alone = GaussianMixture(6, random_state=3, tol=1e-2, covariance_type="diag").fit(x)
    np.testing.assert_array_equal(q.mixture.means_, alone.means_)


@METRICS
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_stock_index_assigns_to_nearest_mean(blobs, trained, codec, entries_of, name, metric):
    x = blobs(1500, 16)
    q = trained(x, 10, metric)
    index = codec(name, q)
    index.train(x)
    index.add(x)
    lists = q.search(x, 1)[1][:, 0]
    for number, ids in enumerate(entries_of(index)):
        np.testing.assert_array_equal(np.sort(ids), np.flatnonzero(lists == number))
    index.nprobe = 10
    exact = faiss.IndexFlat(16, metric)
    exact.add(x)
    truth, found = exact.search(x[:50], 1)[1], index.search(x[:50], 10)[1]
    assert (found == truth).any(axis=1).mean() > 0.4


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_wrong_order_fails_loudly(blobs, codec, name):
    """FAISS 1.15.1: k-means starts, and ends when its first centroids are put in the quantizer."""
    x = blobs(800, 16)
    q = GMMQuantizer(16, 8)
    index = codec(name, q)
    assert not index.is_trained
    with pytest.raises(RuntimeError, match=r"IndexFlatCodes::add.*'is_trained' failed"):
        index.train(x)
    with pytest.raises(RuntimeError, match=r"'is_trained' failed"):
        index.add(x)
    assert (q.is_trained, q.ntotal, index.ntotal, index.is_trained) == (False, 0, 0, False)


def test_index_built_before_quantizer_is_trained(blobs, table):
    x = blobs(800, 8)
    q = GMMQuantizer(8, 5, random_state=0, tol=1e-2)
    index = faiss.IndexIVFFlat(q, 8, 5)
    q.train(x)
    means = table(q)
    index.train(x)
    index.add(x)
    np.testing.assert_array_equal(table(q), means)
    assert index.ntotal == 800


def test_ix_n1_nan_row_is_named(blobs):
    x = blobs(500, 16)
    x[37, 3] = np.nan
    with pytest.raises(ValueError, match="x: row 37 holds NaN"):
        GMMQuantizer(16, 4).train(x)
    x[37, 3] = np.inf
    with pytest.raises(ValueError, match="x: row 37 holds infinity"):
        GMMQuantizer(16, 4).train(x)
    x[37] = 1e19
    with pytest.raises(ValueError, match="x: row 37 is so long"):
        GMMQuantizer(16, 4).train(x)
    with pytest.raises(ValueError, match=r"x: row 37 holds infinity \(in float32\)"):
        GMMQuantizer(16, 4).train(np.where(x == 1e19, 1e300, x.astype("f8")))


def test_ix_n2_few_rows():
    x = np.random.default_rng(0).normal(size=(618, 8)).astype("f4")
    q = GMMQuantizer(8, 500, random_state=0, max_iter=3, tol=1e9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q.train(x)
    assert [str(w.message).split(";")[0] for w in caught] == ["training 500 lists on 618 rows"]
    assert caught[0].filename == __file__
    assert q.ntotal == 500
    with pytest.raises(ValueError, match=r"nlist=500 rows.*got n=100"):
        GMMQuantizer(8, 500).train(x[:100])


def test_ix_n3_training_alone_is_subsampled(blobs, table):
    x = blobs(5000, 6)
    q = GMMQuantizer(6, 20, max_points_per_centroid=10, random_state=0, tol=1e-2)
    q.train(x)
    assert q.train_report["rows"] == 200
    index = faiss.IndexIVFFlat(q, 6, 20)
    index.add(x)
    assert index.ntotal == 5000
    again = GMMQuantizer(6, 20, max_points_per_centroid=10, random_state=0, tol=1e-2)
    again.train(x)
    np.testing.assert_array_equal(table(q), table(again))


def test_empty_components_are_reseeded(blobs):
    x = blobs(3000, 4)
    start = np.concatenate([x[:6].astype("f8"), np.full((4, 4), 500.0) + np.arange(4)[:, None]])
    q = GMMQuantizer(4, 10, means_init=start, random_state=0, tol=1e-2)
    q.train(x)
    assert q.reseeded >= 4
    assert q.train_report["empty_lists"] == 0
    assert np.bincount(q.search(x, 1)[1][:, 0], minlength=10).min() > 0
    assert np.isfinite(q.mixture.means_).all()
    # The options are those given, not those of the last EM steps.
    assert q.mixture.max_iter == 25
    assert q.mixture.weights_init is None
    np.testing.assert_array_equal(q.mixture.means_init, start)


@pytest.mark.parametrize("kind", ["spherical", "diag", "tied", "full"])
def test_reseeding_of_every_covariance_type(blobs, kind):
    x = blobs(1000, 3)
    start = np.concatenate([x[:4].astype("f8"), [[300.0] * 3, [400.0] * 3]])
    q = GMMQuantizer(3, 6, covariance_type=kind, means_init=start, random_state=0, tol=1e-2)
    q.train(x)
    assert q.reseeded >= 2
    assert q.train_report["empty_lists"] == 0


def test_component_that_is_nobodys_nearest_mean_is_reseeded():
    """A broad component takes the tails on both sides; its mean lies where no row is near."""
    rng = np.random.default_rng(0)
    places = np.repeat([-1.0, 1, -5, 5], [400, 400, 30, 30])
    x = (places + 0.05 * rng.normal(size=860)).astype("f4")[:, None]
    start = {"means_init": [[-1.0], [1], [0]], "precisions_init": [400, 400, 0.04]}
    alone = GaussianMixture(3, random_state=0, **start).fit(x)
    assert alone.weights_[2] * 860 > 50
    assert abs(alone.means_[2, 0]) < 0.5
    q = GMMQuantizer(1, 3, random_state=0, **start)
    q.train(x)
    assert q.reseeded > 0
    assert np.bincount(q.search(x, 1)[1][:, 0], minlength=3).min() > 0


def test_fewer_distinct_rows_than_lists(table):
    points = np.random.default_rng(0).normal(size=(4, 8)).astype("f4")
    q = GMMQuantizer(8, 16, random_state=0)
    with pytest.warns(UserWarning, match="4 distinct rows for nlist=16; 12 of 16 lists"):
        q.train(np.repeat(points, 500, axis=0))
    assert q.ntotal == 16
    assert np.isfinite(table(q)).all()
    assert len(np.unique(q.search(points, 1)[1])) == 4


def test_all_points_equal(table):
    x = np.full((400, 5), 3.5, "f4")
    q = GMMQuantizer(5, 4, random_state=0)
    with pytest.warns(UserWarning, match="1 distinct rows for nlist=4"):
        q.train(x)
    np.testing.assert_array_equal(table(q), np.full((4, 5), 3.5))


def test_one_rare_point_gets_a_list():
    """Duplicates that hide a second point are looked through."""
    x = np.zeros((2000, 3), "f4")
    x[1234] = 1.0
    q = GMMQuantizer(3, 2, means_init=[[0, 0, 0], [90, 90, 90.0]], random_state=0)
    q.train(x)
    lists = q.search(x, 1)[1][:, 0]
    assert lists[1234] != lists[0]


def test_inner_product_models_directions(blobs, table):
    x = blobs(2000, 8) * np.exp(np.random.default_rng(1).normal(size=(2000, 1))).astype("f4")
    q = GMMQuantizer(8, 10, faiss.METRIC_INNER_PRODUCT, random_state=0, tol=1e-2)
    q.train(x)
    np.testing.assert_allclose(np.linalg.norm(table(q), axis=1), 1, rtol=1e-6)
    sizes = np.bincount(q.search(x, 1)[1][:, 0], minlength=10)
    assert sizes.min() > 0
    assert sizes.max() < 1000
    # Lengths of rows do not count.
    other = GMMQuantizer(8, 10, faiss.METRIC_INNER_PRODUCT, random_state=0, tol=1e-2)
    other.train(x / np.linalg.norm(x, axis=1, keepdims=True))
    np.testing.assert_allclose(table(q), table(other), atol=1e-4)


def test_inner_product_refuses_zero_rows(blobs):
    x = blobs(500, 4)
    x[[3, 99]] = 0
    with pytest.raises(ValueError, match="x: row 3 is zero"):
        GMMQuantizer(4, 3, faiss.METRIC_INNER_PRODUCT).train(x)


def test_failed_training_leaves_it_untrained(blobs):
    q = GMMQuantizer(3, 4, covariance_type="round")
    with pytest.raises(ValueError, match="covariance_type"):
        q.train(blobs(400, 3))
    assert (q.is_trained, q.ntotal, q.mixture) == (False, 0, None)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 4), {}, ValueError, "d must be an integer of at least 1; got 0"),
        ((3, 0), {}, ValueError, "nlist must be"),
        ((3, 2.5), {}, ValueError, "nlist must be"),
        ((3, True), {}, ValueError, "nlist must be"),
        ((3, 4, faiss.METRIC_L1), {}, ValueError, "METRIC_L2 or faiss.METRIC_INNER_PRODUCT"),
        ((3, 4), {"max_points_per_centroid": 0}, ValueError, "max_points_per_centroid"),
        ((3, 4), {"covariance": "diag"}, TypeError, "no option 'covariance'.*covariance_type"),
        ((3, 4), {"n_components": 9}, TypeError, "nlist takes the place"),
    ],
)
def test_bad_constructor_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        GMMQuantizer(*arguments, **options)


@pytest.mark.parametrize("d", [1, 2, 3, 17, 96, 100, 128])
def test_dimensions(blobs, d):
    x = blobs(400, d)
    q = GMMQuantizer(d, 5, random_state=0, tol=1e-2)
    q.train(x)
    index = faiss.IndexIVFFlat(q, d, 5)
    index.add(x)
    index.nprobe = 5
    np.testing.assert_array_equal(index.search(x[:10], 1)[1][:, 0], np.arange(10))


def layouts(x, folder):
    """The same integers in many guises."""
    wide = np.zeros((len(x), 2 * x.shape[1]), x.dtype)
    wide[:, ::2] = x
    twice = np.repeat(x, 2, axis=0)
    on_disk = np.memmap(folder / "x.dat", x.dtype, "w+", shape=x.shape)
    on_disk[:] = x
    read_only = x.copy()
    read_only.setflags(write=False)
    return {
        "contiguous": x,
        "fortran": np.asfortranarray(x),
        "columns": wide[:, ::2],
        "rows": twice[::2],
        "backwards": x[::-1][::-1],
        "float64": x.astype("f8"),
        "float16": x.astype("f2"),
        "int16": x.astype("i2"),
        "big endian": x.astype(">f4"),
        "memmap": on_disk,
        "read only": read_only,
        "list": x.tolist(),
        "torch": torch.from_numpy(x),
    }


def test_hdf5(blobs, tmp_path, table):
    x = blobs(800, 5)
    want, got = (
        GMMQuantizer(5, 4, random_state=0, tol=1e-2, max_points_per_centroid=100) for _ in range(2)
    )
    want.train(x)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        got.train(file.create_dataset("x", data=x))
    np.testing.assert_array_equal(table(got), table(want))


def test_layouts_and_dtypes(blobs, tmp_path, table):
    x = np.rint(4 * blobs(400, 5)).astype("f4")
    tables = {}
    for name, data in layouts(x, tmp_path).items():
        q = GMMQuantizer(5, 4, random_state=0, tol=1e-2, precision="fp64")
        q.train(data)
        tables[name] = table(q)
    for name, means in tables.items():
        np.testing.assert_allclose(means, tables["contiguous"], atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(5, "f4"), r"shape \(n, 5\); got \(5,\). Reshape"),
        (np.zeros((10, 4), "f4"), r"shape \(n, 5\); got \(10, 4\)"),
        (np.zeros((10, 5), complex), "real numbers; got dtype complex128"),
        (np.full((10, 5), "a"), "real numbers"),
    ],
)
def test_bad_matrices(x, message):
    with pytest.raises(ValueError, match=message):
        GMMQuantizer(5, 2).train(x)
