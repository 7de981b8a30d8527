"""The contract of schedules: which ranks compute which blocks of attention in which round, and what
travels between them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array, PyTree

from ..blocks import BackwardInputs, Gradients, Keys, Queries
from ..coords import Mask
from ..kernels.kernel import Kernel
from ..partial import AttentionPartial
from . import plan
from .ranks import Ranks

# An option's declared type -> a test of values, and what messages say is needed. (A bool is an
# int.)
OPTION_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (
        lambda value: type(value) is int and value >= 0,
        "a whole number; 0 leaves it to the schedule",
    ),
    "Schedule": (lambda value: isinstance(value, Schedule), "a schedule"),
}


@dataclasses.dataclass(frozen=True)
class Context:
    """A schedule's inputs besides arrays.

    Attributes:
      ranks: the shards of the sequence.
      mask: which keys a query sees in its document.
      scale: multiplies the scores.
      rounded: whether the caller rounds the output to the queries' dtype next, so that a schedule
        may already return it rounded.
    """

    ranks: Ranks
    mask: Mask
    scale: float
    rounded: bool = False

    @property
    def scores(self) -> dict[str, Any]:
        """The keyword arguments of a kernel's methods."""
        return {"mask": self.mask, "scale": self.scale}


class Payload(NamedTuple):
    """Arrays unrelated to attention that ride on a backward ring pass.

    Attributes:
      shard: a tree of arrays of this rank, to be gathered from all ranks; or None.
      shares: a tree of arrays [P, ...] of this rank, whose row p is added to rank p's sum; or None.
    """

    shard: PyTree[Array] | None = None
    shares: PyTree[Array] | None = None


class Schedule(abc.ABC):
    """Attention of each rank's queries over the keys of all ranks, by calls of a kernel and
    transfers between the ranks.

    Subclasses are frozen dataclasses of options, with types and values checked on construction.
    `forward` and `backward` run inside `shard_map`, on a rank's local arrays. On a single rank
    every schedule is replaced by `Local`.

    Raises:
      ValueError: an option of the wrong type, or a negative number.
    """

    can_gather_along: ClassVar[bool] = False
    """Whether other arrays can ride along, by `forward_and_gather` and `backward_and_exchange`."""

    @property
    def name(self) -> str:
        """The schedule's name in recipes: its file's."""
        return type(self).__module__.rpartition(".")[2]

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value, (fits, needed) = getattr(self, option.name), OPTION_TYPES[str(option.type)]
            if not fits(value):
                raise ValueError(f"{self._option(option.name)}: found {value!r}; needs {needed}")

    @abc.abstractmethod
    def forward(
        self, kernel: Kernel, queries: Queries, keys: Keys, context: Context
    ) -> AttentionPartial:
        """Attention of this rank's queries over the keys of all ranks, float32 (see
        `Context.rounded`)."""

    @abc.abstractmethod
    def backward(
        self, kernel: Kernel, queries: Queries, keys: Keys, saved: BackwardInputs, context: Context
    ) -> Gradients:
        """The gradients of this rank's queries, and of its keys and values from the queries of all
        ranks, float32."""

    @abc.abstractmethod
    def plan(self, size: int, block: plan.Block, mask: Mask = Mask()) -> plan.Plan:
        """`forward` and `backward` on `size` ranks that each hold one `block`, as plain data.

        The mask matters if a window lets a schedule skip ranks.
        """

    def forward_and_gather(
        self, kernel: Kernel, queries: Queries, keys: Keys, shard: PyTree[Array], context: Context
    ) -> tuple[AttentionPartial, PyTree[Array]]:
        """`forward`, which also all-gathers `shard`, a tree of arrays, to [P, ...], hidden by the
        same kernels."""
        raise NotImplementedError(f"{type(self).__name__} gathers no other arrays")

    def backward_and_exchange(
        self,
        kernel: Kernel,
        queries: Queries,
        keys: Keys,
        saved: BackwardInputs,
        payload: Payload,
        context: Context,
    ) -> tuple[Gradients, PyTree[Array] | None, PyTree[Array] | None]:
        """`backward`, which also all-gathers `payload.shard` and reduce-scatters `payload.shares`.

        Returns:
          The gradients; the shards of all ranks [P, ...]; the sum over all ranks of their shares
          for this rank.
        """
        raise NotImplementedError(f"{type(self).__name__} gathers no other arrays")

    def check(self, size: int) -> None:  # noqa: B027  # not abstract: most schedules serve any number
        """Refuses a number of ranks that the schedule cannot serve; most schedules serve any.

        Raises:
          ValueError: one line that names the option, its value and the values that would work.
        """

    def _check_divides(self, option: str, size: int) -> None:
        """ValueError unless this option is 0 or divides `size`."""
        value = getattr(self, option)
        if value and size % value:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"{self._option(option)}: {value} does not divide {size} sequence shards; those "
                f"do: {divisors}"
            )

    def _option(self, name: str) -> str:
        """An option's name in recipes."""
        return f"{self.name}.{name}"
