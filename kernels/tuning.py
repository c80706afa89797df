"""Block sizes of the EM kernels: a shared-memory filter, a small grid, and measured winners.

Winners lie in ``tuned/<gpu>.json``. A GPU or a shape that is not there gets the first candidate
that fits: nothing is ever timed during a fit. The number of samples is no key.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

JOBS = ("row", "moment", "logit", "sum")
ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp16x3": 2, "tf32": 4, "fp32": 4}
# What a block may use on the smallest supported kind (compute capability 8.6 and 8.9).
SAFE_SHARED_BYTES = 99 * 1024
# Float32 accumulators of a thread that still leave registers for the rest.
MAX_ACCUMULATORS = 176
MAX_CANDIDATES = 24
_MOST_WAVES = 4
# Features of a tile of the chunked moment sums.
SUM_BLOCK_D = 128


@dataclass(frozen=True, order=True)
class Config:
    """Shape of one program: rows and components of a tile, warps, stages of the load pipeline.

    `waves` is for the moments: the programs that a multiprocessor holds at once, or a multiple of
    it where that is not known; 6 is one of 1, 2 and 3. `registers` bounds those of a thread, on
    NVIDIA GPUs alone; 0 leaves them to the compiler.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    waves: int = 6
    registers: int = 0


# Shapes that run best, or only, with all the registers that so many programs leave one another.
BOUNDED = {
    "row": (
        Config(256, 64, 4, 3, registers=255),
        Config(256, 64, 8, 3, registers=128),
        Config(128, 64, 8, 2, registers=128),
        Config(256, 64, 8, 3, registers=255),
    ),
    "moment": (
        Config(64, 64, 4, 3, waves=3, registers=168),
        Config(64, 64, 4, 3, waves=2, registers=255),
        Config(64, 64, 4, 2, waves=3, registers=168),
        Config(64, 64, 4, 2, waves=2, registers=255),
        Config(64, 128, 8, 4, waves=2, registers=128),
    ),
}
# What won most often on an H200 without; the default wherever it fits.
FIRST = {
    "row": Config(256, 64, 8, 2),
    "moment": Config(64, 64, 4, 3),
    "logit": Config(128, 128, 4, 3),
    "sum": Config(64, 128, 4, 3),
}
# More warps hold the squares of a tile as well: 1.7 times as fast.
FIRST_DIAG = {**FIRST, "logit": Config(256, 128, 8, 3)}
# Float32 products run on the ordinary units, which large tiles make spill, above all the two sums
# of diag: a tenth of the speed.
FIRST_FP32 = {**FIRST, "logit": Config(64, 64, 4, 2), "sum": Config(32, 64, 4, 2)}
FIRST_FP32_DIAG = {**FIRST_FP32, "sum": Config(16, 64, 8, 1)}


@dataclass(frozen=True)
class Problem:
    """What a configuration depends on; `block_d` is the padded number of features."""

    job: str
    covariance_type: str
    mode: str
    n_components: int
    block_d: int


def chunk_block_d(mode: str) -> int:
    """Features per step of the chunked logits: 128 bytes, half in float32, which fills registers.

    Ordinary units take the operands of a step into them.
    """
    return (64 if mode == "fp32" else 128) // ELEMENT_BYTES[mode]


def shared_bytes(problem: Problem, config: Config) -> int:
    """Upper estimate of the shared memory of a program, in bytes.

    Resident operand once, streamed operands once per stage, each with its low part in mode fp16x3;
    diag streams or derives the squares as well.
    """
    parts = 2 if problem.mode == "fp16x3" else 1
    if problem.job in ("logit", "sum"):
        return _chunked_bytes(problem, config, parts)
    row = ELEMENT_BYTES[problem.mode] * problem.block_d * parts
    diag = problem.covariance_type == "diag"
    stages = max(1, config.num_stages)
    if problem.job == "row":
        squares = 2 if diag else 1
        return row * squares * (config.block_n + config.block_k * stages)
    resident = row * config.block_k * (2 if diag else 1)
    derived = 2 * row // parts * config.block_n if diag else 0
    # Tensor cores want operands in tf32 laid out another way than they are loaded.
    turned = (2 if diag else 1) * row * config.block_n if problem.mode == "tf32" else 0
    vectors = 8 * config.block_n * stages
    return resident + row * config.block_n * stages + derived + turned + vectors


def _chunked_bytes(problem: Problem, config: Config, parts: int) -> int:
    """`shared_bytes` of the chunked kernels, whose operands are all streamed."""
    size = ELEMENT_BYTES[problem.mode]
    stages = max(1, config.num_stages)
    diag = problem.covariance_type == "diag"
    if problem.job == "sum":
        # Responsibilities come in float32 where both their parts are used.
        resp = 4 if parts == 2 else size
        step = config.block_n * (resp * config.block_k + size * parts * SUM_BLOCK_D)
        return step * stages + (2 * size * config.block_n * SUM_BLOCK_D if diag else 0)
    row = size * chunk_block_d(problem.mode) * parts
    step = row * (config.block_n + config.block_k * (2 if diag else 1))
    return step * stages + (row * config.block_n if diag else 0)


