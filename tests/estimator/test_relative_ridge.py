"""R6: what a fit says about the relative ridge of its covariances."""

import numpy as np
import pytest

from gmm_ivf import GaussianMixture
from gmm_ivf.kernels.components import RELATIVE_RIDGE

D = 6


def correlated(n: int = 300) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((n, D)) @ rng.standard_normal((D, D))).astype(np.float32)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_ridge_is_reported_and_is_in_the_covariances(kind, precision):
    x = correlated()
    options = {"covariance_type": kind, "backend": "torch", "random_state": 0}
    model = GaussianMixture(1, precision=precision, **options).fit(x)
    exact = GaussianMixture(1, precision="fp64", **options).fit(x)
    assert exact.fit_report_["relative_ridge"] == 0.0
    reported = model.fit_report_["relative_ridge"]
    half = precision == "fp16" and kind in ("full", "tied")
    assert reported == (RELATIVE_RIDGE if half else 0.0)
    if half:
        added = np.trace((model.covariances_ - exact.covariances_).reshape(D, D)) / D
        mean_variance = np.trace(exact.covariances_.reshape(D, D)) / D
        assert added == pytest.approx(reported * mean_variance, rel=0.1)
