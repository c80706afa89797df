"""The page "When soft assignment pays", from lines alone."""

import gzip
import re
from pathlib import Path

import pytest

from gmm_ivf.eval import pays
from gmm_ivf.eval.pays_page import figure_name, page
from gmm_ivf.eval.results import Store, read_points

ROOT = Path(__file__).resolve().parents[2]
RECALLS = (0.7, 0.78, 0.84, 0.88, 0.92, 0.96)


def curve(point, scale, **changes):
    return [
        point(r, scale * 2**i, nprobe=i + 1, queries_per_second=9000 / 2**i, **changes)
        for i, r in enumerate(RECALLS)
    ]


@pytest.fixture
def lines(tmp_path, point):
    """A results file with k-means, rules, cells and another K."""
    store = Store(tmp_path / "mine.jsonl")
    methods = {
        "kmeans": (100, {}),
        "gmm": (98, {}),
        "gmm-soft": (96, {"entries_per_vector": 1.5}),
        "gmm-soft:rule=soar": (87, {"entries_per_vector": 1.9}),
        "kmeans-soft:rule=soar": (90, {"entries_per_vector": 1.8}),
        "gmm-cells": (40, {}),
        "kmeans:codec=RaBitQ,refine=True": (25, {}),
    }
    for method, (scale, changes) in methods.items():
        for found in curve(point, scale, method=method, **changes):
            store.append(found)
    for found in curve(point, 50, method="kmeans:coarse=hnsw32", nlist=40):
        store.append(found)
    return store.path


def test_numbers_of_the_page_are_those_of_the_lines(lines, tmp_path, capsys):
    assert pays.main([str(lines), "--out", str(tmp_path / "docs")]) == 0
    text = (tmp_path / "docs" / "when-soft-assignment-pays.md").read_text()
    flat = " ".join(text.split())
    assert "Copies pay at the same K: 1.15x / 1.15x (`gmm-soft:rule=soar`, 1.90 entries" in flat
    assert "Cells pay at the same K: 2.50x / 2.50x (`gmm-cells`, 1.00 entries" in flat
    assert "FAISS's codes, ranked again: 4.00x / 4.00x (`kmeans:codec=RaBitQ," in flat
    assert "another K instead: 2.00x / 2.00x (`kmeans:coarse=hnsw32`, K = 40" in flat
    assert "FAISS's best over all K: 1.25x at 0.90, 1.25x at 0.95." in flat
    assert "soar 1.15x / 1.15x on the mixture's, 1.11x / 1.11x on those of k-means" in flat
    assert "every vector once: 1.02x / 1.02x (`gmm`" in flat
    assert str(lines) in text
    (figure,) = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert (tmp_path / "docs" / figure).stat().st_size > 10_000
    rows = [line for line in text.splitlines() if line.startswith("| `gmm-cells`")]
    assert rows
    assert {line.count("|") for line in rows} == {12}
    assert "page: " in capsys.readouterr().out


def test_times_of_a_busy_machine_are_left_out(lines, tmp_path, point):
    store = Store(lines)
    busy = {"commit": "abc", "busy": True}
    store.append(point(0.99, 99_999, nprobe=9, queries_per_second=1.0, environment=busy))
    assert pays.main([str(lines), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "when-soft-assignment-pays.md").read_text()
    assert "QPS at" not in text
    assert "Times and QPS are no measurements" in text


def test_packed_lines_give_the_same_page(lines, tmp_path):
    packed = tmp_path / "mine.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    pages = []
    for path in (lines, packed):
        assert pays.main([str(path), "--out", str(tmp_path)]) == 0
        text = (tmp_path / "when-soft-assignment-pays.md").read_text()
        pages.append(text.replace(str(path), "FILE"))
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("content", "words"), [("", "no complete line"), ("two", "several data sets")], ids=str
)
def test_files_that_are_no_single_data_set_are_refused(content, words, tmp_path, point, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text("")
    if content:
        store = Store(path)
        store.append(point(0.5, 100))
        store.append(point(0.5, 100, fingerprint="0" * 16))
    with pytest.raises(SystemExit):
        pays.main([str(path), "--out", str(tmp_path)])
    assert words in capsys.readouterr().err


def test_the_page_in_docs_is_that_of_the_lines_kept():
    text = (ROOT / "docs" / f"{pays.PAGE}.md").read_text()
    command = re.findall(r"```sh\n(python -m eval\.pays .*)\n```", text)[0]
    files = [ROOT / word for word in command.split() if word.endswith((".jsonl", ".gz"))]
    sets = sorted(map(read_points, files), key=lambda points: points[0].n)
    assert page(pays.PAGE, sets, command) == text
    for points in sets:
        assert (ROOT / "docs" / figure_name(pays.PAGE, points)).is_file()
