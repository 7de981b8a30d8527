"""Cross-entropy per token, with the vocabulary split over the tensor axis, and its sums over a
batch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .attention.names import BATCH_AXES
from .sharding import TensorParallel


class SourceSums(NamedTuple):
    """The sums of `LossSums` for each of S data sources: float32, without gradient. S is 0 if
    sources are not distinguished."""

    total: Float[Array, " S"]
    weight: Float[Array, " S"]


class LocalLosses(NamedTuple):
    """The losses of one device's tokens, inside `shard_map`.

    Attributes:
      total: the weighted sum of the tokens' losses, with gradients.
      tokens: each token's loss, without gradient.
      auxiliary: what the layers' auxiliary losses add to the total, by name; {} in dense models.
      measures: as in `LossSums`, already summed over all devices.
    """

    total: Float[Array, ""]
    tokens: Float[Array, "B T"]
    auxiliary: dict[str, Float[Array, ""]]
    measures: dict[str, Float[Array, ""]]


class LossSums(NamedTuple):
    """Sums over all tokens of a global batch, or of several batches; total / weight is the mean
    loss in nats.

    Attributes:
      total: the sum of weighted losses, float32.
      weight: the sum of their weights.
      by_source: both for each source.
      auxiliary: losses that layers add to the total, on its scale, by name; {} in dense models.
      measures: sums of other quantities by name, without gradient; reported divided by the weight.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    by_source: SourceSums
    auxiliary: dict[str, Float[Array, ""]]
    measures: dict[str, Float[Array, ""]]

    @property
    def trained(self) -> Float[Array, ""]:
        """The quantity to differentiate: the total plus the auxiliary losses."""
        return sum(self.auxiliary.values(), start=self.total)


def token_losses(
    logits: Float[Array, "B c V"], targets: Int[Array, "B c"], parallel: TensorParallel
) -> Float[Array, "B c"]:
    """Returns -log p(target) of each token in nats, float32, the same on all tensor ranks. Runs
    inside `shard_map`.

    Args:
      logits: of this tensor rank's part of the vocabulary; V is its size.
      targets: ids in the whole vocabulary, the same on all tensor ranks.
    """
    logits = logits.astype(jnp.float32)
    maximum = lax.stop_gradient(logits.max(-1))
    if parallel.tensor > 1:
        # pmax has no derivative, and needs none, since the maximum cancels: stop the gradient on
        # both sides.
        maximum = lax.stop_gradient(_maximum_over_tensor(maximum))
        targets = targets - parallel.rank() * logits.shape[-1]
    total = parallel.sum(jnp.exp(logits - maximum[..., None]).sum(-1), "vocab")
    is_local = (targets >= 0) & (targets < logits.shape[-1])
    target_logits = _logits_at(logits.shape[-1], logits, jnp.where(is_local, targets, 0))
    target_logits = parallel.sum(jnp.where(is_local, target_logits, 0.0), "vocab")
    return maximum + jnp.log(total) - target_logits


def global_sums(
    losses: LocalLosses,
    weights: Float[Array, "B T"],
    source_ids: Int[Array, "B T"] | None,
    sources: int,
) -> LossSums:
    """Returns the sums over all devices that hold tokens, from one device's tokens.

    Runs inside `shard_map`.

    Args:
      source_ids: the number of each token's source; not read if `sources`, their count, is 0.
    """

    def over_devices(x):
        return lax.psum(x, (*BATCH_AXES, "sequence"))

    def by_source(x):
        return over_devices(
            jnp.where(source_ids == jnp.arange(sources)[:, None, None], x, 0).sum((1, 2))
        )

    empty = jnp.zeros(0, jnp.float32)
    of_sources = (
        SourceSums(by_source(losses.tokens * weights), by_source(weights))
        if sources
        else SourceSums(empty, empty)
    )
    return LossSums(
        over_devices(losses.total),
        over_devices(jnp.sum(weights)),
        of_sources,
        jax.tree.map(over_devices, losses.auxiliary),
        losses.measures,
    )


def sums_by_document(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], documents: int
) -> Float[Array, "B D"]:
    """Returns the sum of each document's values; document d of a row is column d - 1.

    It compares instead of scattering: a scatter adds one token after another, which for 131,072
    tokens is off by whole nats, and on GPUs it does so in another order in every run. Compilers
    for TPUs and GPUs fuse the comparison into the sum; on CPUs it takes B T D numbers.
    """
    ids = jnp.arange(1, documents + 1)[:, None]
    return jnp.where(segment_ids[:, None] == ids, values[:, None], 0.0).sum(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logits_at(
    size: int, logits: Float[Array, "B c V"], targets: Int[Array, "B c"]
) -> Float[Array, "B c"]:
    """The logit of each target; `size` is V.

    Its gradient compares with the targets instead of scattering: compilers do not fuse a scatter,
    so the gradient of all logits would first be written and read in float32.
    """
    del size
    return jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def _logits_at_backward(size, targets, gradient):
    is_target = jnp.arange(size) == targets[..., None]
    return jnp.where(is_target, gradient[..., None], 0.0), None


_logits_at.defvjp(
    lambda size, logits, targets: (_logits_at(size, logits, targets), targets),
    _logits_at_backward,
)


@jax.custom_vjp
def _maximum_over_tensor(x: jax.Array) -> jax.Array:
    return lax.pmax(x, "tensor")


_maximum_over_tensor.defvjp(
    lambda x: (_maximum_over_tensor(x), None), lambda _, dy: (jnp.zeros_like(dy),)
)
