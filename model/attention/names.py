"""The names of layouts and schedules, which recipes and commands accept; kernels' are in `choice`. Read without JAX."""

LAYOUTS = ("contiguous", "striped", "zigzag")
SCHEDULES = ("local", "ring", "all_gather", "balanced", "ulysses", "attention2d", "ring_self_attention")
