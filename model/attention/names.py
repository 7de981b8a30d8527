"""Names of mesh axes, layouts and schedules that recipes and commands accept; kernels' are in
`choice`. Imports no JAX."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Tokens = int
else:

    class Tokens(int):
        """The type of fields that hold a number of tokens, which recipes and flags may write as 64K
        or 1M; the values themselves are plain numbers."""


MESH_AXES = ("data", "fsdp", "expert", "tensor", "sequence")
# The axes that a batch's rows are split over.
BATCH_AXES = ("data", "fsdp", "expert")
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
