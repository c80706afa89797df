"""IndexIVFGMM: construction, training, which lists a vector gets, storage."""

import faiss
import numpy as np
import pandas as pd
import pytest
import torch

from gmm_ivf import GMMQuantizer, IndexIVFGMM

METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)
MORE_CODECS = {
    "FlatDedup": lambda q: faiss.IndexIVFFlatDedup(q, q.d, q.nlist),
    "EDEN": lambda q: faiss.IndexIVFEDEN(q, q.d, q.nlist),
    "SpectralHash": lambda q: faiss.IndexIVFSpectralHash(q, q.d, q.nlist, 16, 10.0),  # pyright: ignore
    "Residual": lambda q: faiss.IndexIVFResidualQuantizer(q, q.d, q.nlist, 2, 4),
    "LocalSearch": lambda q: faiss.IndexIVFLocalSearchQuantizer(q, q.d, q.nlist, 2, 4),
    "ProductResidual": lambda q: faiss.IndexIVFProductResidualQuantizer(q, q.d, q.nlist, 2, 2, 4),
    "ProductLocalSearch": lambda q: faiss.IndexIVFProductLocalSearchQuantizer(
        q, q.d, q.nlist, 2, 2, 4
    ),
}
SPECS_REFUSED = {
    "IVF4,PQ4x4fs": "copies corrupt its packed blocks.*IndexIVFPQ ",
    "IVF4,PQ4x4fsr": "IndexIVFPQFastScan",
    "IVF4,RaBitQfs": "IndexIVFRaBitQFastScan.*IndexIVFRaBitQ ",
    "IVF4,RaBitQfs4": "IndexIVFRaBitQFastScan",
    "IVF4,FlatPanorama2": "Panorama.*IndexIVFFlat",
    "PCA4,IVF4,PQ2x4fs": "IndexIVFPQFastScan.*fast_scan=True",
    "IDMap,IVF4,Flat": "IndexIDMap.*index.index",
    "IDMap2,IVF4,Flat": "IndexIDMap2",
    "IVF4,PQ4+4": "IndexIVFPQR.*beside its lists",
    "IVF4,Flat,RFlat": "IndexRefine.*refine=.flat",
    "Flat": "IndexFlat.*only an IVF index",
}


@pytest.mark.parametrize("max_lists", [2, 4])
def test_ix_d1_every_id_once_per_list(blobs, soft, entries_of, max_lists):
    x = blobs(1000, 8)
    index = soft(x, 10, max_lists=max_lists, replication=1.8)
    index.add(x)
    held = np.concatenate([np.unique(ids) for ids in entries_of(index.index)])
    assert len(held) == index.index.ntotal  # no id twice in one list
    counts = np.bincount(held, minlength=1000)
    assert counts.min() == 1
    assert 1 < counts.max() == index.max_copies <= max_lists
    assert (index.ntotal, index.stats()["entries"]) == (1000, index.index.ntotal)
    assert index.stats()["entries_per_vector"] == pytest.approx(1.8, abs=0.001)
    index.nprobe = 5
    for row in index.search(x, 20)[1]:
        known = row[row >= 0]
        assert len(known) == len(set(known))


def test_primary_list_is_nearest_mean(blobs, soft, entries_of):
    x = blobs(1500, 8)
    index = soft(x, 10)
    index.add(x)
    nearest = index.quantizer.search(x, 1)[1][:, 0]
    lists = entries_of(index.index)
    assert all(i in lists[nearest[i]] for i in range(1500))
    # Further lists are those of posterior above tau.
    resp = index.quantizer.mixture.predict_proba(x)
    for number, ids in enumerate(lists):
        further = ids[nearest[ids] != number]
        assert (resp[further, number] > index.tau * (1 - 1e-5)).all()


