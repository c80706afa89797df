"""A process of its own for other people's packages, which may hang, crash or spoil the GPU."""

import multiprocessing
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

import torch

from gmm_ivf.eval.environment import set_threads
from gmm_ivf.eval.kernel_cases import Case
from gmm_ivf.eval.kernel_contenders import Contender
from gmm_ivf.eval.kernel_measure import Measurer, expected_seconds, failed
from gmm_ivf.eval.kernel_results import Row
from gmm_ivf.eval.kernel_timing import Budget

# Seconds of a measurement after which it counts as hung, beside twice what it is known to take.
PATIENCE = 30.0
# Those in which the process has to begin.
_BEGIN_SECONDS = 120.0


class Worker:
    """Measures in a process that is started when needed, and ended when it does not answer.

    A contender that did not answer is not tried again.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._hung: dict[str, Case] = {}
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def measure(self, contender: Contender, case: Case, job: str, budget: Budget) -> Row:
        """As `Measurer.measure`; no answer and a crash are rows that failed."""

        def row(reason: str) -> Row:
            return failed(contender, case, job, self.device, reason)

        if contender.name in self._hung:
            return row(f"not tried, for it did not answer in {self._hung[contender.name]}")
        seconds = PATIENCE + 2 * expected_seconds(contender, case, job)
        try:
            connection = self._begun()
            if connection is None:
                return row(f"no process for it after {_BEGIN_SECONDS:g} s")
            connection.send((contender, case, job, budget.left()))
            if not connection.poll(seconds):
                self._hung[contender.name] = case
                self.close()
                return row(f"no answer after {seconds:.0f} s, stopped")
            found, sound = connection.recv()
        except (EOFError, OSError):
            return row(f"its process ended, status {self.close()}")
        if not sound:
            self.close()
        return found

    def _begun(self) -> Connection | None:
        """The connection to a process that is ready."""
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            mine, theirs = context.Pipe()
            arguments = (theirs, self.device, torch.get_num_threads())
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            self._process, self._connection = process, mine
            if not mine.poll(_BEGIN_SECONDS):
                self.close()
                return None
            mine.recv()
        return self._connection

    def close(self) -> int | None:
        """End the process; its exit status."""
        status = None
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.join(1)  # it ends by itself, unless it is busy
            self._process.kill()
            self._process.join(10)
            status = self._process.exitcode
        self._process = self._connection = None
        return status


def _serve(connection: Connection, device: torch.device, threads: int) -> None:
    """Answer until the other end is closed, with rows and whether more may be asked for."""
    # Ctrl-C is for the one who asks, and who ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_threads(threads)
    measurer = Measurer(device)
    connection.send("ready")
    while True:
        try:
            contender, case, job, seconds = connection.recv()
        except EOFError:
            return
        row = measurer.measure(contender, case, job, Budget(seconds))
        connection.send((row, row.status == "ok" or _sound(device)))


def _sound(device: torch.device) -> bool:
    """Whether the GPU still works for this process, after something failed."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True
