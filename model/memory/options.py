"""The memory options, declared once: the section `memory` of recipes, an attribute of models and
plans."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..attention.names import Tokens
from .policies import POLICIES, PREFETCH_POLICIES, QUERY_CHUNK_POLICIES, RematPolicy

if TYPE_CHECKING:
    RematName = str
else:
    RematName = Literal[tuple(POLICIES)]  # what the command line accepts and lists


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """What is kept for the backward pass, and in which pieces the rest is computed; chunks count a
    device's tokens."""

    remat: RematName = "save_attention"
    """Kept between forward and backward. nothing: only layer inputs; save_attention: also
    attention's output and lse; offload: inputs, in host memory; offload_save_attention: also
    attention's output and lse, on the device; offload_attention: both in host memory; every_k: only
    every k-th layer's input; offload_every_k: the same in host memory; everything: also the result
    of every matrix product."""
    every_k: int = 2
    """Layers per input kept by remat every_k and offload_every_k; a divisor of the number of
    layers, or any number if some layers of a mixture have no experts."""
    moments_on_host: bool = False
    """Whether the optimizer's moments are kept in host memory and streamed per layer."""
    parameters_on_host: bool = False
    """Whether the parameters are kept in host memory and streamed per layer."""
    attention_groups: int = 1
    """Groups of heads that are projected and attend one after another, so that queries, keys and
    values exist for one group at a time; a divisor of a device's key/value heads. Not with remat
    everything, since each group is projected again."""
    query_chunks: int = 1
    """Chunks of a device's tokens that pass through a layer one after another, so that queries and
    attention's output exist for one chunk at a time; keys and values travel once per chunk. A
    divisor of a device's tokens; not with a remat that keeps attention's output."""
    prefetch: bool = False
    """Whether the next layer's weights arrive, and the last one's gradients leave, with the ring's
    keys and values while a layer runs; needs schedule ring and a remat other than every_k,
    offload_every_k and everything. Holds two layers' weights at a time."""
    feed_forward_chunk: Tokens = 2048
    """Tokens per chunk of output projection and feed-forward; 0, remat everything and
    mesh.sequence_parallel compute all at once."""
    projection_chunk: Tokens = 2048
    """Tokens per chunk of the query, key and value projections; 0, remat everything and
    mesh.sequence_parallel compute all at once."""
    loss_chunk: Tokens = 1024
    """Tokens whose logits exist at a time; 0 computes all at once."""

    def __post_init__(self) -> None:
        if self.remat not in POLICIES:
            raise ValueError(
                f"memory.remat: found {self.remat!r}, needs one of {', '.join(POLICIES)}"
            )
        for names, least in (
            (("every_k", "attention_groups", "query_chunks"), 1),
            (("feed_forward_chunk", "projection_chunk", "loss_chunk"), 0),
        ):
            for name in names:
                if getattr(self, name) < least:
                    raise ValueError(
                        f"memory.{name}: found {getattr(self, name)}, needs at least {least}"
                    )

    @property
    def policy(self) -> RematPolicy:
        """The facts of the remat policy."""
        return POLICIES[self.remat]


def check_combination(
    memory: MemoryConfig,
    *,
    stacks: Sequence[tuple[int, int]],
    key_heads: int,
    sequence: int,
    sequence_parallel: bool,
    schedule: Any,
) -> None:
    """Refuses memory options that do not fit each other, the model, the mesh or the schedule.

    Args:
      stacks: of the model's layers: how many there are, and after how many their kinds repeat.
      key_heads: key/value heads of a device.
      sequence: devices along the sequence axis.
      schedule: as in `model.attention.schedules.get_schedule`.

    Raises:
      ValueError: one line that names the option, what was found and what would work.
    """
    # Imported here, so that reading a recipe does not import JAX.
    from model.attention.schedules import get_schedule

    resolved = get_schedule(schedule, sequence)
    if memory.policy.every_k:
        _check_every_k(memory.every_k, stacks)
    _check_divides(
        "attention_groups",
        memory.attention_groups,
        key_heads,
        f"the {key_heads} key/value heads of a device",
    )
    if memory.policy.products and memory.attention_groups > 1:
        raise ValueError(
            f"memory.remat: found {memory.remat!r}; with memory.attention_groups = "
            f"{memory.attention_groups} each group is projected again in the backward pass; "
            "save_attention, or 1 group, would work"
        )
    if memory.query_chunks > 1:
        _check_query_chunks(memory, sequence_parallel, resolved)
    if memory.prefetch:
        _check_prefetch(memory, sequence, sequence_parallel, resolved)


def _check_every_k(every_k: int, stacks: Sequence[tuple[int, int]]) -> None:
    """ValueError for groups of layers that do not fit the model. With several stacks, the last
    group of each may be smaller: mostly only 1 divides all of them."""
    layers, period, divides = stacks[0][0], math.lcm(*(period for _, period in stacks)), ""
    if len(stacks) == 1:
        _check_divides("every_k", every_k, layers, f"{layers} layers")
        divides = f" that divides {layers}"
    if every_k % period:
        raise ValueError(
            f"memory.every_k: found {every_k}; the model's layers repeat in a period of {period}, "
            f"so it needs a multiple of {period}{divides}"
        )


def _check_prefetch(
    memory: MemoryConfig, sequence: int, sequence_parallel: bool, schedule: Any
) -> None:
    """ValueError for options that exclude prefetching."""
    for works, found, needed in (
        (sequence > 1, f"mesh.sequence {sequence}", "2 or more"),
        (schedule.can_gather_along, f"attention.schedule {schedule.name}", "ring"),
        (
            memory.remat in PREFETCH_POLICIES,
            f"memory.remat {memory.remat}",
            " or ".join(PREFETCH_POLICIES),
        ),
        (memory.attention_groups == 1, f"memory.attention_groups {memory.attention_groups}", "1"),
        (memory.query_chunks == 1, f"memory.query_chunks {memory.query_chunks}", "1"),
        (not memory.parameters_on_host, "memory.parameters_on_host", "false"),
        (not sequence_parallel, "mesh.sequence_parallel", "false"),
    ):
        if not works:
            raise ValueError(f"memory.prefetch: found {found}, needs {needed}")


def _check_query_chunks(memory: MemoryConfig, sequence_parallel: bool, schedule: Any) -> None:
    """ValueError for options that exclude several chunks of queries."""
    from model.attention.schedules import SCHEDULES, Balanced

    chunks = memory.query_chunks
    if memory.remat not in QUERY_CHUNK_POLICIES:
        raise ValueError(
            f"memory.remat: found {memory.remat!r}; with memory.query_chunks = {chunks} "
            f"attention's output cannot be kept; valid: {', '.join(QUERY_CHUNK_POLICIES)}"
        )
    if sequence_parallel:
        raise ValueError(
            f"memory.query_chunks: found {chunks}; with mesh.sequence_parallel only 1 is possible"
        )
    while schedule is not None:
        if isinstance(schedule, Balanced) and schedule.ordered:
            others = ", ".join(name for name in SCHEDULES if name not in ("balanced", "local"))
            raise ValueError(
                f"memory.query_chunks: found {chunks}; over a contiguous layout balanced trades "
                f"queries for equally many keys; over other layouts it works, as do {others} over "
                "any"
            )
        schedule = getattr(schedule, "inner", None)


def _check_divides(option: str, value: int, total: int, counted: str) -> None:
    """ValueError that lists the divisors, unless the option's value is one."""
    if total % value:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        raise ValueError(
            f"memory.{option}: {value} does not divide {counted}; "
            f"{', '.join(map(str, divisors))} do"
        )
