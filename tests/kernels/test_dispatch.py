"""Choice of backend, device and precision."""

import pytest
import torch

from gmm_ivf.kernels import dispatch
from gmm_ivf.kernels.components import COVARIANCE_TYPES, Components

every_kind = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


def gaussian(kind: str, mean: list[float], variances: list[float]) -> Components:
    """One component; spherical takes the first variance."""
    means = torch.tensor([mean], dtype=torch.float64)
    diag = torch.tensor([variances], dtype=torch.float64)
    covariances = {
        "spherical": diag[:, 0],
        "diag": diag,
        "tied": torch.diag(diag[0]),
        "full": torch.diag_embed(diag),
    }
    return Components.from_covariances(kind, torch.ones(1).double(), means, covariances[kind])


def correlated(kind: str, condition: float) -> Components:
    """One centred component whose covariance is far from diagonal."""
    s = 1 - 2 / (condition + 1)
    matrix = torch.tensor([[1.0, s], [s, 1.0]], dtype=torch.float64)
    matrix = matrix if kind == "tied" else matrix[None]
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    return Components.from_covariances(kind, torch.ones(1).double(), zeros, matrix)


def test_device():
    cpu = torch.device("cpu")
    assert dispatch.resolve_device("auto", cpu) == cpu
    assert dispatch.resolve_device("cpu", None) == cpu
    assert dispatch.resolve_device(cpu, None) == cpu
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert dispatch.resolve_device("auto", None).type == wanted


@pytest.mark.parametrize("device", ["tpu9", "nonsense", "cuda:77", "meta"])
def test_a_device_that_cannot_be_used(device):
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used here: .* \"cpu\""):
        dispatch.resolve_device(device, None)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_backend(monkeypatch):
    assert dispatch.resolve_backend("auto", "auto", CPU, False, 8) == ("torch", ("fp32", "fp64"))
    assert dispatch.resolve_backend("torch", "fp16", GPU, False, 8) == ("torch", ("fp16",))
    with pytest.raises(ValueError, match=r"backend must be one of .*'triton', .* got 'cuml'"):
        dispatch.resolve_backend("cuml", "auto", CPU, False, 8)
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)
    half = ("fp16", "fp16x3")
    assert dispatch.resolve_backend("auto", "auto", GPU, False, 8) == ("triton", half)
    assert dispatch.resolve_backend("triton", "auto", CPU, False, 8) == ("triton", half)
    assert dispatch.resolve_backend("auto", "bf16", GPU, True, 8) == ("triton", ("bf16",))
    # What the kernels cannot do "auto" leaves to torch, and an explicit request does not.
    assert dispatch.resolve_backend("auto", "auto", GPU, True, 8) == ("torch", ("fp64",))
    assert dispatch.resolve_backend("auto", "auto", GPU, False, 4097)[0] == "torch"
    for precision, wide, d, reason in [
        ("auto", True, 8, "no fp64"),
        ("fp64", False, 8, "no fp64"),
        ("fp16", False, 4097, "at most 4096 features, got 4097"),
    ]:
        with pytest.raises(ValueError, match=f'backend="triton" cannot .* {reason}'):
            dispatch.resolve_backend("triton", precision, GPU, wide, d)


def test_triton_that_cannot_run(monkeypatch):
    def refused() -> str:
        with pytest.raises(ValueError, match='backend="triton" cannot run') as error:
            dispatch.resolve_backend("triton", "fp16", CPU, False, 8)
        return str(error.value)

    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert "need a CUDA device (or TRITON_INTERPRET=1 on a CPU), got cpu" in refused()
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in refused()


def test_candidates():
    assert dispatch.candidate_precisions("auto", wide_input=True) == ("fp64",)
    assert dispatch.candidate_precisions("auto", wide_input=False) == ("fp32", "fp64")
    half = dispatch.candidate_precisions("auto", wide_input=False, half_products=True)
    assert half == ("fp16", "fp16x3")
    for name in dispatch.ROUNDING_UNITS:
        assert dispatch.candidate_precisions(name, wide_input=True) == (name,)
    with pytest.raises(ValueError, match=r"precision must be one of .*'fp64'.* got 'half'"):
        dispatch.candidate_precisions("half", wide_input=False)


