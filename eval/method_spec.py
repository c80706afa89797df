"""Grammar of ``--method``: ``NAME[:key=value,...]``, for example ``gmm-soft:tau=1/K``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Option = Callable[[str], Any]


@dataclass(frozen=True)
class MethodSpec:
    """A method and the options that differ from its defaults; equal specs measure the same thing.

    `str()` gives the canonical spelling, which `parse_method` reads back.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return self.name + ":" + ",".join(f"{key}={value}" for key, value in self.options)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of an option, or `default` where the spec leaves it out."""
        return dict(self.options).get(key, default)


@dataclass(frozen=True)
class Threshold:
    """A posterior threshold, either a number or a multiple of 1/K."""

    value: float
    per_component: bool = False

    def resolve(self, n_components: int) -> float:
        """The number for a mixture of `n_components`."""
        return self.value / n_components if self.per_component else self.value

    def __str__(self) -> str:
        return f"{self.value:g}/K" if self.per_component else f"{self.value:g}"


def _number(kind: type, low: float, text: str) -> Any:
    value = kind(text)
    if not value >= low:
        raise ValueError(f"a number of at least {low:g}")
    return value


def _count(text: str) -> int:
    try:
        return _number(int, 1, text)
    except ValueError:
        raise ValueError("a whole number of at least 1") from None


def _at_least(low: float) -> Option:
    def parse(text: str) -> float:
        try:
            return _number(float, low, text)
        except ValueError:
            raise ValueError(f"a number of at least {low:g}") from None

    return parse


def _one_of(*names: str) -> Option:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError("one of " + ", ".join(names))
        return text

    return parse


def _threshold(text: str) -> Threshold:
    number, slash, unit = text.partition("/")
    try:
        threshold = Threshold(float(number), per_component=bool(slash))
    except ValueError:
        threshold = Threshold(-1.0)
    if not 0 < threshold.value < float("inf") or (slash and unit != "K"):
        raise ValueError("a number above 0 or a multiple of 1/K, such as 1/K")
    return threshold


_FIT_OPTIONS: dict[str, Option] = {
    "covariance_type": _one_of("spherical", "diag", "tied", "full"),
    "init_params": _one_of("kmeans", "k-means++", "random", "random_from_data"),
    "max_iter": _count,
    "n_init": _count,
    "precision": _one_of("auto", "fp16", "bf16", "fp16x3", "tf32", "fp32", "fp64"),
    "reg_covar": _at_least(0),
    "tol": _at_least(0),
}
_SOFT_OPTIONS: dict[str, Option] = {
    "max_lists": _count,
    "replication": _at_least(1),
    "tau": _threshold,
}

#: Options that each method takes, by name.
OPTIONS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "kmeans": {"niter": _count},
        "gmm": _FIT_OPTIONS,
        "gmm-soft": _FIT_OPTIONS | _SOFT_OPTIONS,
    }
)

#: What a method does where its spec says nothing; `replication` yields to a given `tau`.
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "kmeans": {},
        "gmm": {"covariance_type": "spherical"},
        "gmm-soft": {"covariance_type": "spherical", "max_lists": 2, "replication": 1.5},
    }
)

FIT_KEYS = frozenset(_FIT_OPTIONS)


def parse_method(text: str) -> MethodSpec:
    """Read one ``--method``.

    Parameters
    ----------
    text : str
        ``NAME`` or ``NAME:key=value,key=value``.

    Returns
    -------
    MethodSpec
        Canonical: options sorted, those equal to the method's defaults left out.

    Raises
    ------
    ValueError
        For an unknown method (the known ones are listed), an unknown or repeated option, a value
        out of range, or `tau` together with `replication`.
    """
    name, colon, rest = text.strip().partition(":")
    if name not in OPTIONS:
        raise ValueError(f"unknown method {name!r}; known methods: {', '.join(OPTIONS)}")
    options: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in OPTIONS[name] or key in options:
            problem = "repeated option" if key in options else "no such option"
            raise ValueError(
                f"method {text!r}: {problem} {part!r}; write key=value with key one of "
                + ", ".join(sorted(OPTIONS[name]))
            )
        try:
            options[key] = OPTIONS[name][key](value)
        except ValueError as error:
            raise ValueError(f"method {text!r}: {key} must be {error}, got {value!r}") from None
    if "tau" in options and "replication" in options:
        raise ValueError(f"method {text!r}: give tau or replication, not both")
    kept = {key: value for key, value in options.items() if DEFAULTS[name].get(key) != value}
    return MethodSpec(name, tuple(sorted(kept.items())))


def label(method: str) -> str:
    """Name of a method for a figure, from its canonical spelling."""
    spec = parse_method(method)
    names = {"kmeans": "k-means", "gmm": "GMM, hard", "gmm-soft": "GMM, soft"}
    options = dict(spec.options)
    if spec.name == "gmm-soft" and "tau" not in options:
        options = {"replication": DEFAULTS["gmm-soft"]["replication"]} | options
    text = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{names[spec.name]} ({text})" if text else names[spec.name]
