"""Progress on a terminal: a bar or a ticking clock on stderr, silent when nobody watches."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

_PATIENCE_SECONDS = 2.0


def bar(total: int, description: str) -> tqdm:
    """A bar that appears after two seconds and only on a terminal; it leaves no trace."""
    # tqdm reads disable=None as "only when stderr is a terminal".
    return tqdm(
        total=total, desc=description, delay=_PATIENCE_SECONDS, leave=False, disable=None, unit="pt"
    )


@contextmanager
def clock(description: str) -> Iterator[None]:
    """Show that a step of unknown length is alive, once it has taken two seconds."""
    stop = threading.Event()

    def tick() -> None:
        if stop.wait(_PATIENCE_SECONDS):
            return
        # position=0: a bar around this step waits, and both may use the same line.
        style = {"bar_format": "{desc} {elapsed}", "leave": False, "disable": None, "position": 0}
        with tqdm(desc=description, **style) as ticker:
            if ticker.disable:
                return
            ticker.start_t -= _PATIENCE_SECONDS
            while not stop.wait(0.5):
                ticker.refresh()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def say(text: str) -> None:
    """One line on stderr that does not tear a bar."""
    tqdm.write(text, file=sys.stderr)
