"""Tiled EM in plain torch, for any device: the backend that ships beside the Triton kernels.

A Gaussian is an exponential family: its log-density is linear in features of x (x, 1 and |x|^2 or
x^2), and the sufficient statistics are sums of the same features. So one matrix product per tile
gives all log-densities and a second one all statistics, for spherical, diag and (after whitening)
tied covariances. Full covariances go component by component through their Cholesky factors, with
``x - mean`` formed first: expanding the square loses too much when they are ill-conditioned.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gmm_ivf.kernels.components import Components, Statistics

Responder = Callable[[Tensor, "Prepared"], tuple[Tensor, Tensor]]

# Elements of the largest temporary (tile rows x components): small enough for the processor's
# cache, since several passes go over it; large enough to fill a GPU.
_TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


@dataclass(frozen=True)
class Prepared:
    """Components with the coefficients of their log-densities, and a precision mode.

    Attributes
    ----------
    components : Components
    mode : str
    coefficients : Tensor of shape (K, F), float64, or None for full
    rounded : Tensor or None
        The same in the dtype of the mode, for all tiles but those of far samples.
    """

    components: Components
    mode: str
    coefficients: Tensor | None
    rounded: Tensor | None

    @property
    def kind(self) -> str:
        return self.components.covariance_type


@contextmanager
def exact_float32() -> Iterator[None]:
    """Float32 products as IEEE float32, whatever the process chose for its own (TF32, bf16)."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def compute_dtype(mode: str) -> torch.dtype:
    """Dtype in which products of a mode are computed here: half modes are emulated in float32."""
    return torch.float64 if mode == "fp64" else torch.float32


def round_operand(x: Tensor, mode: str) -> Tensor:
    """x rounded to what a matrix product of the mode takes; the dtype of x stays.

    fp16x3 splits an operand into two halves, which together hold as much as float32. fp16
    saturates: infinity would become NaN.
    """
    if mode == "fp16":
        largest = torch.finfo(torch.float16).max
        return x.clamp(-largest, largest).half().to(x.dtype)
    if mode == "bf16":
        return x.bfloat16().to(x.dtype)
    if mode == "tf32":
        bits = x.float().contiguous().view(torch.int32)
        # Ties to even: on the grid of samples far from the origin ties are frequent.
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32).to(x.dtype)
    return x


