"""FastScan copies of an index with copies: same entries, each id once, nothing corrupted."""

import faiss
import numpy as np
import pytest

from gmm_ivf import IndexIVFGMM

METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)
CODECS = pytest.mark.parametrize("name", ["PQ", "RaBitQ", "RaBitQ4"])


@pytest.fixture
def fast(trained, codec):
    """``fast(x, nlist, name, metric, **options)``: trained and empty, with fast_scan=True."""

    def make(x, nlist, name, metric=faiss.METRIC_L2, **options):
        q = trained(x, nlist, metric)
        index = IndexIVFGMM(codec(name, q), q, fast_scan=True, **options)
        index.train(x)
        return index

    return make


@METRICS
@CODECS
def test_one_list_equals_the_converted_index(blobs, fast, name, metric):
    x, queries = blobs(1500, 16), blobs(40, 16, seed=1)
    index = fast(x, 6, name, metric, max_lists=1)
    index.add(x)
    plain = index.index
    stock = getattr(faiss, type(plain).__name__ + "FastScan")(plain)
    for nprobe in (1, 3, 6):
        stock.nprobe = index.nprobe = nprobe
        want, got = stock.search(queries, 10), index.search(queries, 10)
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_array_equal(got[0], want[0])


@METRICS
@CODECS
def test_copies_are_found_once_and_counted(blobs, soft, fast, name, metric):
    x, queries = blobs(1200, 16), blobs(50, 16, seed=1)
    options = {"max_lists": 3, "replication": 1.8}
    index, plain = fast(x, 6, name, metric, **options), soft(x, 6, name, metric, **options)
    for either in (index, plain):
        either.add(x)
        either.nprobe = 4
    got, want = index.search(queries, 20), plain.search(queries, 20)
    assert all(len(set(row)) == 20 for row in got[1])
    np.testing.assert_array_equal(index.last_search.scanned, plain.last_search.scanned)
    common = [len(set(a) & set(b)) / 20 for a, b in zip(got[1], want[1], strict=True)]
    assert np.mean(common) > 0.85  # its look-up tables have 8 bits
    assert index.stats()["bytes"] > plain.stats()["bytes"]


@CODECS
def test_the_copy_follows_changes(blobs, fast, name):
    x = blobs(1200, 16)
    index = fast(x, 6, name, replication=1.8, max_lists=3)
    index.nprobe = 6
    index.add(x[:600])
    assert index.search(x[:20], 600)[1].max() == 599
    index.add(x[600:])
    assert index.search(x[:20], 1200)[1].max() == 1199
    assert index.remove_ids(np.arange(0, 1200, 2)) == 600
    labels = index.search(x[:20], 700)[1]
    assert all(sorted(row[:600]) == list(range(1, 1200, 2)) for row in labels)
    assert (labels[:, 600:] == -1).all()
    index.reset()
    assert (index.search(x[:20], 3)[1] == -1).all()
    index.add(x[:5])
    assert index.search(x[:20], 9)[1].max() == 4


def test_selectors_and_bad_queries(blobs, fast, ivf_parameters):
    x = blobs(1200, 16)
    index = fast(x, 6, "PQ")
    index.add(x)
    only = ivf_parameters(nprobe=6, sel=faiss.IDSelectorRange(100, 110))
    labels = index.search(x[:20], 30, only)[1]
    assert all(sorted(row[row >= 0]) == list(range(100, 110)) for row in labels)
    queries = x[:3].copy()
    queries[1] = np.nan
    assert (index.search(queries, 2)[1] >= 0).all(axis=1).tolist() == [True, False, True]
    with pytest.raises(NotImplementedError, match="max_codes is not available with fast_scan"):
        index.search(x[:2], 3, ivf_parameters(nprobe=2, max_codes=9))


def test_range_search_goes_by_the_codes(blobs, soft, fast):
    x = blobs(1200, 16)
    index, plain = fast(x, 6, "PQ"), soft(x, 6, "PQ")
    for either in (index, plain):
        either.add(x)
        either.nprobe = 3
    found = index.range_search(x[:9], 4.0), plain.range_search(x[:9], 4.0)
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Flat", "got IndexIVFFlat"),
        ("SQ8", "got IndexIVFScalarQuantizer"),
        ("PQ8", "got IndexIVFPQ of 8 bits"),
    ],
)
def test_what_faiss_does_not_convert(blobs, trained, codec, name, message):
    q = trained(blobs(300, 16), 3)
    with pytest.raises(ValueError, match=message):
        IndexIVFGMM(codec(name, q), q, fast_scan=True)
