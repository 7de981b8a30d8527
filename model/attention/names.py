"""The names of layouts, schedules and kernels, which recipes and commands accept. Read without JAX."""

LAYOUTS = ("contiguous", "striped", "zigzag")
SCHEDULES = ("local", "ring", "all_gather", "balanced", "ulysses", "attention2d", "ring_self_attention")
KERNELS = ("auto", "tpu", "gpu", "mosaic", "xla", "reference")
ACCELERATOR_KERNELS = ("tpu", "gpu", "mosaic")  # which do not serve global tokens
# Kernels whose tiles no option sets, and why.
UNTILED_KERNELS = {"mosaic": "its tiles follow from the head size", "reference": "it has no tiles"}
