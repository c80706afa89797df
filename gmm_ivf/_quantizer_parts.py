"""A trained GMMQuantizer as JSON values and arrays, and back."""

import numbers
from typing import Any

import numpy as np

from gmm_ivf._coarse import Centroids
from gmm_ivf.estimator import GaussianMixture
from gmm_ivf.params import MixtureParams
from gmm_ivf.quantizer import GMMQuantizer, _restore

# Where to compute is a matter of the machine that reads the file.
_OF_THE_MACHINE = ("device", "backend")


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are numbers, names or None.

    Others are starts given as arrays and random generators: for training again, not for use.
    """
    kept = {n: v for n, v in options.items() if n not in _OF_THE_MACHINE}
    return {n: v for n, v in kept.items() if v is None or isinstance(v, str | numbers.Real)}


def quantizer_parts(q: GMMQuantizer) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a file keeps of a quantizer: JSON values, and arrays in float64."""
    _, (_, arguments, options, state) = q.__reduce__()
    mixture = state.pop("mixture")
    values: dict[str, Any] = {
        "arguments": [int(a) for a in arguments],
        "options": _plain(options),
        "state": state,
    }
    if isinstance(mixture, Centroids):
        return values, {"means": mixture.means_}
    params, values["saved"] = mixture.saved_parts()
    values["mixture"], arrays = params.parts()
    values["mixture_options"] = _plain(mixture.get_params())
    return values, arrays


def quantizer_of_parts(
    values: dict[str, Any], arrays: dict[str, np.ndarray], source: Any
) -> GMMQuantizer:
    """The inverse of `quantizer_parts`.

    Raises
    ------
    ValueError
        Naming the source, when they make no quantizer.
    """
    if "mixture" in values:
        params = MixtureParams.from_parts(values["mixture"], arrays, source)
        mixture = GaussianMixture.from_saved_parts(params, values["saved"])
        mixture.set_params(**values["mixture_options"])
    else:
        mixture = Centroids.checked(arrays["means"], unit=False)
    state = {**values["state"], "mixture": mixture}
    return _restore(GMMQuantizer, tuple(values["arguments"]), values["options"], state)
