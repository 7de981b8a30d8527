"""The kernel contract: attention of one block of queries over one block of keys, forward and
backward."""

from __future__ import annotations

import abc
import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
from ..coords import Mask
from ..partial import AttentionPartial, merge

# The kernels for accelerators compute exp(x) as exp2(x * LOG2E).
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Kernel(abc.ABC):
    """Attention of one block of queries over one block of keys.

    Subclasses are frozen dataclasses: a kernel is a static argument of compiled functions, so it
    must be hashable, and equal kernels must compute the same. All results are float32, except the
    output of `rounded_forward`. In each method `mask` and the coordinates decide which keys a query
    sees, and `scale` multiplies the scores.

    Schedules with several rounds call `extend` and `gradients`, which accumulate over the rounds. A
    kernel that can accumulate in place (`AccumulatingKernel`) saves a pass over the results in
    every round.

    Attributes:
      softcap: scaled scores become softcap * tanh(score / softcap) before masking (Gemma 2); None
        for no soft-cap.
    """

    softcap: float | None = dataclasses.field(default=None, kw_only=True)

    def with_softcap(self, softcap: float | None) -> Kernel:
        """Returns the kernel with this soft-cap of the scores.

        Raises:
          ValueError: the kernel does not support soft-caps.
        """
        return dataclasses.replace(self, softcap=softcap)

    def over_shards(self, queries: int, keys: int) -> Kernel:
        """Returns the kernel for blocks that concatenate several shards, as after a gather.

        With most layouts the visible keys of such a block are scattered, a run in each shard. A
        kernel that walks from the first to the last tile needed must know where shards end; others
        return themselves.

        Args:
          queries, keys: the number of equal shards in a block of queries and in a block of keys.
        """
        del queries, keys
        return self

    def with_rows_in_order(self, promised: bool) -> Kernel:
        """Returns the kernel for blocks whose tokens are promised, or not, to be in row order.

        In order means that document numbers ascend, `index` ascends within each document, and
        padding is only between documents: packing creates such rows, and every layout preserves the
        order. A kernel that needs it may return NaN for blocks that break the promise; without the
        promise it checks every block, for which a GPU waits. Others return themselves.
        """
        del promised
        return self

    @abc.abstractmethod
    def forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        """Returns attention of the queries over these keys alone."""

    def rounded_forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        """Returns `forward` with out rounded to the dtype of q, for callers that would round it
        next."""
        partial = self.forward(queries, keys, mask=mask, scale=scale)
        return AttentionPartial(partial.out.astype(queries.q.dtype), partial.lse)

    @abc.abstractmethod
    def backward(
        self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float
    ) -> Gradients:
        """Returns what these queries and keys contribute to the gradients of q, k and v."""

    def extend(
        self,
        so_far: AttentionPartial | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        *,
        mask: Mask,
        scale: float,
    ) -> AttentionPartial:
        """Returns attention of the queries over these keys and over those that `so_far` covers
        (None: none yet)."""
        partial = self.forward(queries, separate(keys), mask=mask, scale=scale)
        return partial if so_far is None else merge(so_far, partial)

    def gradients(
        self,
        so_far: Float[Array, "B Tq Hq D"] | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        saved: BackwardInputs,
        *,
        mask: Mask,
        scale: float,
    ) -> tuple[Float[Array, "B Tq Hq D"], Float[Array, "2 B Tk Hkv D"]]:
        """Returns the gradients of `backward`: dq, added to `so_far` (None: zero), and dk and dv of
        this block, stacked."""
        dq, dk, dv = self.backward(queries, separate(keys), saved, mask=mask, scale=scale)
        return dq if so_far is None else so_far + dq, jnp.stack([dk, dv])


@dataclasses.dataclass(frozen=True)
class AccumulatingKernel(Kernel):
    """A kernel that accumulates in place: it implements `extend` and `gradients`, from which the
    other two follow."""

    def forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        return self.extend(None, queries, keys, mask=mask, scale=scale)

    def backward(
        self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float
    ) -> Gradients:
        dq, dkv = self.gradients(None, queries, keys, saved, mask=mask, scale=scale)
        return Gradients(dq, *dkv)

    @abc.abstractmethod
    def extend(
        self,
        so_far: AttentionPartial | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        *,
        mask: Mask,
        scale: float,
    ) -> AttentionPartial:
        """As in Kernel; the result reuses the memory of `so_far`."""

    @abc.abstractmethod
    def gradients(
        self,
        so_far: Float[Array, "B Tq Hq D"] | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        saved: BackwardInputs,
        *,
        mask: Mask,
        scale: float,
    ) -> tuple[Float[Array, "B Tq Hq D"], Float[Array, "2 B Tk Hkv D"]]:
        """As in Kernel; dq reuses the memory of `so_far`."""


def separate(keys: Keys | StackedKeys) -> Keys:
    """Returns the block with separate K and V, stacked or not."""
    return keys.separate() if isinstance(keys, StackedKeys) else keys
