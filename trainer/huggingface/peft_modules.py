"""Which modules an adapter_config.json adapts, and with which rank and scale, by PEFT's rules."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import regex

from model.adapter import ALL_LINEAR, ATTENTION, PROJECTIONS
from model.families import FAMILIES
from model.number_checks import is_int, require_int, require_number

# Tensors that hold several projections -> the projections, over all families.
FUSED = {
    module: names
    for family in FAMILIES.values()
    for module, names in family.fused_projections.items()
}
# What the names of a text model's modules begin with: alone, and within vision-language models of
# transformers 5 and 4.
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_LAYER = regex.compile(r".*?\blayers\.(\d+)\.")
_MATCH_SECONDS = 1.0  # for an untrusted regular expression; a good one takes microseconds per name
_MATCHED_LAYERS = 512  # more than any model has; the tensors show which layers have an adapter


class AdaptedModules:
    """The modules with an adapter, of any model."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        """Reads the fields of an adapter_config.json whose `r` and `lora_alpha` are checked.

        Raises:
          ValueError: names a field of another type.
        """
        found = content.get("target_modules")
        names = names_in(content, "target_modules")
        self.is_pattern = isinstance(found, str) and found not in (ALL_LINEAR, *PROJECTIONS, *FUSED)
        self._has_all = names == [ALL_LINEAR]
        self._targets = _Pattern("target_modules", str(found)) if self.is_pattern else names
        excluded = content.get("exclude_modules")
        self._excluded = (
            _Pattern("exclude_modules", excluded)
            if isinstance(excluded, str) and excluded
            else names_in(content, "exclude_modules")
        )
        self._parameters = names_in(content, "target_parameters")
        self._layers = _layers(content)
        self._rank, self._alpha = content["r"], content["lora_alpha"]
        self._takes_root = content.get("use_rslora") is True
        self._ranks, self._alphas = (
            _by_pattern(content, field) for field in ("rank_pattern", "alpha_pattern")
        )

    def has(self, module: str) -> bool:
        """Whether the module of this full name, or its tensor, has an adapter."""
        if _match(self._parameters, module) or _match(self._parameters, f"{module}.weight"):
            return True
        layer = _LAYER.match(module)
        if self._layers is not None and layer and int(layer[1]) not in self._layers:
            return False
        if _match(self._excluded, module):
            return False
        return self._has_all or _match(self._targets, module)

    def among(self, names: set[str]) -> set[str]:
        """Returns those last parts of names of which some module has an adapter."""
        return {name for name in names if any(map(self.has, _paths(name)))}

    def not_excluded(self, names: set[str]) -> set[str]:
        """Returns those last parts of names of which `exclude_modules` leaves some module."""
        return {
            name for name in names if not all(_match(self._excluded, path) for path in _paths(name))
        }

    def rank(self, module: str) -> int:
        """The rank of a module's adapter."""
        return next((rank for name, rank in self._ranks if _match(name, module)), self._rank)

    def alpha(self, module: str) -> float:
        """The alpha of a module's adapter."""
        return next((alpha for name, alpha in self._alphas if _match(name, module)), self._alpha)

    def scale(self, module: str) -> float:
        """The factor of the products of a module's adapter."""
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self._takes_root else rank)


class _Pattern:
    """A regular expression from a file; the time of all its matches is limited."""

    def __init__(self, field: str, text: str, before: str = "") -> None:
        """`before`: what may precede a match in a name."""
        self._field, self._text, self._left = field, text, _MATCH_SECONDS
        try:
            self._compiled = regex.compile(f"{before}(?:{text})")
        except (regex.error, RecursionError, OverflowError) as error:
            raise self._error(f"is not a regular expression ({error})") from None

    def matches(self, name: str) -> bool:
        """Whether it matches the whole name.

        Raises:
          ValueError: it takes too long.
        """
        start = time.monotonic()
        try:
            return bool(self._compiled.fullmatch(name, timeout=max(1e-3, self._left)))
        except TimeoutError:
            raise self._error("takes too long to match") from None
        except RecursionError as error:
            raise self._error(f"is not a regular expression ({error})") from None
        finally:
            self._left -= time.monotonic() - start

    def _error(self, problem: str) -> ValueError:
        return ValueError(
            f"{self._field}: found {self._text!r:.80}, which {problem}; a list of modules would "
            "work"
        )


def _match(names: _Pattern | list[str], module: str) -> bool:
    """Whether a module's full name matches a pattern, or ends with one of these names."""
    if isinstance(names, _Pattern):
        return names.matches(module)
    return any(f".{module}".endswith(f".{name}") for name in names)


def _paths(name: str) -> list[str]:
    """The full names that modules of this last part may have."""
    if name == "lm_head":
        return ["lm_head", "language_model.lm_head"]
    if name == "embed_tokens":
        return [f"{prefix}{name}" for prefix in PREFIXES]
    in_attention = {*FUSED.get(name, (name,))} <= {*ATTENTION}
    return [
        f"{prefix}layers.{i}.{'self_attn' if in_attention else 'mlp'}.{name}"
        for prefix in PREFIXES
        for i in range(_MATCHED_LAYERS)
    ]


def names_in(content: Mapping[str, Any], field: str) -> list[str]:
    """Returns a field that names modules: a list, one name, or null."""
    value = content.get(field) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{field}: found {value!r:.80}; needs names of modules")
    return names


def _layers(content: Mapping[str, Any]) -> set[int] | None:
    """Returns the numbers in `layers_to_transform`; None if it limits nothing."""
    found = content.get("layers_to_transform")
    layers = [found] if is_int(found) else found or []
    if not isinstance(layers, list) or not all(is_int(layer) for layer in layers):
        raise ValueError(f"layers_to_transform: found {found!r:.80}; needs numbers of layers")
    pattern = content.get("layers_pattern")
    if layers and pattern and pattern not in ("layers", ["layers"]):
        raise ValueError(
            f"layers_pattern: found {pattern!r:.80} with layers_to_transform; only 'layers' is read"
        )
    return {*layers} or None


def _by_pattern(content: Mapping[str, Any], field: str) -> list[tuple[_Pattern, Any]]:
    """Returns the numbers of `rank_pattern` or `alpha_pattern`, by what matches the end of a name;
    the first match counts."""
    given = content.get(field) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{field}: found {given!r:.80}; needs an object or null")
    for name, value in given.items():
        if field == "rank_pattern":
            require_int(f"{field}.{name}", value, at_least=1)
        else:
            require_number(f"{field}.{name}", value, above=0)
    return [(_Pattern(field, name, r"(?:.*\.)?"), value) for name, value in given.items()]
