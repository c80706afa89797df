"""What the command lines of eval share: how they run, errors of one sentence, numbers."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn, TypeVar

from gmm_ivf.eval.progress import say

INTERRUPTED = 130
T = TypeVar("T")


class UserError(ValueError):
    """What a command found only while it ran; its message is one sentence for the user."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    prepare: Callable[[argparse.Namespace], T],
    execute: Callable[[T], int],
    kept: Callable[[T | None], str],
) -> int:
    """Read the arguments, prepare, execute; after Ctrl-C say what was kept.

    Parameters
    ----------
    parser : ArgumentParser
    argv : sequence of str, optional
        By default those of the process.
    prepare : callable
        From the arguments. Its ValueError, OSError or ImportError is a sentence for the user and
        ends the process with status 2; so does a UserError of `execute`.
    execute : callable
        From what `prepare` returned, to the exit status.
    kept : callable
        What is left after Ctrl-C, in words, from what `prepare` returned, or None before that.

    Returns
    -------
    int
        Status of `execute`, or 130 after Ctrl-C.
    """
    args = parser.parse_args(argv)
    prepared = None
    try:
        try:
            prepared = prepare(args)
        except (ValueError, OSError, ImportError) as error:
            parser.error(str(error))
        return execute(prepared)
    except UserError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        say(f"interrupted: {kept(prepared)}")
        return INTERRUPTED


def let_idle_threads_sleep() -> None:
    """Keep threads that wait from spinning; it counts only before torch and FAISS are loaded.

    Each library has a pool of its own, and idle threads spin on the cores that the others need:
    with other work on two cores EM took four to six times longer. So a command says this before it
    imports either, unless the user has set OMP_WAIT_POLICY.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


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


def seconds(text: str) -> float:
    """A finite number above 0, as an argument type."""
    return _above(text, 0.0, float("inf"), "a number of seconds above 0")


def share(text: str) -> float:
    """A number above 0, at most 1, as an argument type."""
    return _above(text, 0.0, 1.0 + 1e-12, "a number above 0, at most 1")


def _above(text: str, low: float, end: float, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = low
    if not low < value < end:
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")
    return value


def _whole(text: str, low: int) -> int:
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"wanted a whole number of at least {low}, got {text!r}")
    return int(text)
