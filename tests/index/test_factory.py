"""`index_factory` and `IndexIVFGMM.description`."""

import faiss
import numpy as np
import pytest

from gmm_ivf import IndexIVFGMM, index_factory, read_index, write_index
from gmm_ivf.cells import CellOptions
from gmm_ivf.rules import Air

OPTIONS = {"random_state": 0, "tol": 1e-2}
#: Descriptions, and the FAISS index that is wrapped.
KINDS = {
    "GMM16,Flat": "IndexIVFFlat",
    "GMM16x2,Flat": "IndexIVFFlat",
    "GMM8x4,SQ8": "IndexIVFScalarQuantizer",
    "GMM8,SQ6": "IndexIVFScalarQuantizer",
    "GMM8,SQ4": "IndexIVFScalarQuantizer",
    "GMM8,SQfp16": "IndexIVFScalarQuantizer",
    "GMM8,SQbf16": "IndexIVFScalarQuantizer",
    "GMM8x2,PQ4x5": "IndexIVFPQ",
    "GMM8x2,PQ4x4fs": "IndexIVFPQ",
    "GMM8x2,PQ4x4fsr": "IndexIVFPQ",
    "GMM8,RaBitQ": "IndexIVFRaBitQ",
    "GMM8,RaBitQ4": "IndexIVFRaBitQ",
    "GMM8x2,RaBitQfs": "IndexIVFRaBitQ",
    "GMM8x2,PQ4x4,RFlat": "IndexIVFPQ",
    "OPQ4,GMM8,PQ4x4": "IndexIVFPQ",
    "OPQ2_4,GMM8,PQ2x4": "IndexIVFPQ",
    "PCA4,GMM8x2,Flat": "IndexIVFFlat",
    "PCAR4,GMM8,Flat": "IndexIVFFlat",
    "PCAW4,GMM8,Flat": "IndexIVFFlat",
    "PCAWR4,GMM8,Flat": "IndexIVFFlat",
    "RR8,GMM8,Flat": "IndexIVFFlat",
    "L2norm,GMM8,SQ8,RFlat": "IndexIVFScalarQuantizer",
    "PCA4,L2norm,GMM8x2,SQ8": "IndexIVFScalarQuantizer",
    "GMM20x2_HNSW16,SQ8": "IndexIVFScalarQuantizer",
    "GMM20cells,Flat": "IndexIVFFlat",
    "PCA6,GMM20cells8_HNSW4,SQ8,RFlat": "IndexIVFScalarQuantizer",
}


@pytest.mark.parametrize("text", KINDS)
def test_descriptions_round_trip(text):
    index = index_factory(8, text, **OPTIONS)
    assert type(index) is IndexIVFGMM
    assert type(index._ivf).__name__ == KINDS[text]
    assert index.description == text
    again = index_factory(8, index.description)
    assert (again.d, again.nlist, again.max_lists) == (8, index.nlist, index.max_lists)
    assert not index.is_trained


@pytest.mark.parametrize(
    "text", [text for text in KINDS if not text.startswith("OPQ")] + ["OPQ2_4,GMM8,PQ2x6"]
)
def test_what_is_made_works(blobs, tmp_path, text):
    x = blobs(900, 8)
    index = index_factory(8, text, **OPTIONS)
    if type(index.index) is faiss.IndexIVFPQ:
        index.index.pq.cp.niter = 2  # enough to work
    index.train(x)
    index.add(x)
    index.nprobe = index.nlist
    found = index.search(x[:100], 10)[1]
    assert all(len(set(row)) == 10 for row in found)
    # The coarsest of these codecs are for a tenth of the bytes.
    assert (found == np.arange(100)[:, None]).any(axis=1).mean() > 0.3
    assert index.description == text
    write_index(index, tmp_path / "f")
    read = read_index(tmp_path / "f")
    assert read.description == text
    np.testing.assert_array_equal(read.search(x[:100], 10)[1], found)