def test_tau_is_a_threshold(blobs, trained, codec):
    x = blobs(1500, 8)
    q = trained(x, 10)
    index = IndexIVFGMM(codec("Flat", q), q, tau=0.1, max_lists=10)
    assert index.is_trained  # q is, Flat has nothing to train, and tau is known
    assert index.tau == pytest.approx(0.1, rel=1e-12)
    index.add(x)
    nearest = q.search(x, 1)[1][:, 0]
    resp = q.mixture.predict_proba(x).astype("f8")
    chosen = resp > 0.1
    chosen[np.arange(1500), nearest] = True
    np.testing.assert_array_equal(index.stats()["list_sizes"], chosen.sum(axis=0))


@pytest.mark.parametrize("name", MORE_CODECS)
def test_other_codecs(blobs, trained, name):
    x = blobs(800, 8)
    q = trained(x, 4)
    index = IndexIVFGMM(MORE_CODECS[name](q), q)
    index.train(x)
    index.add(x)
    index.nprobe = 4
    labels = index.search(x[:50], 10)[1]
    assert all(len(set(row)) == 10 for row in labels)
    assert (labels == np.arange(50)[:, None]).any(axis=1).mean() > 0.6
    assert index.remove_ids(np.arange(50)) == 50
    assert not np.isin(index.search(x[:50], 10)[1], np.arange(50)).any()


@pytest.mark.parametrize("spec", SPECS_REFUSED)
def test_ix_m2_refused_types(spec):
    with pytest.raises(ValueError, match=SPECS_REFUSED[spec]):
        IndexIVFGMM(faiss.index_factory(8, spec), GMMQuantizer(8, 4))


def test_refused_objects():
    with pytest.raises(ValueError, match=r"must be a faiss.IndexIVF; got str"):
        IndexIVFGMM("IVF4,Flat")

    class GpuIndexIVFFlat:
        pass

    with pytest.raises(ValueError, match="GpuIndexIVFFlat: wrap the CPU index"):
        IndexIVFGMM(GpuIndexIVFFlat())
    with pytest.raises(ValueError, match="IndexBinaryIVF"):
        IndexIVFGMM(faiss.index_binary_factory(8, "BIVF4"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layout": "rows"}, ValueError, 'layout must be "lists" or "cells"; got .rows'),
        ({"cells": object()}, ValueError, "cells holds options"),
        ({"rule": "best"}, ValueError, "rule must be one of.*'responsibility', 'air'.*got 'best'"),
        ({"rule": None}, ValueError, "rule must be one of.*got None"),
        ({"tau": 0.1, "replication": 1.2}, ValueError, "exclude each other"),
        ({"tau": 0.0}, ValueError, r"tau must be a number in \(0, 1\)"),
        ({"tau": 1.0}, ValueError, "tau must be"),
        ({"tau": float("nan")}, ValueError, "tau must be"),
        ({"tau": "1/K"}, ValueError, "tau must be"),
        ({"replication": 0.9}, ValueError, "replication must be a number of at least 1"),
        ({"replication": float("nan")}, ValueError, "replication must be"),
        ({"replication": 2.5}, ValueError, "replication=2.5 exceeds max_lists=2"),
        ({"replication": 1.5, "max_lists": 1}, ValueError, "exceeds max_lists=1"),
        ({"max_lists": 0}, ValueError, "max_lists must be"),
    ],
)
def test_bad_options(options, error, message):
    q = GMMQuantizer(4, 3)
    with pytest.raises(error, match=message):
        IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 3), q, **options)


def test_type_is_checked_before_options():
    with pytest.raises(ValueError, match="FastScan"):
        IndexIVFGMM(faiss.index_factory(8, "IVF4,PQ4x4fs"), layout="cells", tau=7)


