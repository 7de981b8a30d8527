"""The rotary embedding's rule and numbers, from and to Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .number_checks import as_float, require_bool, require_number

# The numbers each RoPE rule needs, and optional ones with defaults, by Hugging Face's names.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, dict[str, Any]] = {
    "dynamic": {"original_max_position_embeddings": None},
    "yarn": {
        "attention_factor": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
    },
    "longrope": {"attention_factor": None},
}
# Names of a scaling that every rule reads; `type` is the older one of rope_type.
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_OLD_RULES = {"su": "longrope"}  # of Phi-3's first configs
PER_CHANNEL = ("short_factor", "long_factor")
ROPE_RULES = tuple(_REQUIRED)


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding. Numbers a rule does not use are None, so that equal embeddings compare
    equal.

    For the rule `dynamic`, `original_max_position_embeddings` is the model's
    `max_position_embeddings`; TransformerConfig fills it in, as transformers knows no other.
    `short_factor` and `long_factor` have a number per pair of channels. Raises ValueError for an
    unsupported rule and for numbers that make no rotation.
    """

    rule: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rule not in ROPE_RULES:
            raise ValueError(
                f"rope_type: {self.rule!r} is unknown; supported are {', '.join(ROPE_RULES)}"
            )
        # Yarn takes a logarithm to this base.
        require_number("rope_theta", self.theta, above=1 if self.rule == "yarn" else 0)
        required, optional = _REQUIRED[self.rule], _OPTIONAL.get(self.rule, {})
        for name in (f.name for f in dataclasses.fields(self) if f.name not in ("rule", "theta")):
            value = getattr(self, name) if name in (*required, *optional) else None
            value = optional.get(name) if value is None else value
            object.__setattr__(self, name, value)
            if name in required and value is None:
                raise ValueError(
                    f"rope_scaling: {name} is missing; rope_type {self.rule!r} needs "
                    f"{', '.join(required)}"
                )
            if value is None:
                continue
            if name == "truncate":
                require_bool("rope_scaling.truncate", value)
            elif name in PER_CHANNEL:
                for number in value:
                    require_number(f"rope_scaling.{name}", number, above=0)
            else:
                require_number(
                    f"rope_scaling.{name}", value, above=0, or_equal=name.startswith("mscale")
                )
        for high, low in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
            if getattr(self, high) is not None and getattr(self, high) <= getattr(self, low):
                raise ValueError(
                    f"rope_scaling.{high}: {getattr(self, high)} must be greater than {low}, which "
                    f"is {getattr(self, low)}"
                )

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the whole row, beyond
        `original_max_position_embeddings`."""
        return self.rule in ("dynamic", "longrope")

    @classmethod
    def from_hf(cls, config: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Returns the rotary embedding of a config.json; raises ValueError if its two spellings
        contradict each other."""
        spellings = {}
        for key in ("rope_parameters", "rope_scaling"):
            value = config.get(key)
            if value is None or value == {}:
                continue
            if not isinstance(value, dict):
                raise ValueError(f"{key}: found {value!r}; needs an object or null")
            if any(isinstance(inner, dict) for inner in value.values()):
                raise ValueError(
                    f"{key}: a different embedding per layer type is not supported; needs one for "
                    "all layers"
                )
            spellings[key] = _from_parameters(key, value, config, max_position_embeddings)
        if len(set(spellings.values())) > 1:
            # `rope_parameters` with rule default next to a scaling `rope_scaling` is also a
            # contradiction: one is wrong, and fine-tuning under the wrong one would silently spoil
            # the model.
            said = [
                dataclasses.asdict(spellings[key]) for key in ("rope_parameters", "rope_scaling")
            ]
            differing = [
                f"{name} {said[0][name]!r:.80} and {said[1][name]!r:.80}"
                for name in said[0]
                if said[0][name] != said[1][name]
            ]
            # transformers does not take one spelling's base for the other either.
            lacking = [key for key in spellings if _theta(config[key], config) is None]
            default = f" ({lacking[0]} has no rope_theta, so it has the default)" if lacking else ""
            raise ValueError(
                "rope_parameters and rope_scaling contradict each other: "
                f"{', '.join(differing)}{default}; remove the wrong one"
            )
        if spellings:
            return next(iter(spellings.values()))
        theta = config.get("rope_theta")
        return cls(theta=10000.0 if theta is None else as_float("rope_theta", theta))

    def to_hf(self) -> dict[str, Any]:
        """Returns the rotary embedding as Hugging Face's `rope_parameters`."""
        numbers = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("rule", "theta")
        }
        if self.rule == "dynamic":  # transformers knows it as max_position_embeddings
            numbers.pop("original_max_position_embeddings")
        return {
            "rope_type": self.rule,
            **{
                name: list(value) if name in PER_CHANNEL else value
                for name, value in numbers.items()
                if value is not None
            },
            "rope_theta": self.theta,
        }


