"""The sections `mesh` and `distributed` of a recipe: devices and processes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from model.attention.names import MESH_AXES

from .require import require, require_at_least

# The axes, from the one that loses least on a slow network to the one that loses most.
_SLOWEST_FIRST = ("data", "fsdp", "sequence", "expert", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each axis; their product is the number of all devices."""

    data: int = 1
    """Copies of the model, each with a share of the batch."""
    fsdp: int = 1
    """Shards of the batch and of the parameters."""
    expert: int = 1
    """Shards of a mixture's experts, and of the batch: every shard gathers the others' hidden
    states, and the sums are scattered back."""
    tensor: int = 1
    """Shards of the heads and of the feed-forward width."""
    sequence: int = 1
    """Shards of the sequence."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: between attention and feed-forward, tokens are also split
    over tensor."""
    dcn: dict[str, int] = dataclasses.field(default_factory=dict)
    """Factors of the axes that cross the slow network between TPU slices or GPU hosts, such as
    {data: 2}; their product is the number of slices or hosts. Not needed on one slice, or on GPUs
    whose outermost axes already cross hosts."""
    order: tuple[Literal["data", "fsdp", "expert", "tensor", "sequence"], ...] = ()
    """The axes, from the slowest links to the fastest; by default data, fsdp, expert, sequence,
    tensor: tensor parallelism blocks on its all-reduces, so keep it on the fastest links; ring
    transfers overlap with compute."""
    simulate: int = 0
    """Simulate this many devices on the CPU; 0 uses the real devices."""

    def __post_init__(self) -> None:
        require_at_least(self, "mesh", 1, *MESH_AXES)
        require_at_least(self, "mesh", 0, "simulate")
        divisors = all(
            axis in MESH_AXES
            and isinstance(factor, int)
            and factor >= 1
            and getattr(self, axis) % factor == 0
            for axis, factor in self.dcn.items()
        )
        require(
            divisors,
            "mesh.dcn",
            self.dcn,
            f"factors of the axes, each a divisor of its axis in {self.product}; "
            f"{self.dcn_advice(self._dcn_groups())}",
        )
        require(
            sorted(self.order)
            in (
                [],
                sorted(MESH_AXES),
                *([sorted(set(MESH_AXES) - {"expert"})] if self.expert == 1 else []),
            ),
            "mesh.order",
            self.order,
            f"all five axes, each once: {', '.join(MESH_AXES)}; expert may be left out where it "
            "is 1",
        )

    def dcn_for(self, groups: int) -> dict[str, int]:
        """Returns factors for `dcn` whose product is the number of slices or hosts: of one axis if
        one suffices, else of several. Empty for one group, or if no factors have that product."""
        for axis in _SLOWEST_FIRST:
            if groups > 1 and getattr(self, axis) % groups == 0:
                return {axis: groups}
        factors, left = {}, groups
        for axis in _SLOWEST_FIRST:
            if (factor := math.gcd(getattr(self, axis), left)) > 1:
                factors[axis] = factor
                left //= factor
        return factors if left == 1 else {}

    def dcn_advice(self, groups: int) -> str:
        """Returns what would work as `dcn` across this many slices or hosts, for messages."""
        if groups == 1:
            return "leave it out"
        if factors := self.dcn_for(groups):
            return f"{dcn_text(factors)} would work"
        larger = math.lcm(self.data, groups)
        return f"no axes have factors whose product is {groups}; with data {larger} they would"

    def _dcn_groups(self) -> int:
        """The slices or hosts that the factors of `dcn` imply; 2 if they are not valid factors."""
        factors = list(self.dcn.values())
        valid = all(isinstance(factor, int) and factor >= 1 for factor in factors)
        return max(2, math.prod(factors)) if valid else 2

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return self.rows * self.tensor * self.sequence

    @property
    def rows(self) -> int:
        """The number of shards of a batch's rows."""
        return self.data * self.fsdp * self.expert

    @property
    def named(self) -> str:
        """The axes for messages; expert only if used."""
        axes = [axis for axis in MESH_AXES if axis != "expert" or self.expert > 1]
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)

    @property
    def product(self) -> str:
        """The axes and their product, for messages."""
        return f"{self.named} = {self.devices}"


def dcn_text(factors: Mapping[str, int]) -> str:
    """Returns factors as a recipe writes them: {data: 2}."""
    return f"{{{', '.join(f'{axis}: {factor}' for axis, factor in factors.items())}}}"


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The other processes, if JAX does not detect them (it does on Cloud TPU, GKE, Slurm and Open
    MPI)."""

    coordinator: str | None = None
    """Address of process 0 as HOST:PORT; any free port, the same for all."""
    process_id: int | None = None
    """Number of this process, from 0."""
    num_processes: int | None = None
    """Number of all processes; mesh.simulate counts the devices of all of them."""
    stall_minutes: float = 15.0
    """Minutes a step may take (or ten times the usual step, if that is more) before all processes
    print their stacks and exit with code 75. 0 waits forever, here and below."""
    compile_minutes: float = 180.0
    """The same for compiling, and for the first step."""
    save_minutes: float = 60.0
    """The same for waiting for a checkpoint."""
    evaluate_minutes: float = 240.0
    """The same for the evaluations after a step."""

    def __post_init__(self) -> None:
        for name in ("stall_minutes", "compile_minutes", "save_minutes", "evaluate_minutes"):
            minutes = getattr(self, name)
            require(
                0 <= minutes < math.inf,
                f"distributed.{name}",
                minutes,
                "minutes, or 0 for no limit",
            )
        given = {
            "coordinator": self.coordinator,
            "process_id": self.process_id,
            "num_processes": self.num_processes,
        }
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return
        if self.coordinator is None or self.process_id is None or self.num_processes is None:
            raise ValueError(
                f"distributed.{missing[0]}: missing; give coordinator, process_id and "
                "num_processes together, or none of them if JAX detects its cluster"
            )
        require(
            0 <= self.process_id < self.num_processes,
            "distributed.process_id",
            self.process_id,
            f"one of 0 .. {self.num_processes - 1} for {self.num_processes} processes",
        )
        require(
            ":" in self.coordinator,
            "distributed.coordinator",
            self.coordinator,
            "HOST:PORT of process 0",
        )
