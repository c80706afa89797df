"""Files of fitted mixtures: complete or not there, and readable without pickle."""

import copy
import json
import pickle

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_array_equal
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from gmm_ivf import GaussianMixture, params

ATTRIBUTES = ("weights_", "means_", "covariances_", "precisions_cholesky_", "center_")


@pytest.fixture
def model(overlapping, kind):
    return GaussianMixture(
        3, covariance_type=kind, random_state=0, tol=1e-2, reg_covar=1e-4, max_iter=77
    ).fit(overlapping)


def rewrite(path, target, change):
    """Copy a file with its header changed by a function."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    header = json.loads(metadata["gmm_ivf.mixture"])
    change(header)
    save_file(load_file(path), target, metadata={"gmm_ivf.mixture": json.dumps(header)})
    return target


def test_round_trip(model, overlapping, tmp_path):
    model.save(tmp_path / "mixture.safetensors")
    loaded = GaussianMixture.load(tmp_path / "mixture.safetensors")
    for name in ATTRIBUTES:
        assert_array_equal(getattr(loaded, name), getattr(model, name))
        assert getattr(loaded, name).dtype == np.float64
    for name in ("converged_", "n_iter_", "lower_bound_", "lower_bounds_", "n_features_in_"):
        assert getattr(loaded, name) == getattr(model, name)
    for name in ("n_components", "covariance_type", "tol", "reg_covar", "max_iter", "init_params"):
        assert getattr(loaded, name) == getattr(model, name)
    for X in (overlapping, overlapping.astype(np.float32)):
        assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))
        assert_array_equal(loaded.score_samples(X), model.score_samples(X))
    assert loaded.set_params(random_state=0).sample(5)[0].shape == (5, 3)


def test_a_loaded_model_trains_on(model, overlapping, tmp_path):
    path = str(tmp_path / "m")
    model.save(path)
    loaded = GaussianMixture.load(path).set_params(warm_start=True, tol=1e-6, max_iter=500)
    loaded.fit(overlapping)
    assert loaded.lower_bound_ > model.lower_bound_


def test_a_subclass_loads_itself(model, tmp_path):
    class Mine(GaussianMixture):
        pass

    model.save(tmp_path / "m")
    assert type(Mine.load(tmp_path / "m")) is Mine


def test_extreme_frames(tmp_path, blobs, kind):
    for scale in (1e-40, 1e30):
        X = blobs() * scale
        model = GaussianMixture(2, covariance_type=kind, random_state=0, reg_covar=0).fit(X)
        model.save(tmp_path / "m")
        loaded = GaussianMixture.load(tmp_path / "m")
        assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))


def test_numpy_scalars_as_options(overlapping, tmp_path):
    model = GaussianMixture(np.int64(2), tol=np.float32(1e-2), max_iter=np.int32(50)).fit(
        overlapping
    )
    model.save(tmp_path / "m")
    loaded = GaussianMixture.load(tmp_path / "m")
    assert loaded.max_iter == 50
    assert loaded.tol == pytest.approx(1e-2)


def test_feature_names_come_along(overlapping, tmp_path):
    """Else every call with a data frame would warn."""
    frame = pd.DataFrame(overlapping, columns=["a", "b", "c"])
    model = GaussianMixture(2, random_state=0).fit(frame)
    model.save(tmp_path / "m")
    loaded = GaussianMixture.load(tmp_path / "m")
    assert_array_equal(loaded.feature_names_in_, model.feature_names_in_)
    assert_array_equal(loaded.predict(frame), model.predict(frame))
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(frame[["c", "b", "a"]])


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -400])
def test_truncated_files(model, tmp_path, keep):
    path = tmp_path / "m"
    model.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match="m is not a readable safetensors file"):
        GaussianMixture.load(path)


def test_other_files(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.arange(9))
    (tmp_path / "text").write_text("weights = 1\n" * 40)
    (tmp_path / "pickle").write_bytes(pickle.dumps(np.arange(100)))
    for name in ("other.npz", "text", "pickle"):
        with pytest.raises(ValueError, match=f"{name} is not a readable safetensors file"):
            GaussianMixture.load(tmp_path / name)
    save_file({"weights": np.ones(3)}, tmp_path / "tensors")
    with pytest.raises(ValueError, match="not one of GaussianMixture"):
        GaussianMixture.load(tmp_path / "tensors")


@pytest.mark.parametrize("name", ["missing", "folder"])
def test_no_file(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match=f"no mixture file at .*{name}"):
        GaussianMixture.load(tmp_path / name)


def test_a_newer_version_is_refused(model, tmp_path):
    model.save(tmp_path / "m")
    newer = rewrite(tmp_path / "m", tmp_path / "n", lambda h: h.update(version=2))
    with pytest.raises(ValueError, match="has version 2, newer than 1: update gmm_ivf"):
        GaussianMixture.load(newer)


@pytest.mark.parametrize("key", ["version", "covariance_type", "exponent", "extra"])
def test_a_damaged_header_is_named(model, tmp_path, key):
    model.save(tmp_path / "m")
    damaged = rewrite(tmp_path / "m", tmp_path / "n", lambda h: h.pop(key))
    with pytest.raises(ValueError, match=f"n lacks .*{key}"):
        GaussianMixture.load(damaged)


def test_damaged_arrays_are_named(model, tmp_path):
    model.save(tmp_path / "m")
    with safe_open(tmp_path / "m", framework="numpy") as file:
        metadata = file.metadata()
    arrays = load_file(tmp_path / "m")
    for change, message in (
        ({"means": arrays["means"][:, :2]}, "must have shape"),
        ({"weights": arrays["weights"][:2]}, "weights must have shape"),
        ({"center": arrays["center"] * np.nan}, "center must be finite"),
    ):
        save_file({**arrays, **change}, tmp_path / "n", metadata=metadata)
        with pytest.raises(ValueError, match=message):
            GaussianMixture.load(tmp_path / "n")
    arrays.pop("center")
    save_file(arrays, tmp_path / "n", metadata=metadata)
    with pytest.raises(ValueError, match=r"lacks \['center'\]"):
        GaussianMixture.load(tmp_path / "n")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save_keeps_the_old_file(model, overlapping, tmp_path, monkeypatch, error):
    path = tmp_path / "m"
    model.save(path)
    before = path.read_bytes()

    def half_written(arrays, target, metadata):
        target.write_bytes(b"half")
        raise error

    monkeypatch.setattr(params, "save_file", half_written)
    with pytest.raises(error):
        GaussianMixture(2, random_state=0).fit(overlapping).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_the_old_file_stays_until_the_new_one_takes_its_place(model, tmp_path, monkeypatch):
    path = tmp_path / "m"
    model.save(path)
    before = path.read_bytes()

    def refused(source, target):
        assert path.read_bytes() == before
        raise OSError("no")

    monkeypatch.setattr(params.os, "replace", refused)
    with pytest.raises(OSError, match="no"):
        model.save(path)
    assert path.read_bytes() == before


def test_a_save_replaces(model, overlapping, tmp_path):
    path = tmp_path / "m"
    model.save(path)
    GaussianMixture(2, random_state=0).fit(overlapping).save(path)
    assert GaussianMixture.load(path).n_components == 2
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_folder_that_is_not_there(model, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to save m in"):
        model.save(tmp_path / "nowhere" / "m")


def test_a_fit_without_iterations_can_be_saved(overlapping, tmp_path):
    model = GaussianMixture(2, max_iter=0, random_state=0).fit(overlapping)
    model.save(tmp_path / "m")
    assert GaussianMixture.load(tmp_path / "m").lower_bound_ == -np.inf


@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_pickle_and_copy(model, overlapping, copied):
    other = copied(model)
    for name in ATTRIBUTES:
        assert_array_equal(getattr(other, name), getattr(model, name))
    assert_array_equal(other.predict_proba(overlapping), model.predict_proba(overlapping))
    assert other.get_params() == model.get_params()