def require_scaling(name: str, scaling: Any) -> None:
    """Raises ValueError unless each entry of a `rope_scaling` that a recipe gives is read.

    A model's own config.json may have more: transformers ignores entries that it does not know, and
    the model was trained so.
    """
    if not isinstance(scaling, dict):
        return
    scaling = {key: value for key, value in scaling.items() if value is not None}
    rule = scaling.get("rope_type", scaling.get("type"))
    if rule is not None and scaling.get("type", rule) != rule:
        raise ValueError(
            f"{name}.type: found {scaling['type']!r} with rope_type {rule!r}; leave type out"
        )
    rule = _OLD_RULES.get(rule, rule) if isinstance(rule, str) else rule
    if rule is not None and rule not in ROPE_RULES:
        raise ValueError(
            f"{name}.rope_type: found {rule!r}{_meant(str(rule), ROPE_RULES)}, needs one of "
            f"{', '.join(ROPE_RULES)}"
        )
    numbers = {rule: (*_REQUIRED[rule], *_OPTIONAL.get(rule, ())) for rule in ROPE_RULES}
    if rule == "dynamic" and "original_max_position_embeddings" in scaling:
        raise ValueError(
            f"{name}: found original_max_position_embeddings with rope_type dynamic, which grows "
            "from the model's max_position_embeddings; leave it out"
        )
    read = numbers[rule] if rule else [number for names in numbers.values() for number in names]
    for key in scaling:
        if key not in (*_COMMON, *read):
            by = f"rope_type {rule}" if rule else "it"
            raise ValueError(
                f"{name}: unknown field {key}{_meant(str(key), (*_COMMON, *read))}; {by} reads "
                f"{', '.join(dict.fromkeys(('rope_type', *read, 'rope_theta')))}"
            )
    if rule is None and set(scaling) - {"rope_theta", "partial_rotary_factor"}:
        raise ValueError(
            f"{name}.rope_type: missing with {', '.join(scaling)}; needs one of "
            f"{', '.join(ROPE_RULES)}"
        )


def _meant(name: str, valid: Iterable[str]) -> str:
    """Returns ' (did you mean NAME?)' for a misspelt name."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _theta(parameters: dict[str, Any], config: dict[str, Any]) -> Any:
    """Returns the base in the object `parameters` of config.json, or beside it; None if missing."""
    inner = parameters.get("rope_theta")
    return config.get("rope_theta") if inner is None else inner


def _from_parameters(
    key: str, parameters: dict[str, Any], config: dict[str, Any], max_position: int
) -> RopeConfig:
    """Returns the rotary embedding from the object `parameters`, the value of `key` in
    config.json."""
    inner_theta, outer_theta = parameters.get("rope_theta"), config.get("rope_theta")
    if (
        inner_theta is not None
        and outer_theta is not None
        and (as_float(f"{key}.rope_theta", inner_theta) != as_float("rope_theta", outer_theta))
    ):
        raise ValueError(
            f"rope_theta: {outer_theta} and {key}.rope_theta {inner_theta}; remove the wrong one"
        )
    theta = _theta(parameters, config)
    theta = 10000.0 if theta is None else theta
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"{key}.partial_rotary_factor: found {parameters['partial_rotary_factor']!r}; only 1 "
            "is supported"
        )
    # `type` is the older name of the key.
    rule = parameters.get("rope_type", parameters.get("type", "default"))
    if rule not in ROPE_RULES:
        raise ValueError(
            f"{key}.rope_type: {rule!r} is unknown; supported are {', '.join(ROPE_RULES)}"
        )
    numbers: dict[str, Any] = {
        name: parameters[name]
        for name in (*_REQUIRED[rule], *_OPTIONAL.get(rule, ()))
        if parameters.get(name) is not None
    }
    if rule == "yarn" and parameters.get("truncate", True) is None:
        numbers["truncate"] = False  # as transformers reads null
    original = "original_max_position_embeddings"
    # Like transformers, prefers the outer one and falls back to the model's length.
    if original in _REQUIRED[rule]:
        numbers[original] = config.get(original) or numbers.get(original, max_position)
    if rule == "dynamic":
        numbers[original] = max_position
    if rule in ("yarn", "longrope") and "factor" not in numbers:
        numbers["factor"] = max_position / as_float(f"{key}.{original}", numbers[original])
    for name in _REQUIRED[rule]:
        if name not in numbers:
            raise ValueError(f"{key}.{name}: missing; rope_type {rule!r} needs it")
    for name, value in numbers.items():
        if name in PER_CHANNEL:
            if not isinstance(value, list):
                raise ValueError(
                    f"{key}.{name}: found {value!r}; needs a list with a number for each pair of "
                    "channels"
                )
            numbers[name] = tuple(as_float(f"{key}.{name}", number) for number in value)
        elif name not in (original, "truncate"):
            numbers[name] = as_float(f"{key}.{name}", value, or_equal=name.startswith("mscale"))
    return RopeConfig(rule=rule, theta=as_float("rope_theta", theta), **numbers)
