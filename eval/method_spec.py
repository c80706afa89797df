"""Grammar of ``--method``: ``NAME[:key=value,...]``, for example ``gmm-soft:tau=1/K``."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gmm_ivf.rules import RULES, Rule, option_names

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

    def without(self, key: str) -> "MethodSpec":
        """The same spec with an option left out."""
        return MethodSpec(self.name, tuple((k, v) for k, v in self.options if k != key))


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


def _natural(text: str) -> int:
    try:
        return _number(int, 0, text)
    except ValueError:
        raise ValueError("a whole number of at least 0") from None


def _at_least(low: float) -> Option:
    def parse(text: str) -> float:
        try:
            return _number(float, low, text)
        except ValueError:
            raise ValueError(f"a number of at least {low:g}") from None

    return parse


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


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


def _like(pattern: str, words: str) -> Option:
    """Text that matches a pattern whole."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(words)
        return text

    return parse


_CODEC = _like(
    r"Flat|SQ[468]|SQ(fp|bf)16|PQ\d+(x\d+(fsr?)?)?|RaBitQ(\d|fs)?",
    "a codec of FAISS: Flat, SQ8, SQ4, SQfp16, PQ32, PQ32x4, PQ32x4fs, RaBitQ, RaBitQ4, RaBitQfs",
)
_PLACE_OPTIONS: dict[str, Option] = {
    "nlist": _count,
    "codec": _CODEC,
    "coarse": _like(r"flat|hnsw[1-9]\d*", "flat or hnsw with its number of links, as in hnsw32"),
    "refine": _flag,
}
_STOCK_OPTIONS: dict[str, Option] = _PLACE_OPTIONS | {
    "rotation": _like(r"none|RR|OPQ[1-9]\d*", "none, RR (random) or OPQ with its m, as in OPQ32"),
}
_FIT_OPTIONS: dict[str, Option] = {
    "covariance_type": _one_of("spherical", "diag", "tied", "full"),
    "init_params": _one_of("kmeans", "k-means++", "random", "random_from_data"),
    "max_iter": _count,
    "n_init": _count,
    "precision": _one_of("auto", "fp16", "bf16", "fp16x3", "tf32", "fp32", "fp64"),
    "reg_covar": _at_least(0),
    "tol": _at_least(0),
}
#: The rule that goes by posteriors; all others go by geometry, on any centroids.
RESPONSIBILITY = "responsibility"
_BUDGET_OPTIONS: dict[str, Option] = {"replication": _at_least(1), "tau": _threshold}
# Ranges are checked by the rules themselves.
_GEOMETRY_OPTIONS: dict[str, Option] = {
    "candidates": _count,
    "eps": _real,
    "lambda": _real,
    "rng_factor": _real,
    "strict": _flag,
}
_SOFT_OPTIONS: dict[str, Option] = {"adaptive": _flag, "max_lists": _count} | _GEOMETRY_OPTIONS

# Those of `gmm_ivf.CellOptions`, which checks them further.
_CELL_OPTIONS: dict[str, Option] = {
    "links": _count,
    "lists_ranked": _count,
    "min_size": _count,
    "residual_bins": _count,
    "residual_weight": _at_least(0),
    "shortlist": _at_least(1),
    "sketch": _natural,
    "visit": _one_of("edge", "list"),
}

#: Options that each method takes, by name.
OPTIONS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "kmeans": {"niter": _count} | _STOCK_OPTIONS,
        "gmm": _FIT_OPTIONS | _STOCK_OPTIONS,
        "gmm-soft": _FIT_OPTIONS
        | _PLACE_OPTIONS
        | _SOFT_OPTIONS
        | _BUDGET_OPTIONS
        | {"rule": _one_of(RESPONSIBILITY, *RULES)},
        "kmeans-soft": {"niter": _count, "rule": _one_of(*RULES)} | _PLACE_OPTIONS | _SOFT_OPTIONS,
        "gmm-cells": _FIT_OPTIONS | _PLACE_OPTIONS | _CELL_OPTIONS,
        "kmeans-cells": {"niter": _count} | _PLACE_OPTIONS | _CELL_OPTIONS,
    }
)

_PLACE_DEFAULTS = {"codec": "Flat", "coarse": "flat", "refine": False}
_STOCK_DEFAULTS = _PLACE_DEFAULTS | {"rotation": "none"}

