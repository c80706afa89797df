"""What would take the process down if it went wrong: run in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

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


def test_a_quantizer_outlives_an_index_that_was_read(in_subprocess, tmp_path):
    """IndexIVFSpectralHash says twice what it owns."""
    code = f"""
from gmm_ivf import read_index, write_index
q = GMMQuantizer(8, 6, **options())
index = IndexIVFGMM(faiss.IndexIVFSpectralHash(q, 8, 6, 16, 10.0), q)
index.train(x)
index.add(x)
write_index(index, "{tmp_path / "index"}")
for _ in range(20):
    read = read_index("{tmp_path / "index"}")
    q = read.quantizer
    del read
    gc.collect()
    waste = [np.full(50, np.nan, "f4") for _ in range(1000)]
    assert (q.search(x[:5], 1)[1] >= 0).all()
    del q
    gc.collect()
print("alive")
"""
    assert in_subprocess(PRELUDE + code) == "alive\n"


def test_a_quantizer_outlives_the_copies_with_a_list_per_cell(in_subprocess):
    code = """
q = GMMQuantizer(8, 6, **options())
index = IndexIVFGMM(faiss.IndexIVFSpectralHash(q, 8, 6, 16, 10.0), q, layout="cells")
index.train(x)
index.nprobe = 6
for start in range(0, 1000, 200):
    index.add(x[start : start + 200])
    assert (index.search(x[:5], 9)[1] >= 0).all()
    gc.collect()
print("alive")
"""
    assert in_subprocess(PRELUDE + code) == "alive\n"


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


BAD_INPUT = """
import copy, itertools
faiss.omp_set_num_threads(1)
def build(spec, coarse="flat", **more):
    index = faiss.index_factory(8, spec)
    inner = faiss.extract_index_ivf(index)
    q = GMMQuantizer(inner.d, 6, coarse=coarse, **options())
    q.attach(index)
    return IndexIVFGMM(index, q, **more)

cases = {
    "flat": build("IVF6,Flat", max_lists=3),
    "fast": build("IVF6,PQ4x4", fast_scan=True),
    "bits": build("IVF6,RaBitQ", fast_scan=True, refine="flat"),
    "graph": build("IVF6,SQ8", "hnsw4", rule="soar"),
    "turned": build("PCAR6,IVF6,PQ3x4", refine="flat", k_factor=3),
}
nan, far = x[:4].copy(), np.full((4, 8), 1e30, "f4")
nan[2, 1] = np.nan
matrices = [
    x[:4], nan, far, -far, x[:0], x[0], x[:4, :5], np.zeros((4, 9), "f4"), x[:4].astype("f8"),
    x[:4].astype(complex), x[:4].astype(object), [["a"] * 8], None, 7, x[:4, ::-1], x[:4].T,
    np.full((4, 8), np.inf), np.zeros((4, 8), "i8"), np.asfortranarray(x[:4]), x[None, :4],
]
ids = [
    [0], [-1], [2**63], [2**64 - 1], [2**63 - 1], [2**63 - 2], [1.5], ["a"], None, 3, [], [[1]],
    [5, 5], np.arange(4), np.arange(4) + 10**6, [None], np.array([True] * 4), [10**30],
]
numbers = [0, -1, 1, 3, 10**4, 2.0, None, "3", True, np.int64(2), float("nan"), float("inf")]
lists = [[[0, 1]] * 4, [[6, 0]] * 4, [[-2, 0]] * 4, [[0, 0]] * 4, [[-1, -1]] * 4, [[]] * 4,
    [[0] * 7] * 4, [0, 1], None, [[0.5]] * 4, [[10**12]] * 4, [[2**63]] * 4, [list(range(6))] * 4]
calls = {
    "train": [matrices], "add": [matrices], "add_with_ids": [matrices, ids],
    "add_preassigned": [matrices[:4], lists], "search": [matrices, numbers],
    "range_search": [matrices, numbers], "search_preassigned": [matrices[:4], numbers[:5], lists],
    "search_and_reconstruct": [matrices[:5], numbers[:5]], "remove_ids": [ids],
    "reconstruct": [[0, -1, 10**6, 2**63, 1.5, None, "a", [1]]],
    "reconstruct_n": [numbers, numbers],
    "reconstruct_batch": [ids], "update_vectors": [ids, matrices[:8]],
    "merge_from": [[None, 3, cases["flat"].index, *cases.values()]],
}
done = refused = 0
allowed = (ValueError, TypeError, RuntimeError, NotImplementedError, OverflowError)
for name, index in cases.items():
    for trained in (False, True):
        if trained:
            index.train(x)
            index.add(x)
            index.nprobe = 3
        for method, arguments in calls.items():
            if trained and method == "train":
                continue
            for chosen in itertools.product(*arguments):
                if method == "train" and not (chosen[0] is None or np.ndim(chosen[0]) != 2):
                    continue
                index_now = copy.deepcopy(index) if method == "merge_from" else index
                try:
                    getattr(index_now, method)(*chosen)
                    done += 1
                except allowed as error:
                    assert str(error), (method, chosen)
                    refused += 1
    index.reset()
    index.add(x)
    assert index.search(x[:50], 1)[1].min() >= 0 and index.ntotal == 1000, name
print("alive", done > 100, refused > 1000)
"""


def test_bad_input_never_ends_the_process(in_subprocess):
    assert in_subprocess(PRELUDE + BAD_INPUT) == "alive True True\n"


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


MEMORY = """
import os, sys, threading, time
import faiss
import numpy as np
from gmm_ivf import GMMQuantizer, IndexIVFGMM

def trained(x):
    q = GMMQuantizer(64, 32, random_state=0, max_iter=2, max_points_per_centroid=None)
    soft = IndexIVFGMM(faiss.IndexIVFFlat(q, 64, 32), q)
    soft.train(x)
    return soft

def private():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) / 1024

x = np.memmap(sys.argv[1], np.float32, "r", shape=(320_000, 64))
trained(np.array(x[:2000]))
base, top, going = private(), 0.0, True
def watch():
    global top
    while going:
        top = max(top, private())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
soft = trained(x)
going = False
watcher.join()
print(top - base, soft.is_trained)
"""


def test_ix_s1_training_reads_a_file_in_blocks(tmp_path):
    """320,000 x 64 floats are 82 MB; k-means and the threshold see samples, EM sees tiles."""
    path = tmp_path / "x.f32"
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(16):
            file.write(rng.standard_normal((20_000, 64), dtype=np.float32).tobytes())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY, str(path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown, trained = done.stdout.split()
    assert trained == "True"
    assert float(grown) < 60  # MB
