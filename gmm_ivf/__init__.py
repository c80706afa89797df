"""Gaussian-mixture coarse quantizer for FAISS inverted-file indexes.

Public names are imported on first use, so that ``gmm_ivf.datasets`` and the command lines load
neither torch nor faiss before they need them.
"""

from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

# In a checkout `kernels/`, `datasets/` and `eval/` lie beside this folder and are the same packages
# that a wheel installs as gmm_ivf.kernels and so on. Beside an installed package there is no
# pyproject.toml, and nothing changes.
_root = Path(__file__).resolve().parents[1]
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))

_HOME = {
    "CellOptions": "gmm_ivf.cells",
    "GMMQuantizer": "gmm_ivf.quantizer",
    "GaussianMixture": "gmm_ivf.estimator",
    "IndexIVFGMM": "gmm_ivf.index",
    "diagnose": "gmm_ivf.diagnosis",
    "index_factory": "gmm_ivf.factory",
    "read_index": "gmm_ivf.io",
    "write_index": "gmm_ivf.io",
}

__all__ = [
    "CellOptions",
    "GMMQuantizer",
    "GaussianMixture",
    "IndexIVFGMM",
    "diagnose",
    "index_factory",
    "read_index",
    "write_index",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'gmm_ivf' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