@every_kind
def test_errors_are_ordered_by_precision(kind):
    c = gaussian(kind, [3.0, -2.0], [0.5, 0.25])
    errors = [
        float(dispatch.expected_errors(m, c)) for m in ("fp64", "fp32", "fp16x3", "fp16", "bf16")
    ]
    assert errors == sorted(errors)
    # The ridge of fp16 aside, its operands have as many digits.
    assert float(dispatch.expected_errors("tf32", c)) == pytest.approx(errors[3], rel=1e-3)


@every_kind
def test_auto_takes_float32_where_it_serves(kind):
    candidates = ("fp32", "fp64")
    assert dispatch.choose_precision(candidates, gaussian(kind, [2.0, 1.0], [1.0, 1.0])) == "fp32"


@pytest.mark.parametrize("kind", ["spherical", "diag", "tied"])
def test_auto_leaves_float32_for_tight_components_far_from_the_centre(kind):
    far = gaussian(kind, [16.0, 0.0], [1e-4, 1e-4])
    assert dispatch.choose_precision(("fp32", "fp64"), far) == "fp64"
    assert dispatch.choose_precision(("fp32",), far) == "fp32"


@pytest.mark.parametrize("kind", ["tied", "full"])
def test_gm_g2_auto_leaves_float32_for_correlations(kind):
    """Whatever the mean: the rounding of x is stretched where the variance is small."""
    candidates = ("fp32", "fp64")
    assert dispatch.choose_precision(candidates, correlated(kind, 100.0)) == "fp32"
    assert dispatch.choose_precision(candidates, correlated(kind, 1e10)) == "fp64"


@pytest.mark.parametrize("kind", ["diag", "tied", "full"])
def test_uncorrelated_features_of_any_scale_need_no_float64(kind):
    c = gaussian(kind, [0.0, 0.0], [1.0, 1e-12])
    assert dispatch.choose_precision(("fp32", "fp64"), c) == "fp32"


@every_kind
def test_auto_leaves_float32_where_squares_overflow(kind):
    tiny = gaussian(kind, [0.0, 0.0], [1e-40, 1e-40])
    assert dispatch.choose_precision(("fp32", "fp64"), tiny) == "fp64"
    assert bool(dispatch.expected_errors("fp16", tiny).isinf().all())
    assert bool(dispatch.expected_errors("fp64", tiny).isfinite().all())


@pytest.mark.parametrize("kind", ["spherical", "diag"])
def test_one_bad_component_of_little_weight_decides(kind):
    """The mean over the components may be small: the worst counts too."""
    good = gaussian(kind, [1.0, 0.0], [1.0, 1.0])
    bad = gaussian(kind, [16.0, 0.0], [1e-9, 1e-9])
    both = Components.from_covariances(
        kind,
        torch.tensor([1 - 1e-12, 1e-12]).double(),
        torch.cat([good.means, bad.means]),
        torch.cat([good.covariances, bad.covariances]),
    )
    assert dispatch.choose_precision(("fp32", "fp64"), both) == "fp64"


@every_kind
def test_reach(kind):
    unit = gaussian(kind, [0.0, 0.0], [1.0, 1.0])
    assert dispatch.safe_reach(torch.float32, unit) == 64
    assert dispatch.safe_reach(torch.float64, unit) == 1e150
    tight = gaussian(kind, [0.0, 0.0], [1e-40, 1e-40])
    assert dispatch.safe_reach(torch.float64, tight) == pytest.approx(1e130)
    wide = gaussian(kind, [0.0, 0.0], [1e40, 1e40])
    assert dispatch.safe_reach(torch.float64, wide) == 1e150
