"""What would take the process down if it went wrong: run in processes of their own."""

import pytest

PRELUDE = """
import gc
import faiss
import numpy as np
from gmm_ivf import GMMQuantizer, IndexIVFGMM
rng = np.random.default_rng(0)
x = rng.normal(size=(1000, 8)).astype("f4")
def options():
    return dict(random_state=0, tol=1e-2)
"""

LIFETIME = {
    "stock": """
def build():
    q = GMMQuantizer(8, 6, **options())
    q.train(x)
    index = faiss.IndexIVFFlat(q, 8, 6)
    index.add(x)
    return index
""",
    "attached": """
def build():
    q = GMMQuantizer(8, 6, **options())
    q.train(x)
    index = faiss.index_factory(8, "IVF6,Flat")
    q.attach(index)
    index.add(x)
    return index
""",
    "adapter": """
def build():
    q = GMMQuantizer(8, 6, **options())
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 8, 6), q)
    index.train(x)
    index.add(x)
    return index
""",
    "recovered": """
def build():
    q = GMMQuantizer(8, 6, **options())
    index = IndexIVFGMM(faiss.IndexIVFPQ(q, 8, 6, 4, 4))
    del q
    gc.collect()
    index.train(x)
    index.add(x)
    return index
""",
}

SEARCH = """
index = build()
index.nprobe = 3
before = index.search(x[:50], 5)
gc.collect()
waste = [np.full(50, np.nan, "f4") for _ in range(10000)]
after = index.search(x[:50], 5)
np.testing.assert_array_equal(before[1], after[1])
np.testing.assert_array_equal(before[0], after[0])
del index
gc.collect()
print("alive")
"""


@pytest.mark.parametrize("name", LIFETIME)
def test_ix_l1_garbage_collection(in_subprocess, name):
    assert in_subprocess(PRELUDE + LIFETIME[name] + SEARCH) == "alive\n"


def test_many_attached_indexes(in_subprocess):
    """SWIG's references have to balance, or the process ends after a handful."""
    code = """
q = GMMQuantizer(8, 6, **options())
q.train(x)
for _ in range(100):
    index = faiss.index_factory(8, "IVF6,Flat")
    q.attach(index)
    del index
for _ in range(100):
    short = GMMQuantizer(8, 6)
    index = faiss.index_factory(8, "IVF6,Flat")
    short.attach(index)
    del short, index
gc.collect()
assert type(faiss.index_factory(8, "Flat")) is faiss.IndexFlat
print(q.ntotal)
"""
    assert in_subprocess(PRELUDE + code) == "6\n"


def test_ix_l2_invalid_lists(in_subprocess):
    code = """
q = GMMQuantizer(8, 6, **options())
index = IndexIVFGMM(faiss.IndexIVFFlat(q, 8, 6), q)
index.train(x)
for bad in (11, -2):
    try:
        index.add_preassigned(x[:2], [[0, bad], [1, 2]])
    except ValueError as error:
        print(error, index.ntotal, index.index.ntotal)
index.add_preassigned(x[:2], [[0, -1], [-1, -1]])
print(index.ntotal, index.index.ntotal)
"""
    assert in_subprocess(PRELUDE + code).splitlines() == [
        "lists must lie in [0, 6); got 11. 0 0",
        "lists must lie in [0, 6); got -2. 0 0",
        "1 1",
    ]


@pytest.mark.parametrize("spec", ["IVF6,PQ4x4fs", "IVF6,PQ4x4fsr", "IVF6,RaBitQfs"])
def test_ix_m2_fastscan_never_sees_copies(in_subprocess, spec):
    code = f"""
q = GMMQuantizer(8, 6, **options())
q.train(x)
index = faiss.index_factory(8, "{spec}")
q.attach(index)
index.train(x)
try:
    IndexIVFGMM(index, q).add(x)
except ValueError as error:
    print("FastScan" in str(error), index.ntotal)
"""
    assert in_subprocess(PRELUDE + code) == "True 0\n"


def test_missing_faiss_is_one_clear_sentence(in_subprocess):
    code = """
import sys
sys.modules["faiss"] = None
import gmm_ivf
gmm_ivf.GaussianMixture
for name in ("GMMQuantizer", "IndexIVFGMM"):
    try:
        getattr(gmm_ivf, name)
    except ImportError as error:
        print(error)
"""
    sentence = (
        'gmm_ivf needs faiss for indexes: pip install "gmm-ivf[cpu]", or "gmm-ivf[gpu]" on CUDA.'
    )
    assert in_subprocess(code).splitlines() == [sentence] * 2


def test_several_threads(in_subprocess):
    """FAISS slices queries by thread; ids and costs are those of one thread."""
    code = """
q = GMMQuantizer(8, 6, **options())
index = IndexIVFGMM(faiss.IndexIVFFlat(q, 8, 6), q)
index.train(x)
index.add(x)
index.nprobe = 3
faiss.omp_set_num_threads(1)
one = index.search(x, 5)
faiss.omp_set_num_threads(4)
four = index.search(x, 5)
print((one[1] == four[1]).mean() > 0.999)
"""
    assert in_subprocess(PRELUDE + code) == "True\n"