def tile_rows(n_components: int, n_features: int, device: torch.device) -> int:
    """Rows of a tile: bounds the temporaries whatever the number of samples."""
    elements = _TILE_ELEMENTS.get(device.type, _TILE_ELEMENTS["cuda"])
    rows = elements // max(n_components, 2 * n_features, 1)
    # Below a thousand rows each tile costs more in launches than it saves in memory traffic.
    rows = max(rows, min(1024, 4 * elements // max(n_components, n_features, 1)))
    return max(64, min(rows // 64 * 64, 1 << 16))


def prepare(components: Components, mode: str) -> Prepared:
    """Coefficients of the log-densities over `_features`, once per iteration."""
    c = components
    if c.covariance_type == "full":
        return Prepared(c, mode, None, None)
    means, factor = c.means, c.precisions_cholesky
    if c.covariance_type == "tied":
        means = means @ factor
        precision = torch.ones_like(means[:, :1])
    else:
        precision = factor.square().reshape(len(means), -1)
    means = round_operand(means, mode)
    offset = c.log_constants() - 0.5 * (precision * means.square()).sum(1)
    linear = precision * means
    parts = [linear, offset[:, None]]
    if c.covariance_type != "tied":
        parts.insert(0, -0.5 * precision)
    coefficients = torch.cat(parts, dim=1)
    return Prepared(c, mode, coefficients, coefficients.to(compute_dtype(mode)))


def _features(x: Tensor, kind: str, mode: str) -> Tensor:
    """Columns that the statistics sum: [|x|^2 | x^2], x, 1."""
    if x.dtype == torch.float32:  # float64 tiles hold samples too far away for the mode
        x = round_operand(x, mode)
    parts = [x, x.new_ones(len(x), 1)]
    if kind == "spherical":
        parts.insert(0, x.square().sum(1, keepdim=True))
    elif kind == "diag":
        parts.insert(0, x.square())
    return torch.cat(parts, dim=1)


def log_joint(x: Tensor, prepared: Prepared, features: Tensor | None = None) -> Tensor:
    """``log(weight_k N(x_n; mean_k, Sigma_k))`` of a tile, shape (n, K), in the dtype of x.

    `features` are those of the tile, where they are known.
    """
    coefficients, rounded = prepared.coefficients, prepared.rounded
    if coefficients is None or rounded is None:
        return _log_joint_full(x, prepared)
    if rounded.dtype != x.dtype:
        rounded = coefficients.to(x.dtype)
    if prepared.kind != "tied":
        if features is None:
            features = _features(x, prepared.kind, prepared.mode)
        return features @ rounded.T
    white = x @ prepared.components.precisions_cholesky.to(x.dtype)
    white = _features(white, "tied", prepared.mode)
    logits = white @ rounded.T
    return logits.sub_(0.5 * white[:, :-1].square().sum(1, keepdim=True))


def _component_blocks(n_components: int, n: int, d: int) -> Iterable[slice]:
    step = max(1, (1 << 22) // max(1, n * d))
    return (slice(k, min(k + step, n_components)) for k in range(0, n_components, step))


def _log_joint_full(x: Tensor, prepared: Prepared) -> Tensor:
    c, factor = prepared.components, prepared.components.precisions_cholesky
    out = x.new_empty(len(x), len(c.means))
    constants = c.log_constants()
    if x.dtype == torch.float32:  # float64 tiles hold samples too far away for the mode
        x = round_operand(x, prepared.mode)
        factor = round_operand(factor, prepared.mode)
        # The determinant of the rounded factor: the errors of its diagonal then cancel.
        rounded, exact = (
            f.diagonal(dim1=1, dim2=2).abs().log().sum(1) for f in (factor, c.precisions_cholesky)
        )
        constants += rounded - exact
    means, factors, constants = (v.to(x.dtype) for v in (c.means, factor, constants))
    for block in _component_blocks(len(means), *x.shape):
        white = torch.bmm(x[None] - means[block, None], factors[block])
        out[:, block] = constants[block] - 0.5 * white.square().sum(-1).T
    return out


def responsibilities(
    x: Tensor, prepared: Prepared, features: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-density (n,) and responsibilities (n, K) of a tile."""
    logits = log_joint(x, prepared, features)
    resp = torch.softmax(logits, dim=1)
    return _log_densities(logits, resp), resp


def _log_densities(logits: Tensor, resp: Tensor) -> Tensor:
    """Log-sum-exp of each row, whose largest responsibility is ``exp(largest logit - it)``.

    torch's softmax takes its exponentials at full speed; on a CPU ``exp`` and ``logsumexp`` take
    ten times as long where they underflow, which most responsibilities do.
    """
    return logits.amax(dim=1) - resp.amax(dim=1).log()


def log_density(x: Tensor, prepared: Prepared) -> Tensor:
    """``log sum_k weight_k N(x_n; mean_k, Sigma_k)`` of a tile, (n,), in the dtype of x."""
    return responsibilities(x, prepared)[0]


def likeliest(x: Tensor, prepared: Prepared) -> Tensor:
    """The likeliest component of each row, (n,)."""
    return log_joint(x, prepared).argmax(dim=1)


def top_components(x: Tensor, prepared: Prepared, m: int) -> tuple[Tensor, Tensor]:
    """The m likeliest components of each row, best first, and their log-responsibilities."""
    logits = log_joint(x, prepared)
    density = _log_densities(logits, torch.softmax(logits, dim=1))
    values, ids = logits.topk(m, dim=1)
    return ids, values - density[:, None]


def nearest_means(x: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the nearest mean and squared distance to it, both (n,): hard assignment."""
    half_squares = 0.5 * means.square().sum(1)
    value, label = torch.addmm(half_squares, x, means.T, alpha=-1).min(dim=1)
    return label, (2 * value + x.square().sum(1)).clamp_min_(0)


def scatter(tiles: Iterable[Tensor], d: int, device: torch.device) -> Tensor:
    """``sum_n x_n x_n^T`` in float64, (D, D): all that tied covariances need of the data."""
    total = torch.zeros(d, d, dtype=torch.float64, device=device)
    for x in tiles:
        x = x.double()
        total += x.T @ x
    return total


def e_step(
    tiles: Iterable[Tensor],
    prepared: Prepared,
    total_scatter: Tensor | None = None,
    respond: Responder | None = None,
) -> Statistics:
    """Sufficient statistics of all tiles.

    Parameters
    ----------
    tiles : iterable of Tensor of shape (n, D)
        The samples, a tile at a time; float32 or float64.
    prepared : Prepared
        The statistics are about the means of its components.
    total_scatter : Tensor of shape (D, D), optional
        The result of `scatter`; required for tied covariances.
    respond : callable, optional
        Gives log-density and responsibilities of a tile in place of those of the components.

    Returns
    -------
    Statistics
        float64; sums within a tile are in the dtype of the tile.
    """
    means = prepared.components.means
    full = prepared.kind == "full"
    log_likelihood = means.new_zeros(())
    sums: tuple[Tensor, ...] | None = None
    for x in tiles:
        features = None if full else _features(x, prepared.kind, prepared.mode)
        if respond is None:
            density, resp = responsibilities(x, prepared, features)
        else:
            density, resp = respond(x, prepared)
        log_likelihood += density.sum(dtype=torch.float64)
        if features is None:
            part = _moments_full(x, resp, means, prepared.mode)
        else:
            part = (round_operand(resp, prepared.mode).T @ features,)
        if sums is None:
            sums = tuple(p.double() for p in part)
        else:
            for total, p in zip(sums, part, strict=True):
                total += p
    if sums is None:
        raise ValueError("tiles: at least one tile of samples is needed, got none.")
    if full:
        return Statistics(log_likelihood, *sums)
    return _about_means(log_likelihood, sums[0], prepared, total_scatter)


def _moments_full(
    x: Tensor, resp: Tensor, means: Tensor, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """s0, s1 and s2 about the means, without a difference of large sums."""
    if x.dtype == torch.float32:
        x, resp = round_operand(x, mode), round_operand(resp, mode)
    d = x.shape[1]
    s1 = means.new_empty(len(means), d)
    s2 = means.new_empty(len(means), d, d)
    for block in _component_blocks(len(means), *x.shape):
        diff = x[None] - means[block, None].to(x.dtype)
        weighted = resp[:, block].T[:, :, None] * diff
        s1[block] = weighted.sum(1).double()
        s2[block] = torch.bmm(weighted.mT, diff).double()
    return resp.sum(0, dtype=torch.float64), s1, s2


def _about_means(
    log_likelihood: Tensor, sums: Tensor, prepared: Prepared, total_scatter: Tensor | None
) -> Statistics:
    """Statistics about the means from float64 feature sums about the origin."""
    means = prepared.components.means
    d = means.shape[1]
    raw2, raw1, s0 = sums[:, : -d - 1], sums[:, -d - 1 : -1], sums[:, -1]
    s1 = raw1 - s0[:, None] * means
    if prepared.kind == "tied":
        if total_scatter is None:
            raise ValueError("total_scatter: tied covariances need the result of scatter().")
        cross = means.T @ raw1
        s2 = total_scatter - cross - cross.T + means.T @ (s0[:, None] * means)
    elif prepared.kind == "diag":
        s2 = raw2 - 2 * means * raw1 + s0[:, None] * means.square()
    else:
        s2 = raw2[:, 0] - 2 * (means * raw1).sum(1) + s0 * means.square().sum(1)
    return Statistics(log_likelihood, s0, s1, s2)
