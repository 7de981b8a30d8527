"""The options of attention, declared once: recipes read them as their section `attention`."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from .choice import BACKWARDS, KERNELS, LIMITS, Request, require, require_order
from .names import LAYOUTS, SCHEDULES, Tokens

if TYPE_CHECKING:
    BackwardName = str
    KernelName = str
    LayoutName = str
else:  # what the command line accepts and lists
    BackwardName = Literal[BACKWARDS]
    KernelName, LayoutName = Literal[KERNELS], Literal[LAYOUTS]


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What attention sees (window, global_tokens), and how it is distributed and computed, which
    changes results only by rounding."""

    layout: LayoutName = "striped"
    """Which tokens each sequence shard holds; striped and zigzag balance causal work."""
    schedule: str | dict[str, Any] = "ring"
    """How ranks exchange queries and keys: local, ring, all_gather, balanced, ulysses, attention2d
    or ring_self_attention; with options, a mapping such as {name: ring, bidirectional: true},
    {name: ulysses, degree: 2, inner: ring}, {name: balanced,
    split: true} or {name: attention2d, columns: 4, overlap: true}."""
    kernel: KernelName = "auto"
    """The block kernel; auto takes tpu on TPUs, mosaic on Hopper GPUs in bfloat16, gpu on NVIDIA
    GPUs otherwise, and xla elsewhere. cudnn, on NVIDIA GPUs in bfloat16, uses cuDNN for full and
    causal blocks and auto for others; it has not run on a GPU yet. The schedule ring_self_attention
    uses no kernel and no tiles."""
    backward: BackwardName = "repeatable"
    """Whether the backward pass gives the same bits each time, as a run that resumes bitwise needs.
    any_order: the kernel mosaic, with heads of 128 at most, makes five products a tile instead of
    seven, and adds dq in float32 in whatever order tiles end, so that runs differ by rounding; it
    has not run on a GPU yet."""
    query_tile: Tokens = 0
    """Queries in a tile; 0 leaves it to the kernel."""
    key_tile: Tokens = 0
    """Keys in a tile; 0 leaves it to the kernel."""
    window: Tokens | None = None
    """Sliding window: how many tokens of its document, counting back from itself, a query sees;
    null: the model's window, or all earlier tokens if it has none."""
    global_tokens: Tokens = 0
    """First tokens of each document that every later one sees beyond the window, which must be
    given here or by the model. On accelerators they use the kernel xla."""

    def __post_init__(self) -> None:
        for name in ("query_tile", "key_tile", "global_tokens"):
            _need(getattr(self, name) >= 0, name, getattr(self, name), "at least 0 is needed")
        _need(
            self.window is None or self.window >= 1,
            "window",
            self.window,
            "at least 1 is needed, or null for none",
        )
        own_tiles = LIMITS[self.kernel].own_tiles if self.kernel in LIMITS else ""
        _need(
            not own_tiles or not (self.query_tile or self.key_tile),
            "kernel",
            self.kernel,
            f"{own_tiles}; leave attention.query_tile and attention.key_tile 0",
        )
        _need(self.kernel in KERNELS, "kernel", self.kernel, f"valid: {', '.join(KERNELS)}")
        _need(
            self.backward in BACKWARDS, "backward", self.backward, f"valid: {', '.join(BACKWARDS)}"
        )
        require_order(self.kernel, self.backward, "attention.backward")
        require(self.kernel, Request(global_tokens=self.global_tokens), "attention.kernel")
        _need(
            self.schedule_name in SCHEDULES,
            "schedule",
            self.schedule,
            f"valid: {', '.join(SCHEDULES)}, or a mapping whose `name` is one of them",
        )

    @property
    def schedule_name(self) -> Any:
        """The name of the schedule, given alone or in a mapping."""
        return self.schedule.get("name") if isinstance(self.schedule, dict) else self.schedule


def _need(fits: bool, option: str, value: Any, needed: str) -> None:
    """ValueError naming the option, its value and what is needed, unless it fits."""
    if not fits:
        raise ValueError(f"attention.{option} is {value!r}; {needed}")
