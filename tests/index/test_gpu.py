"""`to_gpu`: with a stand-in for faiss-gpu its logic and limits, with a GPU its results."""

import gc

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM, index_factory
from gmm_ivf._gpu_limits import GPU_LIMIT

HAS_GPU = hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU")


class Options:
    use_cuvs = True
    useFloat16 = False


@pytest.fixture
def stand_in(monkeypatch):
    """faiss as on a machine with one GPU, whose indexes are clones on the CPU; what was asked."""
    asked = []

    def to_gpu(resources, device, index, options):
        asked.append((type(index).__name__, device, options.use_cuvs, options.useFloat16))
        clone = faiss.clone_index(index)
        if isinstance(clone, faiss.IndexIVF):
            clone.parallel_mode = 3
        return clone

    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "GpuClonerOptions", Options, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", to_gpu, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    return asked


def made(text, d, metric=faiss.METRIC_L2):
    """`index_factory` with a codec that is trained quickly."""
    # On a GPU the kernels of EM would take longer to compile than the fit takes.
    index = index_factory(d, text, metric, random_state=0, tol=1e-2, device="cpu")
    if isinstance(index.index, faiss.IndexIVFPQ):
        index.index.pq.cp.niter = 1
    return index


def check_equal(index, on_gpu, queries, k=10, exactly=True):
    """Same results and costs; without `exactly`, distances to rounding and ids but for ties."""
    (d, i), (gd, gi) = index.search(queries, k), on_gpu.search(queries, k)
    if exactly:
        np.testing.assert_array_equal(gi, i)
        np.testing.assert_array_equal(gd, d)
    else:
        assert (gi == i).mean() > 0.995
        np.testing.assert_allclose(gd, d, rtol=1e-3, atol=1e-3 * np.abs(d[i >= 0]).max())
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in gi)
    same = index.last_search.scanned == on_gpu.last_search.scanned
    assert same.all() if exactly else same.mean() > 0.99
    np.testing.assert_array_equal(on_gpu.last_search.coarse, index.last_search.coarse)


@pytest.mark.parametrize("name", ["Flat", "SQ8", "SQ4", "SQfp16", "PQ4"])
@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
def test_results_and_costs(blobs, stand_in, name, metric):
    x, queries = blobs(1500, 8), blobs(60, 8, seed=1)
    index = made(f"GMM12x3,{name}", 8, metric)
    index.train(x)
    index.add(x)
    index.nprobe = 4
    on_gpu = index.to_gpu()
    assert [what[1:] for what in stand_in] == [(0, False, False)] * 2
    check_equal(index, on_gpu, queries)
    # nprobe is a setting of its own, and parameters are heeded.
    on_gpu.nprobe = 2
    assert (index.nprobe, on_gpu.ntotal, on_gpu.d, on_gpu.nlist) == (4, 1500, 8, 12)
    found = on_gpu.search(queries, 5)[1]
    index.nprobe = 2
    np.testing.assert_array_equal(found, index.search(queries, 5)[1])
    more = faiss.SearchParametersIVF(nprobe=7)  # pyright: ignore
    np.testing.assert_array_equal(
        on_gpu.search(queries, 5, more)[1], index.search(queries, 5, more)[1]
    )


def test_far_from_the_origin_and_bad_queries(blobs, soft, stand_in):
    x = blobs(600, 6) + np.float32(2000)
    index = soft(x, 8)
    index.add(x)
    index.nprobe = 3
    queries = x[:20].copy()
    queries[3, 2] = np.nan
    check_equal(index, index.to_gpu(), queries)


def test_transforms_and_originals(blobs, stand_in):
    x = blobs(900, 8)
    index = index_factory(8, "PCA6,GMM8x2,SQ4,RFlat", random_state=0, tol=1e-2)
    index.train(x)
    index.add(x)
    index.k_factor, index.nprobe = 3, 3
    check_equal(index, index.to_gpu(), blobs(40, 8, seed=1))


def test_a_graph_over_the_means(blobs, stand_in):
    x = blobs(3000, 8)
    index = made("GMM60x2_HNSW8,SQ8", 8)
    index.train(x)
    index.add(x)
    index.nprobe = 5
    check_equal(index, index.to_gpu(), blobs(40, 8, seed=1))
    assert (index.last_search.coarse != 60).all()


