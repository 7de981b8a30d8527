"""What is longer in memory than in the model: zeros that make an axis divisible (see `model.sharding`).

Checkpoints hold arrays as they were in memory; any mesh reads them, since zeros may be added or left out at an axis's end.
"""
from __future__ import annotations

# The axis of each parameter that may be padded: of the vocabulary, the heads, the hidden size.
VOCABULARY_AXES = {"embed_tokens.weight": 0, "lm_head.weight": 1}
HEAD_AXES = {
    **{f"layers.self_attn.{letter}_proj.weight": 2 for letter in "qkv"}, "layers.self_attn.o_proj.weight": 1,
    **{f"layers.self_attn.{letter}_proj.bias": 1 for letter in "qkv"},
}  # fmt: skip
HIDDEN_AXES = {
    **{f"layers.self_attn.{letter}_proj.weight": 1 for letter in "qkv"}, "layers.self_attn.o_proj.weight": 3,
    "layers.self_attn.o_proj.bias": 1, "layers.mlp.gate_proj.weight": 1, "layers.mlp.up_proj.weight": 1,
    "layers.mlp.down_proj.weight": 2, "layers.mlp.down_proj.bias": 1, "layers.input_layernorm.weight": 1,
    "layers.post_attention_layernorm.weight": 1, "norm.weight": 0, "embed_tokens.weight": 1, "lm_head.weight": 0,
}  # fmt: skip
# Padding is less than this; a greater difference is another vocabulary, or another model.
MOST = 1024


def padded_axes(name: str) -> list[int]:
    """The axes that may be padded of a parameter, or of its moment: name may be its path in an optimizer's state."""
    found = ([axis for padded, axis in table.items() if name.endswith(padded)]
             for table in (VOCABULARY_AXES, HEAD_AXES, HIDDEN_AXES))
    return [axes[0] for axes in found if axes]  # `norm.weight` ends the layers' norms too, which stand before it


def fits(name: str, found: tuple[int, ...], wanted: tuple[int, ...], own: tuple[int, ...] | None = None) -> bool:
    """Whether the shapes are equal but for padding.

    name: a parameter's, or its path in an optimizer's state. own: the shape without padding, where it is known: neither of
    the other two is then shorter.
    """
    axes = padded_axes(name)
    if not axes or len(found) != len(wanted):
        return found == wanted
    return all(one == other or (i in axes and abs(one - other) < MOST and (own[i] if own else 0) <= min(one, other))
               for i, (one, other) in enumerate(zip(found, wanted, strict=True)))
