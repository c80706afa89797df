"""What layouts share that keep their entries in a store."""

from typing import Any

import numpy as np

from gmm_ivf._layout import Layout
from gmm_ivf._store import CopyStore


class StoredLayout(Layout):
    """A layout whose ids and counts are those of its store."""

    _store: CopyStore

    @property
    def ntotal(self) -> int:
        """See `Layout`."""
        return len(self._store)

    @property
    def entries(self) -> int:
        """See `Layout`."""
        return self._store.entries

    @property
    def next_id(self) -> int:
        """See `Layout`."""
        return self._store.next_id

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """See `Layout`."""
        return self._store.contains(ids)

    def new_ids(self, ids: Any, n: int) -> np.ndarray:
        """See `Layout`."""
        return self._store.new_ids(ids, n)
