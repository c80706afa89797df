"""Ctrl-C in the middle of a change: it waits until the change is whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold SIGINT back within a ``with`` block, and deliver it after that.

    Python handles signals in the main thread alone, so in other threads this does nothing. Blocks
    may be nested. Keep them short: the user waits.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
