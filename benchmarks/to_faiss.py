"""How often `to_faiss` takes another list than that of the nearest mean, by codec.

``python benchmarks/to_faiss.py`` prints the table of docs/files-and-gpu.md; a minute on two cores.
"""

import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gmm_ivf import index_factory  # noqa: E402 - after the path
from gmm_ivf.datasets import registry  # noqa: E402

CODECS = ("Flat", "SQ8", "SQ4", "PQ32", "PQ16", "PQ16x4", "RaBitQ")


def list_of_each(index: Any, n: int) -> np.ndarray:
    """List that holds each of the ids 0 to n - 1, (n,) int64."""
    found, lists = np.full(n, -1), index.invlists
    for number in range(index.nlist):
        if size := lists.list_size(number):
            found[faiss.rev_swig_ptr(lists.get_ids(number), size)] = number
    return found


def main() -> None:
    """Print the share for each codec."""
    x = np.asarray(registry.load("sift-mini").base[:20_000], np.float32)
    for codec in CODECS:
        index = index_factory(128, f"GMM128x2,{codec}", random_state=0, replication=1.5)
        index.train(x)
        index.add(x)
        plain = index.to_faiss()
        other = list_of_each(plain, len(x)) != index.quantizer.search(x, 1)[1][:, 0]
        print(f"{codec:8s} {100 * other.mean():6.2f} %")


if __name__ == "__main__":
    main()
