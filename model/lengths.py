"""How many tokens a model's positions are made for, and how to stretch them."""

from __future__ import annotations

import math
from typing import Any

from .config import TransformerConfig
from .families import FAMILIES


def trained_length(config: TransformerConfig) -> int | None:
    """Returns the tokens that positions are made for: the length in training, or as far as its
    scaling stretches that.

    None for the rule `dynamic`, which stretches as far as a row is long.
    """
    if config.rope.rule == "dynamic":
        return None
    own = FAMILIES[config.family].trained_lengths.get(
        config.max_position_embeddings, config.max_position_embeddings
    )
    return max(
        own, int((config.rope.original_max_position_embeddings or 0) * (config.rope.factor or 1))
    )


def extended(config: TransformerConfig, length: int) -> dict[str, Any]:
    """Returns the POSITIONS that stretch a model to `length` tokens, as a recipe's
    model.overrides take them.

    Positions that are not scaled are stretched by YaRN, by a whole factor; in a family whose
    files cannot name YaRN by RoPE's base (NTK-aware: base * factor^(d / (d - 2)), so that the
    slowest pair of d numbers turns as much more slowly). Where they are scaled, the factor of
    their rule grows. Empty where the length is reached, and for `longrope`, whose factors fit
    one length.
    """
    trained = trained_length(config)
    if trained is None or length <= trained or config.rope.rule == "longrope":
        return {}
    scaling = {name: value for name, value in config.rope.to_hf().items() if name != "rope_theta"}
    times = float(-(-length // trained))
    if config.rope.rule == "default" and "yarn" not in FAMILIES[config.family].rules:
        turned = config.head_dim * config.partial_rotary_factor
        base = round(config.rope.theta * times ** (turned / (turned - 2)))
        return {"max_position_embeddings": length, "rope_theta": float(base)}
    if config.rope.rule == "default":
        scaling = {
            "rope_type": "yarn",
            "factor": times,
            "original_max_position_embeddings": trained,
        }
    else:
        factor = config.rope.factor or 1.0
        scaling["factor"] = factor * times
        # OLMo 3's files spell out the temperature that YaRN derives from the factor.
        if scaling.get("attention_factor") == 0.1 * math.log(factor) + 1:
            del scaling["attention_factor"]
    return {"max_position_embeddings": length, "rope_scaling": scaling}
