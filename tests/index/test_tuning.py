"""`tune` that cannot finish: it says why, and leaves the options as they were."""

import numpy as np
import pytest


@pytest.mark.parametrize("options", [{}, {"layout": "cells"}], ids=["lists", "cells"])
def test_a_query_that_is_not_finite_is_named(blobs, soft, options):
    x = blobs(500, 8)
    index = soft(x, 8, **options)
    index.add(x)
    queries = x[:20].copy()
    queries[7, 2] = np.nan
    with pytest.raises(ValueError, match="queries: row 7 holds NaN"):
        index.tune(queries)
    assert index.nprobe == 1


def test_an_interruption_leaves_the_options(blobs, soft, monkeypatch):
    x = blobs(500, 8)
    index = soft(x, 8, layout="cells")
    index.add(x)
    before, search, calls = index._layout.cell_options, index.search, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return search(*arguments)

    monkeypatch.setattr(index, "search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index.tune(x[:20])
    assert index._layout.cell_options == before
    assert (index.nprobe, index.index.max_codes) == (1, 0)


def test_queries_of_another_dimension_are_named(blobs, soft):
    x = blobs(500, 8)
    index = soft(x, 8)
    index.add(x)
    with pytest.raises(ValueError, match=r"queries must have shape \(n, 8\)"):
        index.tune(x[:20, :5])


def test_what_tune_bounds_does_not_hide_nprobe(blobs, soft):
    x = blobs(2000, 8)
    index = soft(x, 16, layout="cells")
    index.add(x)
    found = index.tune(x[:50], recall=0.5)
    assert index.max_codes == index.index.max_codes == found["max_codes"] < 2000
    assert f"max_codes={found['max_codes']}" in repr(index)
    index.nprobe = 16
    assert index.max_codes == 0
    assert "max_codes" not in repr(index)
    index.search(x[:5], 10)
    assert (index.last_search.scanned == 2000).all()
    index.max_codes = 100
    index.search(x[:5], 10)
    assert (index.last_search.scanned <= 100).all()
    index.reset()
    assert index.max_codes == 0
    with pytest.raises(ValueError, match="max_codes must be an integer of at least 0; got -1"):
        index.max_codes = -1
