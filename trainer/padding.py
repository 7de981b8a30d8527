"""What is longer in memory than in the model: zeros that make an axis divisible (see `model.sharding.Parallel`).

Checkpoints hold arrays as they were in memory; any mesh reads them, since zeros may be added or left out at an axis's end.
"""
from __future__ import annotations

# The one axis of each parameter that may be padded.
VOCABULARY_AXES = {"embed_tokens.weight": 0, "lm_head.weight": 1}
HEAD_AXES = {
    **{f"layers.self_attn.{letter}_proj.weight": 2 for letter in "qkv"}, "layers.self_attn.o_proj.weight": 1,
    **{f"layers.self_attn.{letter}_proj.bias": 1 for letter in "qkv"},
}  # fmt: skip
PADDED_AXES = {**VOCABULARY_AXES, **HEAD_AXES}
# Padding is less than this; a greater difference is another vocabulary, or another model.
MOST = 1024


def fits(name: str, found: tuple[int, ...], wanted: tuple[int, ...], own: tuple[int, ...] | None = None) -> bool:
    """Whether the shapes are equal but for padding.

    name: a parameter's, or its path in an optimizer's state. own: the shape without padding, where it is known: neither of
    the other two is then shorter.
    """
    axis = next((axis for padded, axis in PADDED_AXES.items() if name.endswith(padded)), None)
    if axis is None or len(found) != len(wanted):
        return found == wanted
    least = own[axis] if own else 0
    same = (*found[:axis], wanted[axis], *found[axis + 1:]) == wanted
    return same and least <= min(found[axis], wanted[axis]) and abs(found[axis] - wanted[axis]) < MOST
