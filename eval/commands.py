"""What the command lines of eval share: errors of one sentence, names, whole numbers."""

import argparse
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def program(spec: ModuleSpec | None, script: str) -> str:
    """How the user started a command, so that messages can be pasted back.

    Parameters
    ----------
    spec : ModuleSpec or None
        ``__spec__`` of the module that ran.
    script : str
        Name of its console script, or of the module where it has none.
    """
    started = Path(sys.argv[0]).stem
    return script if started == script or spec is None else f"python -m {spec.name}"


def positive(text: str) -> int:
    """A whole number of at least 1, as an argument type."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of at least 0, as an argument type."""
    return _whole(text, 0)


def _whole(text: str, low: int) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"wanted a whole number of at least {low}, got {text!r}")
    return int(text)
