"""Block sizes of the Triton kernels: the filter, the grid and the files of winners; no GPU."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gmm_ivf.kernels import em, launch, tuning
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.operands import MODES
from gmm_ivf.kernels.tuning import Config, Problem

KINDS = ("spherical", "diag", "tied")
PROBLEM = Problem("row", "spherical", "fp16", 1024, 128)


def test_shared_bytes_by_hand() -> None:
    # 256 rows of 128 float16 stay, 64 components are streamed three deep.
    assert tuning.shared_bytes(PROBLEM, Config(256, 64, 8, 3)) == 2 * 128 * (256 + 3 * 64)
    x3 = Problem("row", "spherical", "fp16x3", 1024, 128)
    assert tuning.shared_bytes(x3, Config(256, 64, 8, 3)) == 2 * 2 * 128 * (256 + 3 * 64)


@pytest.mark.parametrize("job", tuning.JOBS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_d", [16, 128, 256, 1024, 4096])
def test_candidates_fit_and_are_few(job: str, kind: str, mode: str, block_d: int) -> None:
    problem = Problem(job, kind, mode, 1024, block_d)
    for limit in (tuning.SAFE_SHARED_BYTES, 227 * 1024):
        found = tuning.candidates(problem, limit)
        assert 1 <= len(found) <= 24
        assert len(set(found)) == len(found)
        first = tuning.default(problem, limit)
        assert first == next(config for config in found if not config.registers)
    for config in found:
        assert 256 % config.block_n == 0 and 128 % config.block_k == 0


def test_a_bound_on_registers_is_passed_on() -> None:
    prepared = em.prepare(Components.equal("spherical", torch.zeros(2, 3).double(), 1.0), "fp16")
    assert launch.specialise(prepared, Config(64, 64, 4, 3, registers=168))["maxnreg"] == 168
    # GPUs of other makers do not know the option.
    assert "maxnreg" not in launch.specialise(prepared, Config(64, 64, 4, 3))


@pytest.mark.parametrize("places", [132, 264, 396, 792, 8])
def test_slabs_fill_whole_waves(places: int) -> None:
    for k_blocks in (1, 2, 3, 16, 64, 100, 256, 1024, 16384):
        count = tuning.slab_count(k_blocks, places)
        programs = count * k_blocks
        assert count == 1 or programs <= 4 * places
        waves = -(-programs // places)
        assert programs >= 0.85 * waves * places


def test_slabs_by_hand() -> None:
    # 24 x 16 programs in 396 places; 256 programs would leave a third of them empty.
    assert tuning.slab_count(16, 396) == 24
    assert tuning.slab_count(256, 396) == 3
    # Not to be longer than an eighth of the samples: then five waves and a half.
    assert 8 <= tuning.slab_count(256, 396, fewest=8) <= 15
    assert tuning.slab_count(16384, 396, fewest=3) in (3, 4, 5)


def test_an_unknown_gpu_gets_the_default() -> None:
    assert tuning.winners("No Such GPU") == {}
    assert tuning.choose(PROBLEM, "No Such GPU") == tuning.default(PROBLEM)


def test_winners_survive_the_file_and_the_nearest_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tuned").mkdir()
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "tuning.py"))
    few, many = Config(64, 64, 4, 3), Config(128, 64, 4, 2)
    measured = {
        Problem("row", "spherical", "fp16", k, 128): (config, 1.0)
        for k, config in ((256, few), (16384, many))
    }
    path = tmp_path / "tuned" / tuning.file_name("Test  GPU 1")
    tuning.save_winners(path, measured, {"gpu": "Test GPU 1"})
    tuning.winners.cache_clear()
    tuning.choose.cache_clear()
    assert path.name == "test-gpu-1.json"
    for k, want in ((16, few), (300, few), (1 << 20, many)):
        problem = Problem("row", "spherical", "fp16", k, 128)
        assert tuning.choose(problem, "Test GPU 1", 227 * 1024) == want
    # Another mode has no winner; a GPU with less shared memory cannot take this one.
    assert tuning.choose(Problem("row", "tied", "fp16", 256, 128), "Test GPU 1") != few
    assert tuning.choose(PROBLEM, "Test GPU 1", 1024) == Config(16, 16, 4, 1)
    tuning.winners.cache_clear()
    tuning.choose.cache_clear()


def test_a_broken_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tuned").mkdir()
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "tuning.py"))
    (tmp_path / "tuned" / "bad.json").write_text('{"winners": [{"problem": {}}]}')
    tuning.winners.cache_clear()
    tuning.choose.cache_clear()
    with pytest.raises(ValueError, match=r"bad\.json is not a file of tuning winners"):
        tuning.winners("bad")


def test_the_files_that_ship_are_readable() -> None:
    tuning.winners.cache_clear()
    tuning.choose.cache_clear()
    for path in (Path(tuning.__file__).parent / "tuned").glob("*.json"):
        about = json.loads(path.read_text())
        assert tuning.file_name(about["gpu"]) == path.name
        for problem, config in tuning.winners(about["gpu"]).items():
            assert problem.job in tuning.JOBS and tuning.fits(problem, config, 227 * 1024)
