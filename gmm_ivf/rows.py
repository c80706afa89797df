"""Samples of any source, read a tile at a time and brought into the frame of the estimator."""

from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from gmm_ivf.memory import free_bytes
from gmm_ivf.params import Frame

_SCAN_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
_UPLOAD_ELEMENTS = 1 << 22
# Coordinates of the samples that a frame was made for are at most this, with room for rounding.
INSIDE = 16.01
# Serves those samples.
DATA_REACH = {torch.float32: 64.0, torch.float64: 64.0}


class Rows:
    """N samples with D features that are read in blocks of rows.

    Parameters
    ----------
    source : ndarray, memmap, h5py.Dataset or Tensor of shape (N, D)
        Real numbers of any dtype, strides and byte order.
    """

    def __init__(self, source: Any):
        self.source = source
        self.n, self.d = source.shape
        self.is_tensor = isinstance(source, Tensor)
        kind = source.dtype if self.is_tensor else np.dtype(source.dtype).newbyteorder("=")
        self.is_half = kind in (torch.float16, torch.bfloat16, np.dtype(np.float16))
        # float32 holds these values exactly, so that centring in float32 is exact to rounding.
        self.fits_float32 = self.is_half or kind in (torch.float32, np.dtype(np.float32))

    @property
    def device(self) -> torch.device | None:
        """Where the samples lie, if they are a tensor."""
        return self.source.device if self.is_tensor else None

    def on_gpu(self, device: torch.device) -> "Rows":
        """The same rows, copied once to a GPU if they take at most a quarter of what is free.

        Through two pinned buffers: the processor fills one while the other is on its way.
        """
        first = self.block(0, 1)
        n_bytes = first.element_size() * self.n * self.d
        if self.is_tensor or 4 * n_bytes > free_bytes(device):
            return self
        size = max(1, _UPLOAD_ELEMENTS // self.d)
        whole = torch.empty(self.n, self.d, dtype=first.dtype, device=device)
        pinned = [torch.empty(size, self.d, dtype=first.dtype, pin_memory=True) for _ in range(2)]
        sent = [torch.cuda.Event(), torch.cuda.Event()]
        with torch.cuda.device(device):
            for number, (start, stop) in enumerate(self.spans(size)):
                turn = number % 2
                sent[turn].synchronize()
                buffer = pinned[turn][: stop - start]
                buffer.copy_(self.block(start, stop))
                whole[start:stop].copy_(buffer, non_blocking=True)
                sent[turn].record()
        return Rows(whole)

    def block(self, start: int, stop: int) -> Tensor:
        """Rows start to stop as a contiguous tensor in their own units.

        Contiguous, so that sums come out the same whatever the strides of the source; in the dtype
        of the source where torch has it.
        """
        if self.is_tensor:
            return self.source[start:stop].detach().contiguous()
        part = np.asarray(self.source[start:stop])
        if part.dtype == np.longdouble or part.dtype.kind not in "fiub":
            part = part.astype(np.float64)
        part = np.ascontiguousarray(part, part.dtype.newbyteorder("="))
        # torch takes no memory it may not write, except with a warning.
        return torch.from_numpy(part if part.flags.writeable else part.copy())

    def scan(self, device: torch.device, *, keep_whole: bool = True) -> Frame:
        """Check that all values are finite, and find the frame of the data.

        Parameters
        ----------
        device : torch.device
            Where to compute.
        keep_whole : bool, default=True
            Round the centre where all samples are whole numbers, such as the bytes of SIFT: they
            stay whole, and half precision holds them exactly. Not for tied covariances: features
            that add up to a constant, as counts do, have a mean off the centre along that sum,
            where the covariance is narrow, and the products that give distances cancel there.

        Raises
        ------
        ValueError
            Naming the first row that holds NaN or infinity.
        """
        total = torch.zeros(self.d, dtype=torch.float64, device=device)
        low = torch.full_like(total, torch.inf)
        high = -low
        whole = keep_whole
        for start, stop in self.spans(_scan_rows(self.d, device)):
            part = self.block(start, stop).to(device).double()
            self._refuse_non_finite(part, start)
            whole = whole and torch.equal(part, part.round())
            low = torch.minimum(low, part.amin(0))
            high = torch.maximum(high, part.amax(0))
            total += part.sum(0)
        mean = total / self.n
        # A sum of huge values may overflow; any centre between the extremes serves.
        mean = torch.where(mean.isfinite(), mean, low / 2 + high / 2)
        center = torch.clamp(mean, low, high)
        if whole:
            center = center.round()
        if self.fits_float32:
            center = center.float().double()
        low, high, center = (t.cpu().numpy() for t in (low, high, center))
        return Frame.of_range(center, low, high)

    @staticmethod
    def _refuse_non_finite(part: Tensor, start: int) -> None:
        if part.is_floating_point() and not bool(part.sum().isfinite()):
            bad = ~part.isfinite().all(dim=1)
            if bool(bad.any()):
                first = int(bad.nonzero()[0])
                what = "NaN" if bool(part[first].isnan().any()) else "infinity"
                raise ValueError(
                    f"Input X contains {what}, first in row {start + first}; values must be finite "
                    "(no NaN, inf): remove or impute such rows."
                )

    def spans(self, size: int) -> Iterator[tuple[int, int]]:
        """Start and stop of consecutive blocks of at most `size` rows."""
        for start in range(0, self.n, size):
            yield start, min(start + size, self.n)

    def tile(
        self,
        start: int,
        stop: int,
        frame: Frame,
        dtype: torch.dtype,
        device: torch.device,
        reach: Mapping[torch.dtype, float] | None = DATA_REACH,
    ) -> Tensor:
        """Rows start to stop in the frame; contiguous, on the device.

        `reach` is the largest coordinate that each dtype serves. A tile with a sample beyond that
        of float32 comes back in float64 even where float32 was asked for. None is for samples that
        were scanned: they are finite, and near enough.

        Raises
        ------
        ValueError
            Naming a row that is not finite, or too far away for float64.
        """
        part = self.block(start, stop).to(device)
        if reach is None:
            return self._inside(part, frame, dtype)
        self._refuse_non_finite(part, start)
        inside = self._inside(part, frame, dtype)
        largest = float(inside.abs().max())
        if not largest <= reach[dtype] and dtype == torch.float32:
            inside = self._inside(part, frame, torch.float64)
            largest = float(inside.abs().max())
        if not largest <= reach[torch.float64]:
            row = int(inside.abs().amax(1).argmax())
            raise ValueError(
                f"Input X is too large in row {start + row}: its squared distance from the data "
                "overflows float64; scale or remove such rows."
            )
        return inside

    def _inside(self, part: Tensor, frame: Frame, dtype: torch.dtype) -> Tensor:
        center = torch.from_numpy(frame.center).to(part.device)
        if not (self.fits_float32 and dtype == torch.float32):
            return part.double().sub(center).mul_(1 / frame.scale).to(dtype).contiguous()
        return part.float().sub(center.float()).mul_(1 / frame.scale).contiguous()

    def take(
        self, indices: np.ndarray, frame: Frame, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The rows of the given ascending indices in the frame, reading every block once."""
        out = torch.empty(len(indices), self.d, dtype=dtype, device=device)
        for start, stop in self.spans(_scan_rows(self.d, device)):
            first, last = np.searchsorted(indices, (start, stop))
            if last > first:
                tile = self.tile(start, stop, frame, dtype, device)
                picked = torch.from_numpy(indices[first:last] - start).to(device)
                out[first:last] = tile[picked]
        return out


def _scan_rows(d: int, device: torch.device) -> int:
    return max(1, _SCAN_ELEMENTS.get(device.type, _SCAN_ELEMENTS["cpu"]) // d)


def is_lazy(source: Any) -> bool:
    """Whether a source is read by tiles as it is, without passing through scikit-learn's checks."""
    return isinstance(source, (Tensor, h5py.Dataset))


def check_lazy(source: Any) -> None:
    """Refuse a tensor or HDF5 dataset that is not a matrix of real numbers.

    Raises
    ------
    ValueError
        Naming the shape or the dtype.
    """
    shape = tuple(source.shape)
    if len(shape) != 2:
        raise ValueError(
            f"Expected 2D array, got {len(shape)}D array instead (shape={shape}). "
            "Reshape your data to (n_samples, n_features)."
        )
    if isinstance(source, Tensor):
        bad = source.is_complex() or source.layout != torch.strided or source.is_quantized
    else:
        bad = np.dtype(source.dtype).kind not in "fiub"
    if bad:
        raise ValueError(f"X must hold real numbers in a dense layout, got dtype {source.dtype}.")
    if 0 in shape:
        raise ValueError(
            f"Found array with 0 sample(s) or 0 feature(s) (shape={shape}) "
            "while a minimum of 1 is required."
        )
