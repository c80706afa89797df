"""Rows survive the disk, interrupted writes included."""

import json

import numpy as np
import pytest

from gmm_ivf.eval.results import OperatingPoint, Store, commits, fingerprint, read_points


def test_json_round_trip_is_exact(point):
    original = point(1 / 3, 1234.5678901234567, method="gmm-soft:tau=1/K", nprobe=7)
    line = original.to_json()
    assert "\n" not in line
    assert OperatingPoint.from_json(line) == original


def test_row_names_total_and_parts_of_the_cost(point):
    row = json.loads(point(0.9, 500, nlist=40, ranking=2.5).to_json())
    assert (row["scanned"], row["coarse"], row["ranking"]) == (460.0, 40.0, 2.5)
    assert row["distance_computations"] == 502.5


@pytest.mark.parametrize("line", ["[]", '{"schema": 0}', "not json", '{"schema": 1}'])
def test_foreign_lines_are_refused(line):
    with pytest.raises(ValueError, match=r"."):
        OperatingPoint.from_json(line)


def test_store_gives_back_what_was_appended(tmp_path, point):
    path = tmp_path / "new" / "results.jsonl"
    store = Store(path)
    first, second = point(0.5, 100), point(0.6, 200, nprobe=2)
    store.append(first)
    store.append(second)
    again = Store(path)
    assert again.points() == [first, second]
    assert again.get(second.key) == second
    assert again.get(point(0.5, 100, seed=9).key) is None


def test_a_torn_last_line_is_dropped_and_the_file_stays_usable(tmp_path, point):
    path = tmp_path / "results.jsonl"
    Store(path).append(point(0.5, 100))
    with path.open("a") as file:
        file.write(point(0.6, 200, nprobe=2).to_json()[:50])
    assert len(read_points(path)) == 1
    store = Store(path)
    store.append(point(0.7, 300, nprobe=3))
    assert [p.recall for p in Store(path).points()] == [0.5, 0.7]


def test_a_broken_line_inside_names_file_and_line(tmp_path, point):
    path = tmp_path / "results.jsonl"
    path.write_text(point(0.5, 100).to_json() + "\nrubbish\n" + point(0.6, 200).to_json() + "\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2: .*choose another --out"):
        Store(path)


def test_fingerprint_sees_content_shape_and_metric():
    rng = np.random.default_rng(0)
    base, query = rng.normal(size=(50, 4)), rng.normal(size=(5, 4))
    changed = base.copy()
    changed[7, 2] += 1
    prints = [
        fingerprint(base, query, "l2"),
        fingerprint(base, query, "ip"),
        fingerprint(changed, query, "l2"),
        fingerprint(base[:-1], query, "l2"),
        fingerprint(base, query[:-1], "l2"),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(base.copy(), query, "l2") == prints[0]


def test_commits_are_collected(point):
    other = point(0.5, 100, environment={"commit": None})
    assert commits([point(0.5, 100), other]) == ["abc", "unknown"]
