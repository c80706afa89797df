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
