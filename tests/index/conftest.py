"""Data and small indexes shared by the tests of quantizer and index."""

import subprocess
import sys

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM

SQ = faiss.ScalarQuantizer
CODECS = {
    "Flat": lambda q, metric: faiss.IndexIVFFlat(q, q.d, q.nlist, metric),
    "PQ": lambda q, metric: faiss.IndexIVFPQ(q, q.d, q.nlist, 4, 4, metric),
    "SQ8": lambda q, metric: faiss.IndexIVFScalarQuantizer(
        q, q.d, q.nlist, SQ.QT_8bit, metric, True
    ),
    "SQ4": lambda q, metric: faiss.IndexIVFScalarQuantizer(
        q, q.d, q.nlist, SQ.QT_4bit, metric, True
    ),
    "SQfp16": lambda q, metric: faiss.IndexIVFScalarQuantizer(
        q, q.d, q.nlist, SQ.QT_fp16, metric, True
    ),
    "RaBitQ": lambda q, metric: faiss.IndexIVFRaBitQ(q, q.d, q.nlist, metric),
    "RaBitQ4": lambda q, metric: faiss.IndexIVFRaBitQ(q, q.d, q.nlist, metric, True, 4),
    "PQ8": lambda q, metric: faiss.IndexIVFPQ(q, q.d, q.nlist, 2, 8, metric),
    "SQbf16": lambda q, metric: faiss.IndexIVFScalarQuantizer(
        q, q.d, q.nlist, SQ.QT_bf16, metric, False
    ),
    "Residual": lambda q, metric: faiss.IndexIVFResidualQuantizer(q, q.d, q.nlist, 3, 4, metric),
    "LocalSearch": lambda q, metric: faiss.IndexIVFLocalSearchQuantizer(
        q, q.d, q.nlist, 3, 4, metric
    ),
    "ProductResidual": lambda q, metric: faiss.IndexIVFProductResidualQuantizer(
        q, q.d, q.nlist, 2, 2, 4, metric
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    """FAISS slices a batch by thread, and slices round differently: comparisons need one."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


@pytest.fixture
def blobs():
    """Overlapping clusters: ``blobs(n, d, seed=0, centers=24)`` is (n, d) float32."""

    def make(n, d, seed=0, centers=24):
        rng = np.random.default_rng(seed)
        means = rng.normal(size=(centers, d))
        return (means[rng.integers(0, centers, n)] + 0.6 * rng.normal(size=(n, d))).astype("f4")

    return make


@pytest.fixture
def trained():
    """``trained(x, nlist, **options)``: a trained quantizer."""

    def make(x, nlist, metric=faiss.METRIC_L2, **options):
        options = {"random_state": 0, "tol": 1e-2, **options}
        q = GMMQuantizer(x.shape[1], nlist, metric, **options)
        q.train(x)
        return q

    return make


@pytest.fixture
def table():
    """``table(q)``: the centroids of a flat index, (ntotal, d) float32."""
    return lambda q: faiss.rev_swig_ptr(q.get_xb(), q.ntotal * q.d).reshape(q.ntotal, q.d).copy()


@pytest.fixture
def codec():
    """``codec(name, q)``: an index of a wrapped type over q, trained by nobody."""
    return lambda name, q: CODECS[name](q, q.metric_type)


@pytest.fixture
def soft(trained, codec):
    """``soft(x, nlist, codec="Flat", metric=..., **options)``: trained and empty."""

    def make(x, nlist, name="Flat", metric=faiss.METRIC_L2, **options):
        q = trained(x, nlist, metric)
        index = IndexIVFGMM(codec(name, q), q, **options)
        index.train(x)
        return index

    return make


@pytest.fixture
def in_subprocess():
    """Run code in a process of its own and return its output; a crash fails the test."""

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
        return done.stdout

    return run


@pytest.fixture
def entries_of():
    """``entries_of(index)``: the ids in each list of a wrapped index."""

    def read(index):
        lists = index.invlists
        sizes = [lists.list_size(i) for i in range(index.nlist)]
        return [
            faiss.rev_swig_ptr(lists.get_ids(i), n).copy() if n else np.empty(0, np.int64)
            for i, n in enumerate(sizes)
        ]

    return read


@pytest.fixture
def ivf_parameters():
    """``ivf_parameters(**fields)``: faiss.SearchParametersIVF with fields set."""

    def make(**fields):
        parameters = faiss.SearchParametersIVF()
        for name, value in fields.items():
            setattr(parameters, name, value)
        return parameters

    return make
