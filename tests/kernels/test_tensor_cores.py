"""The kernels with sums as the tensor cores of a Hopper GPU form them, which no CPU does.

The interpreter adds in float32 and rounds. Tensor cores take 16 products at a time, shift them and
the sum so far to the largest exponent among them, and cut off what lies two bits below the last of
a float32. What passes here has met the errors that half precision makes on the GPU.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.runtime import interpreter

from gmm_ivf.eval.accuracy import Problem, run_problem
from gmm_ivf.kernels import em
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.loop import Loop

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    # Rows whose last normaliser is far off overflow, and are done again for that reason.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]
STEP, BITS, EXTRA_BITS = 16, 24, 2


def cut(values: np.ndarray, largest: np.ndarray, bits: int) -> np.ndarray:
    """Drop what lies more than so many bits below the leading one of `largest`."""
    exponent = np.frexp(largest)[1]
    return np.ldexp(np.trunc(np.ldexp(values, bits - exponent)), exponent - bits)


def tensor_core_product(a: np.ndarray, b: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """``acc + a @ b``, float32."""
    total = acc.astype(np.float64)
    for start in range(0, a.shape[1], STEP):
        columns, rows = a[:, start : start + STEP], b[start : start + STEP]
        terms = columns.astype(np.float64)[:, :, None] * rows.astype(np.float64)[None]
        terms = np.concatenate([terms, total[:, None]], axis=1)
        largest = np.abs(terms).max(axis=1)
        total = cut(terms, largest[:, None], BITS + EXTRA_BITS).sum(axis=1)
        total = cut(total, np.abs(total), BITS)
    return total.astype(np.float32)


@pytest.fixture(autouse=True)
def _tensor_cores(monkeypatch):
    def create_dot(_self, a, b, d, _precision, _imprecise):
        product = tensor_core_product(a.data, b.data, d.data)
        return interpreter.TensorHandle(product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def test_the_model_by_hand():
    one = np.ones((1, 1), np.float32)
    a = np.array([[1.0, 2.0**-25, -1.0]], np.float32)
    b = np.ones((3, 1), np.float32)
    # Two bits below float32 are kept until the sum is written, and cut there.
    assert tensor_core_product(a, b, 0 * one) == 2.0**-25
    assert tensor_core_product(a[:, :2], b[:2], 0 * one) == 1.0
    assert tensor_core_product(-a[:, 1:2], b[:1], one) == 1.0 - 2.0**-24


@pytest.mark.parametrize(
    ("d", "mode"),
    [(128, "fp16"), (128, "fp16x3"), (40, "bf16"), (40, "tf32"), (40, "fp16x3"), (300, "fp16")],
)
def test_components_of_one_sample_keep_it(d, mode):
    """Logits are a million times the half norms there: both passes have to err alike."""
    generator = torch.Generator().manual_seed(0)
    samples = em.stage(2 * torch.randn(100, d, generator=generator), mode)
    means = torch.randn(32, d, generator=generator, dtype=torch.float64)
    # On the sample as it is stored, where EM puts the mean of a component of one.
    means[:16] = samples.values[:, :16, :d].double().sum(0)
    variances = torch.ones(32, dtype=torch.float64)
    variances[:16] = 1e-6
    components = Components.from_covariances(
        "spherical", torch.full_like(variances, 1 / 32), means, variances
    )
    _, got = em.e_step(samples, em.prepare(components, mode))
    torch.testing.assert_close(got.s0[:16], torch.ones_like(got.s0[:16]), rtol=0, atol=1e-3)
    assert bool(got.s1.isfinite().all())
    loop = Loop(samples, components, 1e-6)
    assert bool(loop.run(2).isfinite().all())
    torch.testing.assert_close(loop.counts[:16], got.s0[:16], rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["spherical", "tied", "diag"])
def test_three_products_are_of_float32_grade(kind):
    """A sum that is cut at every step is biased, but for what it loses on both sides of zero."""
    problem = Problem("tight", shift=0.0, n=100, d=128, k=8, covariance_type=kind)
    (result,) = run_problem(problem, ("fp16x3",), "triton", "cpu", {})
    assert result.measured is not None
    assert result.measured.nats < 5e-4
    assert abs(result.measured.bias) < 5e-4
