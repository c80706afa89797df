"""Every kind of X: the same numbers as a contiguous float64 copy gives."""

import warnings

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from gmm_ivf import GaussianMixture
from gmm_ivf.rows import Rows

N, D = 120, 4


@pytest.fixture
def X(blobs) -> np.ndarray:
    return blobs(n=N, d=D, k=3)


def fit(X, kind="diag", **options):
    return GaussianMixture(3, covariance_type=kind, random_state=0, **options).fit(X)


def memmap(X, path, mode):
    written = np.memmap(path / "x.dat", dtype=X.dtype, mode="w+", shape=X.shape)
    written[:] = X
    written.flush()
    return np.memmap(path / "x.dat", dtype=X.dtype, mode=mode, shape=X.shape)


LAYOUTS = {
    "fortran": np.asfortranarray,
    "reversed_rows": lambda X: X[::-1].copy()[::-1],
    "reversed_columns": lambda X: X[:, ::-1].copy()[:, ::-1],
    "every_second_column": lambda X: np.repeat(X, 2, axis=1)[:, ::2],
    "every_third_row": lambda X: np.repeat(X, 3, axis=0)[::3],
    "transposed": lambda X: X.T.copy().T,
    "with_an_offset": lambda X: np.pad(X, ((3, 1), (2, 1)))[3:-1, 2:-1],
    "big_endian": lambda X: X.astype(X.dtype.newbyteorder(">")),
    "packed_field": lambda X: packed(X),
}


def packed(X: np.ndarray) -> np.ndarray:
    """A field of records whose strides are no multiple of its item size."""
    records = np.zeros(len(X), dtype=[("tag", "u1"), ("x", X.dtype, X.shape[1])])
    records["x"] = X
    return records["x"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gm_g18_layouts(X, layout, dtype):
    X = X.astype(dtype)
    before = X.copy()
    laid_out = LAYOUTS[layout](X)
    assert_array_equal(laid_out, X)
    plain, model = fit(X), fit(laid_out)
    assert_array_equal(model.means_, plain.means_)
    assert_array_equal(model.covariances_, plain.covariances_)
    for method in ("predict", "predict_proba", "score_samples"):
        got, wanted = getattr(model, method)(laid_out), getattr(plain, method)(X)
        assert_array_equal(got, wanted)
        assert got.dtype == wanted.dtype
    assert_array_equal(X, before)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T.contiguous().T,
        lambda t: torch.repeat_interleave(t, 2, dim=1)[:, ::2],
        lambda t: torch.repeat_interleave(t, 3, dim=0)[::3],
        lambda t: torch.nn.functional.pad(t, (2, 1, 3, 1))[3:-1, 2:-1],
        lambda t: t.clone().requires_grad_(),
        lambda t: torch.nn.Parameter(t.clone()),
    ],
    ids=["transposed", "columns", "rows", "offset", "requires_grad", "parameter"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gm_g18_tensors(X, view, dtype):
    tensor = view(torch.from_numpy(X).to(dtype))
    wanted = fit(X.astype(np.float32 if dtype == torch.float32 else np.float64))
    model = fit(tensor)
    assert_array_equal(model.means_, wanted.means_)
    labels = model.predict(tensor)
    assert isinstance(labels, torch.Tensor)
    assert labels.dtype == torch.int64
    assert_array_equal(labels.numpy(), wanted.predict(X))
    for method in ("predict_proba", "score_samples"):
        out = getattr(model, method)(tensor)
        assert out.dtype == dtype
        assert not out.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_tensors(X, dtype):
    tensor = torch.from_numpy(X).to(dtype)
    model, wanted = fit(tensor), fit(tensor.double().numpy())
    assert model.precision_ == "fp32"
    assert_allclose(model.means_, wanted.means_, atol=1e-4)
    assert model.predict_proba(tensor).dtype == torch.float32
    assert model.score_samples(tensor).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "g", "i1", "i2", "i4", "i8", "u1", "u4", "?"])
def test_dtypes_of_numpy(X, kind, dtype):
    X = (3 * X + 10).round().clip(0, 100).astype(dtype)
    model, wanted = fit(X, kind), fit(X.astype(np.float64), kind)
    tolerance = 1e-4 if dtype == "f4" else 1e-12
    assert_allclose(model.means_, wanted.means_, atol=tolerance)
    assert_allclose(model.covariances_, wanted.covariances_, atol=tolerance)
    proba = model.predict_proba(X)
    assert proba.dtype == model.score_samples(X).dtype
    assert proba.dtype == (np.float32 if dtype == "f4" else np.float64)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integer_tensors(X, dtype):
    tensor = torch.from_numpy((3 * X).round().clip(0, 100)).to(dtype)
    model, wanted = fit(tensor), fit(tensor.double().numpy())
    assert_allclose(model.means_, wanted.means_, atol=1e-12)
    assert model.predict_proba(tensor).dtype == torch.float64