def test_hard_assignment_is_stock_faiss(blobs):
    x = blobs(600, 8)
    index = index_factory(8, "GMM10,SQ8", **OPTIONS)
    index.train(x)
    index.add(x)
    stock = faiss.IndexIVFScalarQuantizer(
        faiss.clone_index(index.quantizer), 8, 10, faiss.ScalarQuantizer.QT_8bit
    )
    stock.train(x)
    stock.add(x)
    stock.nprobe = index.nprobe = 3
    np.testing.assert_array_equal(index.search(x[:50], 5)[1], stock.search(x[:50], 5)[1])


def test_spellings_of_one_thing():
    assert index_factory(8, "GMM8x1,PQ4x8").description == "GMM8,PQ4"
    assert index_factory(8, "GMM2x4,Flat").description == "GMM2x2,Flat"  # no more lists than K


def test_metric_and_options(blobs):
    index = index_factory(
        8, "GMM6x3,Flat", faiss.METRIC_INNER_PRODUCT, rule=Air(0.7), covariance_type="diag"
    )
    assert index.metric_type == faiss.METRIC_INNER_PRODUCT
    assert index.quantizer._options["covariance_type"] == "diag"
    assert "rule=Air(lambda_=0.7" in repr(index)
    assert "adaptive" in repr(index_factory(8, "GMM6,Flat", adaptive=True))
    with pytest.raises(ValueError, match="adaptive=True belongs to layout"):
        index_factory(8, "GMM6cells,Flat", adaptive=True)
    index = index_factory(8, "GMM6x3,Flat", replication=2.5, **OPTIONS)
    index.train(blobs(500, 8))
    index.add(blobs(500, 8))
    assert index.stats()["entries_per_vector"] == pytest.approx(2.5, abs=0.02)


def test_options_of_cells(blobs):
    options = CellOptions(min_size=3, lists_ranked=5)
    index = index_factory(8, "GMM10cells6,Flat", cells=options)
    assert "links=6, min_size=3, lists_ranked=5" in repr(index)
    same = index_factory(8, "GMM10cells,Flat", cells=CellOptions(links=6))
    assert same.description == "GMM10cells6,Flat"
    with pytest.raises(ValueError, match=r"and cells.links=5 contradict"):
        index_factory(8, "GMM10cells6,Flat", cells=CellOptions(links=5))
    with pytest.raises(ValueError, match="needs GMM<K>cells in the description"):
        index_factory(8, "GMM10x2,Flat", cells=options)


def test_a_graph_is_said_once():
    for options in ({"coarse": "hnsw16"}, {}):
        index = index_factory(8, "GMM20_HNSW16,Flat", **options)
        assert index.quantizer.coarse == "hnsw16"
    with pytest.raises(ValueError, match="_HNSW16,Flat' and coarse='flat' contradict"):
        index_factory(8, "GMM20_HNSW16,Flat", coarse="flat")