#: What a method does where its spec says nothing; `replication` yields to a given `tau`, and to a
#: rule that has no such threshold.
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "kmeans": _STOCK_DEFAULTS,
        "gmm": _STOCK_DEFAULTS | {"covariance_type": "spherical"},
        "gmm-soft": _PLACE_DEFAULTS
        | {
            "adaptive": False,
            "covariance_type": "spherical",
            "max_lists": 2,
            "replication": 1.5,
            "rule": RESPONSIBILITY,
        },
        "kmeans-soft": _PLACE_DEFAULTS | {"adaptive": False, "max_lists": 2, "rule": "air"},
        "gmm-cells": _PLACE_DEFAULTS | {"covariance_type": "spherical", "visit": "edge"},
        "kmeans-cells": _PLACE_DEFAULTS | {"visit": "edge"},
    }
)

FIT_KEYS = frozenset(_FIT_OPTIONS)
SOFT_BUDGET = frozenset(_BUDGET_OPTIONS)
CELL_KEYS = frozenset(_CELL_OPTIONS)


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
        out of range, `tau` together with `replication`, or options of another rule.
    """
    name, colon, rest = text.strip().partition(":")
    if name not in OPTIONS:
        raise ValueError(f"unknown method {name!r}; known methods: {', '.join(OPTIONS)}")
    options = _options(text, name, rest.split(",") if colon else [])
    if "tau" in options and "replication" in options:
        raise ValueError(f"method {text!r}: give tau or replication, not both")
    try:
        defaults = {**DEFAULTS[name], **_defaults_of_rule(name, options)}
    except ValueError as error:
        raise ValueError(f"method {text!r}: {error}") from None
    kept = {key: value for key, value in options.items() if defaults.get(key) != value}
    return MethodSpec(name, tuple(sorted(kept.items())))


def _options(text: str, name: str, parts: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in parts:
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
    return options


def rule_of(spec: MethodSpec) -> Rule | str:
    """The rule of a soft method, as `IndexIVFGMM` takes it: with its options, or RESPONSIBILITY."""
    return _rule(spec.name, dict(spec.options))


def _rule(name: str, options: Mapping[str, Any]) -> Rule | str:
    rule = options.get("rule", DEFAULTS[name].get("rule", RESPONSIBILITY))
    if rule == RESPONSIBILITY:
        known: tuple[str, ...] = tuple(_BUDGET_OPTIONS)
    else:
        known = tuple(key.rstrip("_") for key in option_names(rule))
    given = {key: options[key] for key in (_GEOMETRY_OPTIONS | _BUDGET_OPTIONS) if key in options}
    for key in given:
        if key not in known:
            raise ValueError(
                f"rule {rule} has no option {key}; those it has are {', '.join(known) or 'none'}"
            )
    if rule == RESPONSIBILITY:
        return RESPONSIBILITY
    # "lambda" is a word of Python, so the field has another name.
    return RULES[rule](**{"lambda_" if key == "lambda" else key: given[key] for key in given})


def _defaults_of_rule(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the options of the rule, after a check of those given."""
    rule = _rule(name, options)
    if isinstance(rule, str):
        return {}
    default = type(rule)()
    return {key.rstrip("_"): getattr(default, key) for key in vars(default)}


def factory_string(spec: MethodSpec, nlist: int, d: int) -> str:
    """What `faiss.index_factory` is given for the index of a method, re-ranking left out."""
    coarse, rotation = spec.get("coarse", "flat"), spec.get("rotation", "none")
    prefix = {"none": "", "RR": f"RR{d},"}.get(rotation, f"{rotation},")
    graph = "" if coarse == "flat" else "_" + coarse.upper()
    return f"{prefix}IVF{nlist}{graph},{spec.get('codec', 'Flat')}"


def label(method: str) -> str:
    """Name of a method for a figure, from its canonical spelling."""
    spec = parse_method(method)
    names = {
        "kmeans": "k-means",
        "gmm": "GMM, hard",
        "gmm-soft": "GMM, soft",
        "kmeans-soft": "k-means, soft",
        "gmm-cells": "GMM, cells",
        "kmeans-cells": "k-means, cells",
    }
    options, defaults = dict(spec.options), DEFAULTS[spec.name]
    if options.get("rule", defaults.get("rule", RESPONSIBILITY)) != RESPONSIBILITY:
        options = {"rule": defaults["rule"]} | options
    elif "replication" in defaults and "tau" not in options:
        options = {"replication": defaults["replication"]} | options
    text = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{names[spec.name]} ({text})" if text else names[spec.name]
