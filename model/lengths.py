"""The context length that a model's positions support, and how to extend it."""

from __future__ import annotations

import math
from typing import Any

from .config import TransformerConfig
from .families import FAMILIES


def supported_length(config: TransformerConfig) -> int | None:
    """Returns the number of tokens that the positions support: the length in training, or the one
    to which the model's RoPE scaling extends it.

    None for the rule `dynamic`, which extends it to the length of any row. Under the rule `llama3`
    it is max_position_embeddings alone: Llama 3.2 1B's factor would say 262,144, twice its length.
    """
    if config.rope.rule == "dynamic":
        return None
    own = FAMILIES[config.family].trained_lengths.get(
        config.max_position_embeddings, config.max_position_embeddings
    )
    if config.rope.rule == "llama3":
        return own
    return max(
        own, int((config.rope.original_max_position_embeddings or 0) * (config.rope.factor or 1))
    )


def extended_positions(config: TransformerConfig, length: int) -> dict[str, Any]:
    """Returns the POSITIONS that extend a model to `length` tokens, as a recipe's
    model.overrides take them.

    Unscaled positions are extended by YaRN with a whole factor. A family whose files cannot name
    YaRN gets a larger RoPE base instead (NTK-aware: base * factor^(d / (d - 2)), which slows the
    slowest pair of the d rotated channels by the factor). Where positions are already scaled, the
    factor of their rule grows. RoPE stays as it is where only layers with a window have it
    (EXAONE 4): no query is further from its keys in longer rows. Empty if the model already
    supports the length, and for `longrope`, whose factors fit one length.
    """
    trained = supported_length(config)
    if trained is None or length <= trained or config.rope.rule == "longrope":
        return {}
    if all(kind.rope is None or kind.window for kind in config.layer_kinds):
        return {"max_position_embeddings": length}
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
