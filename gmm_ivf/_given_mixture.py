"""The check of a mixture that is given as an argument."""

from typing import Any

from sklearn.utils.validation import check_is_fitted

from gmm_ivf.estimator import GaussianMixture


def check_mixture(mixture: Any, name: str) -> None:
    """Refuse what is no fitted `GaussianMixture` of this package, and say how to come by one.

    Raises
    ------
    ValueError
        Naming the argument and the type that came; NotFittedError, which is one, before `fit`.
    """
    if isinstance(mixture, GaussianMixture):
        return check_is_fitted(mixture)
    raise ValueError(
        f"{name} must be a fitted gmm_ivf.GaussianMixture; got {_type(mixture)}.{_advice(mixture)}"
    )


def _type(value: Any) -> str:
    """Name of a type with that of its module, for classes of one name are common here."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return "None" if value is None else kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def _advice(value: Any) -> str:
    if hasattr(value, "mixture"):
        return " Give its attribute mixture."
    if not hasattr(value, "means_"):
        return ""
    if not hasattr(value, "precisions_"):
        return " Means alone, as GMMQuantizer.from_centroids takes them, are no mixture."
    return (
        " With m for yours, fit one that goes on from its parameters: gmm_ivf.GaussianMixture("
        "len(m.means_), covariance_type=m.covariance_type, weights_init=m.weights_, "
        "means_init=m.means_, precisions_init=m.precisions_).fit(X)."
    )