def test_whole_numbers_are_stored_as_they_are():
    """Bytes, such as SIFT's, about a centre that is whole too: half precision holds them all."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (300, 7)).astype(np.float32)
    for shift, exact in ((0.0, True), (0.3, False)):
        rows, cpu = Rows(x + np.float32(shift)), torch.device("cpu")
        frame = rows.scan(cpu)
        inside = rows.tile(0, rows.n, frame, torch.float32, cpu)
        assert (frame.center == frame.center.round()).all() == exact
        assert torch.equal(inside.half().float(), inside) == exact
        assert np.abs(frame.center - (x.mean(0) + shift)).max() <= 0.5


@pytest.mark.parametrize(
    "as_input", [list, tuple, lambda X: X.tolist(), lambda X: X.astype(object)]
)
def test_python_sequences(X, as_input):
    model, wanted = fit(as_input(X)), fit(X)
    assert_array_equal(model.means_, wanted.means_)
    assert_array_equal(model.predict(as_input(X)), wanted.predict(X))
    assert model.bic(as_input(X)) == wanted.bic(X)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "i2"])
def test_memmaps(X, tmp_path, mode, dtype):
    X = (10 * X).astype(dtype)
    mapped = memmap(X, tmp_path, mode)
    model, wanted = fit(mapped, chunk_size=50), fit(X, chunk_size=50)
    assert_array_equal(model.means_, wanted.means_)
    assert_array_equal(model.predict_proba(mapped), wanted.predict_proba(X))
    assert_array_equal(mapped, X)


@pytest.mark.parametrize("dtype", ["f2", "<f4", ">f8", "i2", "u1"])
@pytest.mark.parametrize("chunks", [None, (17, D)])
def test_hdf5_datasets(X, tmp_path, dtype, chunks):
    X = (10 * X).clip(0, 200).astype(dtype)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        source = file.create_dataset("x", data=X, chunks=chunks)
        model, wanted = fit(source, chunk_size=50), fit(X, chunk_size=50)
        assert_array_equal(model.means_, wanted.means_)
        for method in ("predict", "predict_proba", "score_samples"):
            got = getattr(model, method)(source)
            assert_array_equal(got, getattr(wanted, method)(X))
            assert got.dtype == getattr(wanted, method)(X).dtype
        assert model.bic(source) == wanted.bic(X)
        assert not hasattr(model, "feature_names_in_")


def test_data_frames(X):
    names = ["a", "b", "c", "d"]
    frame = pd.DataFrame(X, columns=names)
    model = fit(frame)
    assert_array_equal(model.feature_names_in_, names)
    assert_array_equal(model.predict(frame), fit(X).predict(X))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[names[::-1]])
    assert fit(frame.astype("float32")).score_samples(frame.astype("float32")).dtype == np.float32
    model.fit(torch.from_numpy(X))
    assert not hasattr(model, "feature_names_in_")
    model.predict(torch.from_numpy(X))


def test_data_frames_of_mixed_columns(X):
    frame = pd.DataFrame(X).assign(n=np.arange(N), flag=X[:, 0] > 0)
    frame.columns = list("abcdef")
    assert_array_equal(fit(frame).means_, fit(frame.to_numpy(dtype=float)).means_)


def poison(X: np.ndarray, value: float) -> np.ndarray:
    X = X.copy()
    X[77, 2] = value
    X[99, 1] = value
    return X


SOURCES = {
    "float64": lambda X: X,
    "float32": lambda X: X.astype(np.float32),
    "float16": lambda X: X.astype(np.float16),
    "big_endian": lambda X: X.astype(">f4"),
    "fortran": np.asfortranarray,
    "list": lambda X: X.tolist(),
    "frame": lambda X: pd.DataFrame(X),
    "tensor": torch.from_numpy,
    "half_tensor": lambda X: torch.from_numpy(X).half(),
    "bfloat16_tensor": lambda X: torch.from_numpy(X).bfloat16(),
}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chunk_size", [None, 10])
def test_gm_g12_bad_values_are_named_by_row(X, source, value, chunk_size):
    what = "NaN" if np.isnan(value) else "infinity"
    bad = SOURCES[source](poison(X, value))
    with pytest.raises(ValueError, match=f"Input X contains {what}, first in row 77;"):
        fit(bad, chunk_size=chunk_size)
    model = fit(SOURCES[source](X), chunk_size=chunk_size)
    before = model.means_.copy()
    for method in ("predict", "predict_proba", "score_samples", "score", "responsibilities", "bic"):
        with pytest.raises(ValueError, match=f"{what}, first in row 77;"):
            getattr(model, method)(bad)
    with pytest.raises(ValueError, match="row 77"):
        model.fit(bad)
    assert_array_equal(model.means_, before)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gm_g12_bad_values_in_files(X, tmp_path, value):
    X32 = X.astype(np.float32)
    good = fit(X32)
    bad = poison(X32, value)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for source in (memmap(bad, tmp_path, "r"), file.create_dataset("x", data=bad)):
            with pytest.raises(ValueError, match="first in row 77"):
                fit(source)
            with pytest.raises(ValueError, match="first in row 77"):
                good.predict(source)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(5), "Expected 2D array, got 1D"),
        (torch.zeros(5, 2, 2), "Expected 2D array, got 3D"),
        (torch.zeros(5, 2, dtype=torch.complex64), "real numbers"),
        (torch.zeros(5, 2).to_sparse(), "dense layout"),
        (torch.zeros(0, 2), r"0 sample\(s\)"),
        (torch.zeros(5, 0), r"0 feature\(s\)"),
        (np.zeros(5), "Expected 2D array"),
        (np.zeros((5, 2), dtype=complex), "Complex data not supported"),
        (np.array([["a", "b"], ["c", "d"]]), "could not convert|dtype"),
    ],
)
def test_what_is_no_matrix_of_real_numbers(bad, message):
    with pytest.raises(ValueError, match=message):
        GaussianMixture(1).fit(bad)


def test_a_source_that_can_be_read_once_is_refused(X):
    for once in ((row for row in X), iter(X), map(list, X)):
        with pytest.raises(ValueError, match=r"can be read only once .* memmap"):
            fit(once)


def test_compressed_sparse_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that they are in beta state
        bad = torch.eye(5).to_sparse_csr()
    with pytest.raises(ValueError, match="dense layout"):
        GaussianMixture(1).fit(bad)


def test_hdf5_of_text_is_refused(tmp_path):
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        bad = file.create_dataset("x", data=np.array([[b"a", b"b"], [b"c", b"d"]]))
        with pytest.raises(ValueError, match="real numbers"):
            GaussianMixture(1).fit(bad)


def test_another_number_of_features(X):
    model = fit(X)
    for other in (X[:, :3], torch.from_numpy(X[:, :3])):
        with pytest.raises(
            ValueError, match="X has 3 features, but GaussianMixture is expecting 4"
        ):
            model.predict(other)


@pytest.mark.parametrize("d", [1, 2, 3, 17, 96, 100, 128, 960])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dimensions(kind, d, dtype):
    n, k = (40, 2) if d == 960 else (150, 3)
    rng = np.random.default_rng(d)
    X = (rng.standard_normal((n, d)) + 5 * rng.integers(0, k, (n, 1))).astype(dtype)
    model = GaussianMixture(k, covariance_type=kind, random_state=0, reg_covar=1e-2, max_iter=200)
    model.fit(X)
    assert model.means_.shape == (k, d)
    proba = model.predict_proba(X)
    assert proba.shape == (n, k)
    assert_allclose(proba.sum(1), 1, rtol=1e-5)
    assert np.isfinite(model.lower_bound_)
    assert model.score(X) >= model.lower_bound_ - 1e-3


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("d", [129, 192, 768, 1536, 2048, 4096])
@pytest.mark.parametrize("kind", ["spherical", "diag", "tied"])
def test_gm_g19_many_dimensions_in_each_precision(kind, d, precision):
    if kind == "tied" and d > 768:
        pytest.skip("a factorisation of this size takes seconds")
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 40)
    X = (rng.standard_normal((40, d)) + truth[:, None]).astype(np.float32)
    model = GaussianMixture(2, covariance_type=kind, precision=precision, reg_covar=1.0)
    labels = model.set_params(random_state=0).fit_predict(X)
    assert np.isfinite(model.lower_bound_)
    assert (labels == truth).all() or (labels != truth).all()


@pytest.mark.parametrize("chunk_size", [1, 7, N - 1, N, N + 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("init_params", ["kmeans", "random"])
def test_results_do_not_depend_on_the_tile(X, kind, chunk_size, dtype, init_params):
    X = X.astype(dtype)
    options = {"init_params": init_params, "tol": 0, "max_iter": 5, "kind": kind}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, plain = fit(X, chunk_size=chunk_size, **options), fit(X, **options)
    tolerance = 1e-4 if dtype == np.float32 else 1e-10
    assert_allclose(model.means_, plain.means_, atol=tolerance)
    assert_allclose(model.covariances_, plain.covariances_, atol=tolerance)
    assert_allclose(model.lower_bounds_, plain.lower_bounds_, atol=tolerance)
    assert_allclose(model.predict_proba(X), plain.predict_proba(X), atol=tolerance)
    assert_array_equal(model.predict(X), model.predict_proba(X).argmax(1))