@pytest.mark.parametrize("name", ["Flat", "SQ8", "PQ4"])
@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
@pytest.mark.parametrize("coarse", ["", "_HNSW8"])
def test_cells(blobs, stand_in, name, metric, coarse):
    x, queries = blobs(3000, 8), blobs(60, 8, seed=1)
    index = made(f"GMM20cells6{coarse},{name}", 8, metric)
    index.train(x)
    index.add(x)
    index.nprobe = 3
    on_gpu = index.to_gpu()
    assert on_gpu.index.ntotal == 3000
    d, i = index.search(queries, 10)
    gd, gi = on_gpu.search(queries, 10)
    assert all(len(set(row)) == 10 for row in gi)
    # The last cell of a query is scanned whole, so a few better ones may come in.
    better = gd.sum(axis=1) <= d.sum(axis=1) * (1 + 1e-5)
    better = better if metric == faiss.METRIC_L2 else gd.sum(axis=1) >= d.sum(axis=1) - 1e-3
    assert better.all()
    assert (gi == i).mean() > 0.9
    mine, theirs = on_gpu.last_search, index.last_search
    assert (mine.scanned >= theirs.scanned).all()
    assert mine.scanned.mean() < theirs.scanned.mean() + 3 * index.stats()["vectors_per_cell"]
    np.testing.assert_array_equal(mine.coarse, theirs.coarse)
    np.testing.assert_allclose(mine.ranking, theirs.ranking)
    few = faiss.SearchParametersIVF()
    few.nprobe, few.max_codes = 3, 60
    on_gpu.search(queries, 10, few)
    scanned = on_gpu.last_search.scanned
    assert (scanned >= 60).all()
    assert scanned.mean() < 60 + 3 * index.stats()["vectors_per_cell"]
    index.nprobe = on_gpu.nprobe = 20
    check_equal(index, on_gpu, queries, exactly=False)


def test_cells_beyond_the_limits(blobs, stand_in, monkeypatch):
    x = blobs(3000, 8)
    index = made("GMM20cells6,Flat", 8)
    index.train(x)
    with pytest.raises(ValueError, match="goes to a GPU with its vectors: add them first"):
        index.to_gpu()
    index.add(x)
    on_gpu = index.to_gpu()
    with pytest.raises(ValueError, match="fetches at most 2048 entries per query; k=2049"):
        on_gpu.search(x[:2], 2049)
    monkeypatch.setattr("gmm_ivf._gpu_limits.GPU_LIMIT", 30)
    on_gpu.nprobe = 20
    with pytest.raises(ValueError, match="cells to scan with nprobe=20 must be at most 30"):
        on_gpu.search(x[:2], 3)
    index.remove_ids([1])
    with pytest.raises(RuntimeError, match="changed after to_gpu"):
        on_gpu.search(x[:2], 3)


def test_large_codes_need_float16_tables(blobs, stand_in):
    x = blobs(700, 112)
    q = GMMQuantizer.from_centroids(x[:3])
    for m in (28, 56):
        stock = faiss.IndexIVFPQ(q, 112, 3, m, 8)
        stock.pq.cp.niter = 1
        index = IndexIVFGMM(stock, q, max_lists=1)
        index.train(x)
        index.to_gpu()
    assert [what[3] for what in stand_in if what[0] == "IndexIVFPQ"] == [False, True]


def test_lists_of_the_caller_and_decoding(blobs, soft, stand_in):
    x = blobs(500, 6)
    index = soft(x, 8, "SQ8")
    index.add(x)
    on_gpu, lists = index.to_gpu(), np.array([[0, 3, -1], [5, 1, 2]])
    for ours, theirs in zip(
        on_gpu.search_preassigned(x[:2], 4, lists),
        index.search_preassigned(x[:2], 4, lists),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(on_gpu.reconstruct(7), index.reconstruct(7))


def test_ix_l1_garbage_collection(blobs, soft, stand_in):
    x = blobs(400, 6)

    def build():
        index = soft(x, 5)
        index.add(x)
        return index.to_gpu()

    on_gpu = build()
    before = on_gpu.search(x[:20], 4)
    gc.collect()
    for ours, theirs in zip(on_gpu.search(x[:20], 4), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_copy_knows_that_it_is_old(blobs, soft, stand_in):
    x = blobs(400, 6)
    index = soft(x, 5)
    index.add(x)
    on_gpu = index.to_gpu()
    assert repr(on_gpu) == "GpuIndexIVFGMM(IndexIVFFlat, d=6, nlist=5, nprobe=1, ntotal=400)"
    for change in (lambda: index.remove_ids([3]), lambda: index.add(x[:1]), index.reset):
        on_gpu = index.to_gpu()
        change()
        with pytest.raises(RuntimeError, match=r"changed after to_gpu: call to_gpu\(\) again"):
            on_gpu.search(x[:2], 3)


def test_ix_g2_limits(blobs, soft, stand_in):
    x = blobs(2600, 4)
    index = soft(x, 5, tau=1e-9, max_lists=3)
    index.add(x)
    index.nprobe = 5
    on_gpu = index.to_gpu()
    copies = index.max_copies
    assert copies == 3
    most = GPU_LIMIT // copies
    check_equal(index, on_gpu, x[:3], most)
    with pytest.raises(ValueError, match=rf"at most 2048 entries per query; k={most + 1}, for"):
        on_gpu.search(x[:3], most + 1)
    index.nprobe = on_gpu.nprobe = 1  # one list has no copies
    check_equal(index, on_gpu, x[:3], 2048)
    with pytest.raises(ValueError, match=r"k=2049\. Lower k, or search on the CPU"):
        on_gpu.search(x[:3], 2049)


def test_ix_g2_nprobe(blobs, stand_in):
    means = blobs(2100, 3)
    q = GMMQuantizer.from_centroids(means)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 3, 2100), q, max_lists=1)
    index.add(means)
    on_gpu = index.to_gpu()
    on_gpu.nprobe = 2048
    on_gpu.search(means[:2], 3)
    on_gpu.nprobe = 2049
    with pytest.raises(ValueError, match="nprobe must be at most 2048 on a GPU; got 2049"):
        on_gpu.search(means[:2], 3)


