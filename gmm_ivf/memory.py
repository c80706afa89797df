"""Device memory that runs out: smaller tiles, or an error that says how much was needed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")

# Below so many rows a tile is small against what its components take.
_FEWEST_ROWS = 64


def with_fitting_tiles(run: Callable[[int], Result], size: int) -> tuple[Result, int]:
    """Result of a pass over tiles of at most `size` rows, and the size that fitted.

    Each time that the device runs out of memory the tile is halved and the pass begun again.

    Raises
    ------
    MemoryError
        When 64 rows do not fit either.
    """
    while True:
        try:
            return run(size), size
        except torch.OutOfMemoryError as error:
            if size <= _FEWEST_ROWS:
                raise MemoryError(
                    f"the device has too little free memory for a tile of {size} rows: "
                    f"{_first_line(error)} Free some, or use fewer components."
                ) from error
            size = max(_FEWEST_ROWS, size // 2)


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that tensors may still take, with what torch keeps for them unused."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused


@contextmanager
def needed(what: str, n_bytes: int) -> Iterator[None]:
    """Say how much `what` needs when the device runs out of memory inside.

    Raises
    ------
    MemoryError
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"{what} need {n_bytes / 2**30:.2f} GiB on the device: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].strip()
