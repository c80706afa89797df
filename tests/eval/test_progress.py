"""Progress shows on a terminal only, and only when a step takes long."""

import io
import sys
import time

import pytest

from gmm_ivf.eval import progress


class Screen(io.StringIO):
    """A stderr that says whether it is a terminal."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "patience", "shown"),
    [(True, 0.0, True), (False, 0.0, False), (True, 60.0, False)],
    ids=["terminal", "file", "short step"],
)
def test_clock(monkeypatch, is_terminal, patience, shown):
    monkeypatch.setattr(sys, "stderr", screen := Screen(is_terminal))
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", patience)
    with progress.clock("drawing"):
        time.sleep(0.05)
    assert ("drawing" in screen.getvalue()) == shown


def test_bar_waits_for_its_patience(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    with progress.bar(3, "probing") as bar:
        bar.update()
    assert screen.getvalue() == ""