def test_parameters_that_a_gpu_does_not_heed(blobs, soft, stand_in):
    x = blobs(300, 4)
    index = soft(x, 4)
    index.add(x)
    on_gpu = index.to_gpu()
    with_selector, with_limit = faiss.SearchParametersIVF(), faiss.SearchParametersIVF()
    with_selector.sel, with_limit.max_codes = faiss.IDSelectorRange(0, 9), 5
    with pytest.raises(NotImplementedError, match=r"params\.sel is not available on a GPU"):
        on_gpu.search(x, 3, with_selector)
    with pytest.raises(
        NotImplementedError, match="max_codes=5 is not available on a GPU but for cells"
    ):
        on_gpu.search(x, 3, with_limit)
    with pytest.raises(NotImplementedError, match="no range_search"):
        on_gpu.range_search(x, 1.0)
    for name in ("add", "train", "remove_ids"):
        assert not hasattr(on_gpu, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("GMM4,RaBitQ", "IndexIVFRaBitQ on a GPU: faiss-gpu has Flat, SQ and PQ"),
        ("GMM4,PQ4x4", "codes of 8 bits only, this one has 4"),
        ("GMM4,PQ4x4fs", "codes of 8 bits only"),
        ("GMM4,PQ7", "codes of 1, 2, 3, 4, 8, .* bytes, not 7"),
        ("GMM4,SQbf16", "faiss-gpu has SQ of 8bit"),
    ],
)
def test_what_a_gpu_cannot_do(blobs, stand_in, text, message):
    x = blobs(300, 28)
    index = made(text, 28)
    index.train(x)
    with pytest.raises(NotImplementedError, match=message):
        index.to_gpu()
    assert stand_in == []


def test_devices(blobs, soft, stand_in):
    index = soft(blobs(300, 4), 4)
    with pytest.raises(ValueError, match=r"device must be in \[0, 1\), the GPUs .*; got 3"):
        index.to_gpu(3)


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="faiss has GPU support")
def test_without_gpu_support(blobs, soft):
    index = soft(blobs(300, 4), 4)
    with pytest.raises(RuntimeError, match="this faiss was built without GPU support"):
        index.to_gpu()


def test_an_untrained_index(stand_in):
    with pytest.raises(RuntimeError, match="not trained"):
        index_factory(4, "GMM4,Flat").to_gpu()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["Flat", "SQ8", "SQfp16", "SQ4", "PQ16", "PQ56"])
@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
def test_ix_g1_results_on_a_gpu(blobs, name, metric):
    d = 112
    x, queries = blobs(20000, d), blobs(500, d, seed=1)
    index = made(f"GMM64x2,{name}", d, metric)
    index.train(x)
    index.add(x)
    index.nprobe = 8
    on_gpu = index.to_gpu()
    if name == "PQ56":  # Tables of float16 there.
        found, truth = on_gpu.search(queries, 10)[1], index.search(queries, 10)[1]
        assert np.mean([len(set(a) & set(b)) for a, b in zip(found, truth, strict=True)]) > 9.5
    else:
        check_equal(index, on_gpu, queries, exactly=False)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["Flat", "SQ8", "PQ16"])
def test_cells_on_a_gpu(blobs, name):
    x, queries = blobs(20000, 64), blobs(300, 64, seed=1)
    index = made(f"GMM64cells16,{name}", 64)
    index.train(x)
    index.add(x)
    index.nprobe = 4
    found, want = index.to_gpu().search(queries, 10)[1], index.search(queries, 10)[1]
    assert np.mean([len(set(a) & set(b)) for a, b in zip(found, want, strict=True)]) > 9.5