def test_quantizer_must_be_that_of_the_index(blobs, trained):
    x = blobs(400, 4)
    q, other = trained(x, 3), trained(x, 3)
    index = faiss.IndexIVFFlat(q, 4, 3)
    with pytest.raises(ValueError, match=r"index\.quantizer is not q"):
        IndexIVFGMM(index, other)
    with pytest.raises(ValueError, match="q must be a GMMQuantizer; got IndexFlatL2"):
        IndexIVFGMM(index, faiss.IndexFlatL2(4))
    with pytest.raises(ValueError, match="index has nlist=5, q has 3"):
        IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 5), q)
    # Not that quantizer and of another shape: the shape is what helps.
    with pytest.raises(ValueError, match="index has nlist=4, q has 3"):
        IndexIVFGMM(faiss.IndexIVFFlat(trained(x, 4), 4, 4), q)
    assert IndexIVFGMM(index).quantizer is q
    plain = faiss.IndexFlatL2(4)
    with pytest.raises(ValueError, match="q is None and the index refers to no GMMQuantizer"):
        IndexIVFGMM(faiss.IndexIVFFlat(plain, 4, 3))
    with pytest.raises(ValueError, match="q is None"):
        IndexIVFGMM(faiss.clone_index(index))
    index.add(x)
    with pytest.raises(ValueError, match="must be empty; it holds 400"):
        IndexIVFGMM(index, q)


def test_attached_and_factory_index(blobs, trained):
    x = blobs(600, 8)
    index = faiss.index_factory(8, "IVF4,SQ8")
    q = trained(x, 4)
    q.attach(index)
    wrapper = IndexIVFGMM(index)
    assert not wrapper.is_trained
    wrapper.train(x)
    wrapper.add(x)
    assert wrapper.ntotal == 600


def test_training_does_both_steps(blobs):
    x = blobs(1500, 8)
    q = GMMQuantizer(8, 6, random_state=0, tol=1e-2)
    index = IndexIVFGMM(faiss.IndexIVFPQ(q, 8, 6, 4, 4), q)
    assert not index.is_trained
    assert index.tau is None
    for call in (lambda: index.add(x), lambda: index.search(x, 1)):
        with pytest.raises(RuntimeError, match="not trained: call train"):
            call()
    index.train(x)
    assert index.is_trained
    assert q.is_trained
    assert index.tau is not None
    assert 0 < index.tau < 1
    assert (index.d, index.nlist, index.metric_type, index.nprobe) == (8, 6, faiss.METRIC_L2, 1)
    index.add(x)
    with pytest.raises(RuntimeError, match=r"holds 1500 vectors: call reset"):
        index.train(x)
    assert repr(index) == (
        f"IndexIVFGMM(IndexIVFPQ, d=8, nlist=6, nprobe=1, max_lists=2, tau={index.tau}, "
        "ntotal=1500, entries=2250)"
    )


def test_replication_needs_a_sample(blobs, trained):
    x = blobs(400, 4)
    q = trained(x, 3)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 3), q)
    assert not index.is_trained
    with pytest.raises(RuntimeError, match="call train"):
        index.add(x)
    with pytest.raises(ValueError, match="at least one row"):
        index.train(x[:0])


@METRICS
@pytest.mark.parametrize("replication", [1.0, 1.2, 1.5, 2.0, 3.0])
def test_replication_is_what_is_stored(blobs, soft, metric, replication):
    x = blobs(3000, 12)
    index = soft(x, 16, metric=metric, replication=replication, max_lists=3)
    index.add(x)
    assert index.stats()["entries_per_vector"] == pytest.approx(replication, abs=0.001)
    index.reset()
    index.add(blobs(3000, 12, seed=5))
    assert 1 <= index.stats()["entries_per_vector"] <= 3


def test_equal_points_cannot_be_split(trained):
    x = np.repeat(np.eye(3, dtype="f4"), 100, axis=0)
    q = trained(x, 3)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 3, 3), q, replication=1.1)
    with pytest.warns(UserWarning, match=r"replication=1.1 was asked for and 1.00"):
        index.train(x)
    index.add(x)
    labels = index.search(x[:1], 200)[1]
    assert len(set(labels[0][:100].tolist())) == 100
    assert (labels[0][100:] == -1).all()


def test_all_points_equal(blobs):
    x = np.full((200, 4), 2.5, "f4")
    q = GMMQuantizer(4, 3, random_state=0)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 3), q)
    with pytest.warns(UserWarning):
        index.train(x)
    index.add(x)
    index.nprobe = 3
    distances, labels = index.search(x[:2], 250)
    assert sorted(labels[0][:200].tolist()) == list(range(200))
    assert (labels[:, 200:] == -1).all()
    assert (distances[:, :200] == 0).all()