def test_what_has_no_description(trained, blobs):
    q = trained(blobs(200, 8), 4)
    for stock in (
        faiss.IndexIVFLocalSearchQuantizer(q, 8, 4, 2, 4),
        faiss.IndexIVFPQ(q, 8, 4, 4, 4),
    ):
        stock.by_residual = False
        assert IndexIVFGMM(stock, q).description is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("IVF8,Flat", r"must hold one GMM<K>; it has 0. The form is \[prefix,\]GMM<K>"),
        ("GMM8,GMM8,Flat", "must hold one GMM<K>; it has 2"),
        ("GMM8", "'' is not a codec"),
        ("GMM8,Flet", r"'Flet' is not a codec \(Flat, SQ8"),
        ("GMM8,PQ4x4fs_64", "'PQ4x4fs_64' is not a codec"),
        ("GMM8,RaBitQfs4", "'RaBitQfs4' is not a codec"),
        ("GMM8,LSQ4x4", "'LSQ4x4' is not a codec"),
        ("GMM,Flat", r"'GMM' is not GMM<K>\[x<max_lists>"),
        ("GMM0,Flat", "'GMM0' is not GMM<K>"),
        ("GMM8x,Flat", "'GMM8x' is not"),
        ("GMM8x2cells4,Flat", "'GMM8x2cells4' is not"),
        ("GMM8_HNSW,Flat", "'GMM8_HNSW' is not"),
        ("OPX4,GMM8,Flat", r"'OPX4' is not a prefix \(OPQ<M>"),
        ("GMM8,Flat,Refine(SQ8)", r"'Refine\(SQ8\)' is not RFlat"),
        ("GMM8,Flat,RFlat,RFlat", "'RFlat,RFlat' is not RFlat"),
        ("GMM8cells,PQ4x4fs", "'PQ4x4fs' does not go with cells, .* take 'PQ4x4'"),
        ("GMM8,PQ5", r"FAISS does not make IVF8,PQ5 of 8 dimensions \(.*multiple"),
        ("GMM8,PQ8x0", "'PQ8x0' is not a codec"),  # FAISS makes it, and does not survive its use
        ("OPQ0,GMM8,Flat", "'OPQ0' is not a prefix"),
        ("OPQ3,GMM8,Flat", "'OPQ3' of 8 dimensions: M has to divide the 8 dimensions behind it"),
        ("PCA6,OPQ4,GMM8,Flat", "'OPQ4' of 6 dimensions: M has to divide"),
        ("OPQ2_7,GMM8,Flat", "'OPQ2_7' of 8 dimensions: M has to divide the 7"),
        ("PCAR9,GMM8,Flat", "'PCAR9' of 8 dimensions: there are no more dimensions"),
        ("", "must hold one GMM<K>"),
        (None, "must be a string"),
    ],
)
def test_errors_name_the_token(text, message):
    with pytest.raises(ValueError, match=message):
        index_factory(8, text)


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="d must be an integer of at least 1; got 0"):
        index_factory(0, "GMM8,Flat")
    with pytest.raises(ValueError, match="metric must be"):
        index_factory(8, "GMM8,Flat", faiss.METRIC_L1)
    with pytest.raises(TypeError, match="no option 'n_iter'"):
        index_factory(8, "GMM8,Flat", n_iter=3)
    with pytest.raises(ValueError, match="replication=3 exceeds max_lists=1"):
        index_factory(8, "GMM8,Flat", replication=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "soar"}, "rule='soar' chooses further lists .* 'GMM8(x1)?,Flat' gives it one"),
        ({"rule": Air(0.5)}, r"rule=Air\(lambda_=0.5.* write GMM8x2 in it"),
        ({"tau": 0.1}, "tau=0.1 chooses further lists .* or leave tau out"),
        ({"replication": 1.3}, "replication=1.3 exceeds max_lists=1"),
    ],
)
def test_one_list_a_vector_has_no_rule(options, message):
    for text in ("GMM8,Flat", "GMM8x1,Flat"):
        with pytest.raises(ValueError, match=message):
            index_factory(8, text, **options)
    index_factory(8, "GMM8x2,Flat", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_factor": 4}, "no option 'k_factor': set index.k_factor of the index made"),
        ({"nprobe": 4}, "no option 'nprobe': set index.nprobe"),
        ({"layout": "cells"}, "no option 'layout': write GMM<K>cells"),
        ({"max_lists": 2}, "no option 'max_lists': write GMM<K>x<max_lists>"),
        ({"refine": "flat"}, "no option 'refine': end the description in ,RFlat"),
        ({"fast_scan": True}, "no option 'fast_scan': take a codec of FastScan"),
        ({"links": 5}, "no option 'links': write GMM<K>cells<links>"),
        ({"nlist": 5}, "no option 'nlist': it is the K of GMM<K>"),
    ],
)
def test_options_of_the_index_are_said_otherwise(options, message):
    with pytest.raises(TypeError, match=f"index_factory has {message}"):
        index_factory(8, "GMM8,PQ4x4,RFlat", **options)
    index = index_factory(8, "GMM8,PQ4x4,RFlat")
    index.k_factor, index.nprobe = 4, 4  # as the messages say
