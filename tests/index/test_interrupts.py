"""Ctrl-C at any moment: what is in the index is whole, and known."""

import os
import signal
import threading

import pytest

from gmm_ivf._interrupts import uninterrupted

INTERRUPTED = """
import faiss
import numpy as np
from gmm_ivf import GMMQuantizer, IndexIVFGMM
import os, signal, time
from gmm_ivf import _vectors
_vectors._BLOCK_ROWS = 100

signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
rng = np.random.default_rng()
x = rng.normal(size=(1000, 8)).astype("f4")
q = GMMQuantizer(8, 6, random_state=0)
q.train(x)
outcomes = {}
for trial in range(60):
    refine = "flat" if trial % 2 else None
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 8, 6), q, rule="top2", refine=refine)
    index.train(x)
    index.add(x[:300])
    name, call, least = [
        ("add", lambda: index.add(x[300:]), 300),
        ("remove", lambda: index.remove_ids(np.arange(0, 300, 2)), 150),
        ("update", lambda: index.update_vectors(np.arange(300), x[300:600]), 300),
    ][trial % 3]
    started = time.perf_counter()
    if trial < 3:  # how long it takes undisturbed
        call()
        outcomes[name] = time.perf_counter() - started
        continue
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, outcomes[name] * rng.random()))
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        outcomes[name, "stopped"] = outcomes.get((name, "stopped"), 0) + 1
    lists = index.index.invlists
    held = [faiss.rev_swig_ptr(lists.get_ids(i), lists.list_size(i)).copy() for i in range(6)]
    ids, copies = np.unique(np.concatenate(held), return_counts=True)
    assert (copies == 2).all() and index.ntotal == len(ids) >= least, (name, index)
    assert index.index.ntotal == 2 * len(ids) and index.stats()["entries"] == 2 * len(ids)
    assert index.ntotal in (300, 1000) or name != "add"
    index.nprobe = 6
    assert (np.sort(index.search(x[:5], len(ids))[1]) == ids).all()
    assert refine is None or len(index._originals) == len(ids)
    if name == "add" and index.ntotal == 300:
        assert (index.reconstruct_n() == x[:300]).all()
    if name == "update":
        new, old = index.reconstruct_batch(ids), np.array([x[i] for i in ids])
        assert ((new == old) | (new == x[ids + 300])).all()
    index.add(x[:1])
    assert index.ntotal == len(ids) + 1
print(sum(count for key, count in outcomes.items() if "stopped" in key) > 0)
"""


def test_interruptions_at_any_moment(in_subprocess):
    assert in_subprocess(INTERRUPTED) == "True\n"


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end():
    seen = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            interrupt()
            seen.append("went on")
            with uninterrupted():
                interrupt()
                seen.append("inside")
            seen.append("still")
        seen.append("never")
    assert seen == ["went on", "inside", "still"]
    assert signal.getsignal(signal.SIGINT) is before


def test_without_an_interrupt_nothing_shows():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="mine"), uninterrupted():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_and_handlers():
    done = []

    def run():
        with uninterrupted():
            done.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
