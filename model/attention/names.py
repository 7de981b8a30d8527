"""The names of mesh axes, layouts and schedules, which recipes and commands accept; kernels' are in `choice`. Read without
JAX."""

MESH_AXES = ("data", "fsdp", "tensor", "sequence")
LAYOUTS = ("contiguous", "striped", "zigzag")
SCHEDULES = (
    "local",
    "ring",
    "all_gather",
    "balanced",
    "ulysses",
    "attention2d",
    "ring_self_attention",
)
