"""What a wheel holds, and what importing loads."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"gmm_ivf": "", "kernels": "kernels/", "datasets": "datasets/", "eval": "eval/"}


def run(*arguments: str, cwd: Path = ROOT) -> str:
    """Standard output of a command; its standard error is in the failure."""
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(code: str, cwd: Path = ROOT) -> str:
    return run(sys.executable, "-c", code, cwd=cwd).strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a clean copy of the tracked files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    return next(out.glob("*.whl"))


def test_the_version_is_that_of_the_package(wheel):
    import gmm_ivf

    assert wheel.name.startswith(f"gmm_ivf-{gmm_ivf.__version__}-")


def test_wheel_holds_gmm_ivf_alone_and_all_of_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {n.split("/")[0] for n in names if ".dist-info/" not in n}
    assert tops == {"gmm_ivf"}
    wanted = set()
    for folder, prefix in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted.add(f"gmm_ivf/{prefix}{path.relative_to(ROOT / folder)}")
    assert {n for n in names if n.startswith("gmm_ivf/")} == wanted


def test_installed_wheel_works_elsewhere(wheel, tmp_path):
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--target", str(site), str(wheel))
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import gmm_ivf, gmm_ivf.eval.recall, gmm_ivf.kernels.dispatch\n"
        "from gmm_ivf.datasets.registry import load\n"
        "assert gmm_ivf.__file__.startswith(sys.path[0]), gmm_ivf.__file__\n"
        "print(load('sift-mini').d)"
    )
    assert python(code, cwd=tmp_path) == "128"


def test_checkout_never_shadows_other_packages():
    """Without __init__.py an installed `datasets` or `kernels` wins over the checkout's folder."""
    assert not (ROOT / "datasets" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "eval" / "__init__.py").exists()


def test_datasets_load_neither_torch_nor_faiss():
    code = (
        "import sys, gmm_ivf, gmm_ivf.datasets.registry\n"
        "print(sorted({'torch', 'faiss'} & set(sys.modules)))"
    )
    assert python(code) == "[]"


def test_missing_faiss_is_one_clear_sentence():
    code = (
        "import sys; sys.modules['faiss'] = None\n"
        "import gmm_ivf; gmm_ivf.GaussianMixture\n"
        "try:\n    gmm_ivf.GMMQuantizer\n"
        "except ImportError as error:\n    print(error)"
    )
    message = python(code)
    assert "gmm-ivf[cpu]" in message
    assert "\n" not in message


def test_unknown_name_and_dir():
    code = "import gmm_ivf; print('IndexIVFGMM' in dir(gmm_ivf), hasattr(gmm_ivf, 'nothing'))"
    assert python(code) == "True False"


def test_files_are_relative_to_the_caller(tmp_path):
    """scripts/recall.sh was called from a folder of the user's own, and looked in the checkout."""
    assert "-m gmm_ivf.eval.recall" in (ROOT / "scripts" / "recall.sh").read_text()
    rng = np.random.default_rng(0)
    np.save(tmp_path / "mine.npy", rng.normal(size=(400, 4)).astype(np.float32))
    options = ["--dataset", "mine.npy", "--quick", "--nlist", "4", "--method", "kmeans"]
    done = subprocess.run(
        [sys.executable, "-m", "gmm_ivf.eval.recall", *options],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "recall-mine-quick" / "table.txt").is_file()
