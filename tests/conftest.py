"""Where the tests of the kernels run."""

import pytest


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """A GPU, and the CPU through Triton's interpreter; skips the one that is not there."""
    import torch

    from gmm_ivf.kernels.dispatch import triton_obstacle

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if request.param == "cpu" and triton_obstacle(torch.device("cpu")) is not None:
        pytest.skip("needs TRITON_INTERPRET=1")
    return request.param
