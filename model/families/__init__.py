"""The supported families of models, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .ernie4_5 import ERNIE4_5
from .ernie4_5_moe import ERNIE4_5_MOE
from .exaone4 import EXAONE4
from .family import Family
from .gemma2 import GEMMA2
from .gemma3 import GEMMA3
from .glm4 import GLM4
from .glm4_moe import GLM4_MOE
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .granitemoe import GRANITEMOE
from .llama import LLAMA
from .ministral3 import MINISTRAL3
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .olmo2 import OLMO2
from .olmo3 import OLMO3
from .olmoe import OLMOE
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .solar_open import SOLAR_OPEN
from .text_part import VISION_LANGUAGE_MODELS, text_fields

__all__ = ["FAMILIES", "Family", "causal_fields", "family_of", "find_preset"]
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        MINISTRAL3,
        GRANITE,
        OLMO2,
        OLMO3,
        EXAONE4,
        GLM4,
        ERNIE4_5,
        SEED_OSS,
        PHI3,
        SMOLLM3,
        GEMMA2,
        GEMMA3,
        QWEN3_MOE,
        MIXTRAL,
        OLMOE,
        GRANITEMOE,
        GPT_OSS,
        QWEN2_MOE,
        SOLAR_OPEN,
        GLM4_MOE,
        ERNIE4_5_MOE,
    )
}


def causal_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text model in a model's config.json; see `text_fields`."""
    return text_fields(config, {name: family.architecture for name, family in FAMILIES.items()})


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family that a config.json names, by `architectures` or else by `model_type`.

    Raises:
      ValueError: an unsupported family; the message names the supported ones.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"architectures: found {architectures!r}; needs a list")
    # The first conversions of LLaMA 1 spell it differently.
    architectures = [
        "LlamaForCausalLM" if name == "LLaMAForCausalLM" else name for name in architectures
    ]
    known = ", ".join(family.architecture for family in FAMILIES.values())
    named = [family for family in FAMILIES.values() if family.architecture in architectures]
    if architectures and not named:
        names = ", ".join(map(str, architectures))
        raise ValueError(f"architectures: found {names}; {_why(names)}supported are {known}")
    model_type = config.get("model_type", named[0].model_type if named else None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or (named and family not in named):
        needed = (
            f"{named[0].model_type!r} ({named[0].architecture})"
            if named
            else f"one of {', '.join(FAMILIES)} ({known})"
        )
        raise ValueError(f"model_type: found {model_type!r}; {_why(str(model_type))}needs {needed}")
    return family


def _why(name: str) -> str:
    """The reason why a model of this name is unsupported; "" if unknown."""
    if any(part in name.lower() for part in ("moe", "deepseek")):
        return "only the mixtures of experts named here are supported; "
    if any(
        part in name.lower() for part in ("conditionalgeneration", "vl", "vision", "audio", "omni")
    ):
        return (
            "of models of images or sound, only the text part of "
            f"{', '.join(VISION_LANGUAGE_MODELS)} is read; "
        )
    return ""


def find_preset(name: str) -> tuple[Family, Mapping[str, Any]]:
    """Returns the family and the fields of a preset.

    Raises:
      ValueError: no preset of this name; lists the names.
    """
    for family in FAMILIES.values():
        if name in family.presets:
            return family, family.presets[name]
    names = ", ".join(preset for family in FAMILIES.values() for preset in family.presets)
    raise ValueError(f"unknown model preset {name!r}; presets are {names}")
