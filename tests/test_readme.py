"""The README's example runs, and its commands exist."""

import re
import shlex
import warnings
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_runs():
    (code,) = blocks("python")
    assert len(code.strip().splitlines()) <= 12
    names: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(code, names)
    assert names["soft"].ntotal == len(names["x"])
    np.testing.assert_array_equal(names["ids"][:, 0], np.arange(5))
    assert names["soft"].stats()["entries_per_vector"] == 1


def test_the_commands_exist():
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert [c[1] for c in commands] == ["scripts/recall.sh", "scripts/test.sh", "scripts/recall.sh"]
    assert all((ROOT / c[1]).is_file() for c in commands)


def test_the_pictures_and_files_exist():
    links = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert links
    assert all((ROOT / link).is_file() for link in links)
