"""The import rule: data flows one way, and every import is absolute from gmm_ivf."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Modules of gmm_ivf from the first in the chain to the last: each imports only earlier ones.
CHAIN = (
    "params",
    "_sections",
    "memory",
    "rows",
    "lloyd",
    "engine",
    "truncation",
    "triton_engine",
    "truncated_engine",
    "backends",
    "seeding",
    "initial",
    "tiled",
    "inference",
    "persistence",
    "estimator",
    "_given_mixture",
    "comparison",
    "_terms",
    "diagnosis",
    "_faiss",
    "_vectors",
    "_ids",
    "_results",
    "_interrupts",
    "_layout",
    "_list_data",
    "_description",
    "_graph",
    "_coarse",
    "_reseed",
    "_attaching",
    "_training",
    "quantizer",
    "_quantizer_parts",
    "_arrays",
    "rules",
    "_rule_pairs",
    "assignment",
    "_near_posteriors",
    "_assigner",
    "_checks",
    "_probing",
    "_scan",
    "_decoding",
    "_store",
    "_stored",
    "_packed",
    "_adaptive",
    "lists",
    "_links",
    "_cell_options",
    "_cell_assign",
    "_cell_ranking",
    "_cell_anchors",
    "_cell_table",
    "_cell_store",
    "_cell_scan",
    "_cell_search",
    "_cell_training",
    "_cell_copy",
    "_cell_scanning",
    "_cell_state",
    "cells",
    "_making",
    "_chain",
    "_originals",
    "_adapter",
    "_searching",
    "_tuning",
    "_mutating",
    "_export",
    "_gpu_limits",
    "_gpu_layouts",
    "gpu",
    "_converting",
    "_unsupported",
    "index",
    "io",
    "factory",
)
FOLDERS = ("gmm_ivf", "kernels", "datasets", "eval")


def imports(path: Path) -> list[str]:
    """Dotted names that a file imports, as `module` or `module.name`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def violations(folder: str, module: str, names: list[str]) -> list[str]:
    """Imports that the rule forbids to a module of a folder."""
    bad = [n for n in names if n.split(".")[0] in ("kernels", "datasets", "eval")]
    own = [n for n in names if n.startswith("gmm_ivf")]
    if folder in ("kernels", "datasets"):
        bad += [n for n in own if not n.startswith(f"gmm_ivf.{folder}")]
    elif folder == "gmm_ivf" and module != "__init__":
        place = CHAIN.index(module)
        for name in own:
            part = name.split(".")[1]
            if part != "kernels" and part not in CHAIN[:place]:
                bad.append(name)
    return bad


def source_files() -> list[Path]:
    return [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_chain(path):
    folder = path.relative_to(ROOT).parts[0]
    assert violations(folder, path.stem, imports(path)) == []


@pytest.mark.parametrize(
    ("folder", "module", "name"),
    [
        ("kernels", "dispatch", "gmm_ivf.params.Frame"),
        ("datasets", "registry", "gmm_ivf.kernels.dispatch"),
        ("gmm_ivf", "params", "gmm_ivf.estimator.GaussianMixture"),
        ("gmm_ivf", "index", "gmm_ivf.eval.metrics"),
        ("gmm_ivf", "quantizer", "gmm_ivf.datasets.registry"),
        ("eval", "recall", "datasets.registry"),
    ],
)
def test_a_planted_violation_is_caught(folder, module, name):
    assert violations(folder, module, [name]) == [name]


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_fit_in_the_head(path):
    assert len(path.read_text().splitlines()) < 400