def accumulators(problem: Problem, config: Config) -> int:
    """Float32 accumulators of one thread."""
    tile = config.block_n * config.block_k
    if problem.job == "sum":
        tile = config.block_k * SUM_BLOCK_D * (2 if problem.covariance_type == "diag" else 1)
    if problem.job == "moment":
        sums = 2 if problem.covariance_type == "diag" else 1
        tile += sums * config.block_k * problem.block_d
    return tile // (32 * config.num_warps)


def fits(problem: Problem, config: Config, shared_limit: int) -> bool:
    """Whether a program of this shape can be expected to run without spilling."""
    within = accumulators(problem, config) <= MAX_ACCUMULATORS
    return within and shared_bytes(problem, config) <= shared_limit


def grid(problem: Problem) -> list[Config]:
    """All shapes considered, the most promising first."""
    diag, fp32 = problem.covariance_type == "diag", problem.mode == "fp32"
    by_diag = (FIRST_FP32, FIRST_FP32_DIAG) if fp32 else (FIRST, FIRST_DIAG)
    first = by_diag[diag][problem.job]
    shapes = {
        4: [
            (128, 64),
            (64, 64),
            (64, 128),
            (128, 128),
            (128, 32),
            (64, 32),
            (32, 64),
            (32, 32),
            (16, 16),
        ],
        8: [(256, 64), (128, 128), (64, 128), (128, 64), (256, 128)],
    }
    order = [(8, 3), (4, 3), (8, 2), (4, 2), (4, 1)]
    rest = [Config(n, k, warps, stages) for warps, stages in order for n, k in shapes[warps]]
    bounded = BOUNDED.get(problem.job, ())
    return [first, *bounded, *(config for config in rest if config != first)]


def candidates(problem: Problem, shared_limit: int = SAFE_SHARED_BYTES) -> list[Config]:
    """At most 24 configurations worth timing; never empty."""
    good = [c for c in grid(problem) if fits(problem, c, shared_limit)]
    if problem.job == "moment":
        # The matrix units of Hopper take 64 components at a time, or else none at all.
        good.sort(key=lambda config: config.block_k < 64)
    return good[:MAX_CANDIDATES] or [Config(16, 16, 4, 1)]


def default(problem: Problem, shared_limit: int = SAFE_SHARED_BYTES) -> Config:
    """The configuration for a GPU or a shape that was never measured."""
    found = candidates(problem, shared_limit)
    return next(config for config in found if not config.registers)


def slab_count(k_blocks: int, places: int, fewest: int = 1) -> int:
    """Into how many slabs to divide the samples of the moments.

    The fewest whose programs, one for each slab and block of components, fill 95 % of the last
    wave as well: partial sums take memory, and multiprocessors without work time.

    Parameters
    ----------
    k_blocks : int
        Blocks of components.
    places : int
        Programs of a wave.
    fewest : int, default=1
        Slabs at least, where they would be too long otherwise.
    """

    def filled(slabs: int) -> float:
        programs = slabs * k_blocks
        return programs / (-(-programs // places) * places)

    most = max(_MOST_WAVES * places // k_blocks, 2 * fewest - 1)
    counts = range(fewest, most + 1)
    return next((n for n in counts if filled(n) >= 0.95), max(counts, key=filled))


def file_name(gpu: str) -> str:
    """Name of the JSON file of a GPU as its driver spells it."""
    return "-".join(gpu.lower().split()) + ".json"


@cache
def winners(gpu: str) -> dict[Problem, Config]:
    """Measured winners of a GPU; empty when there is no file for it.

    Raises
    ------
    ValueError
        When the file is not in the format that `save_winners` writes.
    """
    path = Path(__file__).parent / "tuned" / file_name(gpu)
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text())["winners"]
        return {Problem(**e["problem"]): Config(**e["config"]) for e in entries}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a file of tuning winners: {error}") from error


def save_winners(path: Path, measured: dict[Problem, tuple[Config, float]], about: dict) -> None:
    """Write winners and their times in milliseconds; `about` names GPU, date and versions."""
    entries = [
        {"problem": asdict(problem), "config": asdict(config), "ms": round(ms, 4)}
        for problem, (config, ms) in sorted(measured.items(), key=lambda item: repr(item[0]))
    ]
    path.write_text(json.dumps({**about, "winners": entries}, indent=1) + "\n")


@cache
def choose(problem: Problem, gpu: str = "", shared_limit: int = SAFE_SHARED_BYTES) -> Config:
    """The measured winner with the nearest number of components, else the default."""
    near = {
        abs(p.n_components.bit_length() - problem.n_components.bit_length()): config
        for p, config in winners(gpu).items()
        if (p.job, p.covariance_type, p.mode, p.block_d)
        == (problem.job, problem.covariance_type, problem.mode, problem.block_d)
        and fits(p, config, shared_limit)
    }
    return near[min(near)] if near else default(problem, shared_limit)
