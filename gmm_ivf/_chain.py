"""Transforms that a FAISS index applies before its lists: OPQ, PCA, L2 normalisation."""

from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss


class Chain:
    """The transforms of a faiss.IndexPreTransform.

    Parameters
    ----------
    index : faiss.IndexPreTransform
    """

    def __init__(self, index: Any):
        self._index = index

    def _steps(self) -> list:
        chain = self._index.chain
        return [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())]

    @property
    def is_trained(self) -> bool:
        """Whether every transform is."""
        return all(step.is_trained for step in self._steps())

    def equals(self, other: "Chain | None") -> bool:
        """Whether another chain transforms alike, bit for bit."""
        return other is not None and np.array_equal(self._bytes(), other._bytes())

    def _bytes(self) -> np.ndarray:
        """The transforms, serialised with an index that holds nothing."""
        steps = self._steps()
        bare = faiss.IndexPreTransform(faiss.IndexFlatL2(steps[-1].d_out))
        for step in reversed(steps):
            bare.prepend_transform(step)
        return faiss.serialize_index(bare)

    def untrained(self) -> list:
        """The transforms that are not trained yet."""
        return [step for step in self._steps() if not step.is_trained]

    def train(self, rows: np.ndarray) -> np.ndarray:
        """Train those transforms that are not yet, in order; return the rows transformed."""
        for step in self._steps():
            if not step.is_trained:
                step.train(rows)
            rows = step.apply(rows)
        return rows

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Transform rows: (n, d) float32 to (n, d of the lists) float32."""
        for step in self._steps():
            rows = step.apply(rows)
        return rows

    def reverse(self, rows: np.ndarray) -> np.ndarray:
        """Undo `apply` as far as can be: what a reduction or a normalisation lost stays lost.

        Raises
        ------
        NotImplementedError
            For a transform that FAISS cannot undo.
        """
        for step in reversed(self._steps()):
            if isinstance(step, faiss.LinearTransform) and not step.is_orthonormal:
                raise NotImplementedError(
                    f"FAISS cannot undo {type(step).__name__} that whitens, so vectors cannot be "
                    'reconstructed: keep them with refine="flat".'
                )
            rows = step.reverse_transform(rows)
        return rows