def test_single_list(blobs):
    x = blobs(100, 3)
    q = GMMQuantizer(3, 1)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 3, 1), q)
    index.train(x)
    index.add(x)
    assert index.stats()["entries_per_vector"] == 1
    assert (index.max_lists, index.tau) == (1, 1.0)


@pytest.mark.parametrize("d", [1, 2, 3, 17, 96, 100, 128])
def test_dimensions(blobs, soft, d):
    x = blobs(600, d)
    index = soft(x, 5)
    index.add(x)
    index.nprobe = 5
    distances, labels = index.search(x[:40], 1)
    assert (labels[:, 0] == np.arange(40)).mean() > 0.97  # d = 1 has ties
    assert (distances < 1e-4).all()


def test_layouts_and_dtypes(blobs, soft, tmp_path):
    x = np.rint(8 * blobs(500, 6)).astype("f4")
    on_disk = np.memmap(tmp_path / "x.dat", "f4", "w+", shape=x.shape)
    on_disk[:] = x
    guises = [
        np.asfortranarray(x),
        np.repeat(x, 2, axis=1)[:, ::2],
        x.astype("f8"),
        x.astype("f2"),
        x.astype("i4"),
        on_disk,
        x.tolist(),
        torch.from_numpy(x),
        torch.from_numpy(x).bfloat16(),
        pd.DataFrame(x, columns=list("abcdef")),
    ]
    index = soft(x, 5)
    index.add(x)
    index.nprobe = 3
    want = index.search(x, 6)
    for guise in guises:
        index.reset()
        index.train(guise)
        index.add(guise)
        got = index.search(guise, 6)
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_array_equal(got[0], want[0])


def test_ix_b1_statistics(soft):
    rng = np.random.default_rng(0)
    x = np.concatenate([0.05 * rng.normal(size=(4500, 8)), 3 * rng.normal(size=(500, 8))])
    index = soft(x.astype("f4"), 16, max_lists=4)
    empty = index.stats()
    assert (empty["ntotal"], empty["entries"]) == (0, 0)
    assert np.isnan(empty["entries_per_vector"])
    index.add(x)
    stats = index.stats()
    sizes = stats["list_sizes"]
    assert sizes.sum() == stats["entries"] == index.index.ntotal
    assert stats["max_over_mean"] == pytest.approx(sizes.max() / sizes.mean())
    assert stats["imbalance"] == pytest.approx(index.index.invlists.imbalance_factor())
    assert stats["bytes"] >= stats["entries"] * (8 * 4 + 8) + 16 * 8 * 4
    assert stats["bytes_per_vector"] == stats["bytes"] / 5000
    sizes[:] = 0
    assert index.stats()["entries"] == stats["entries"]


@pytest.mark.parametrize(
    "name", ["copy_subset_to", "make_direct_map", "set_direct_map_type", "add_core", "sa_encode"]
)
def test_missing_methods_say_so(blobs, soft, name):
    index = soft(blobs(300, 4), 3)
    with pytest.raises(NotImplementedError, match=rf"IndexIVFGMM\.{name} is not available: "):
        getattr(index, name)(1, 2)


def test_names_that_it_does_not_have_are_not_set(blobs, trained, codec):
    x = blobs(300, 8)
    index = IndexIVFGMM(codec("Flat", trained(x, 4)))
    with pytest.raises(AttributeError, match="IndexIVFGMM has no attribute 'nprobes' to set"):
        index.nprobes = 4
    assert not hasattr(index, "nprobes")


def test_a_subclass_declares_its_own_names(blobs, trained, codec):
    class Named(IndexIVFGMM):
        name: str
        version = 0

    index = Named(codec("Flat", trained(blobs(300, 8), 4)))
    index.name, index.version = "mine", 2
    assert (index.name, index.version, index._k_factor) == ("mine", 2, 1.0)
    with pytest.raises(AttributeError, match="Named has no attribute 'owner'"):
        index.owner = "me"
    Named.owner = None
    index.owner = "me"
    assert index.owner == "me"
