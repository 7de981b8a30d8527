"""Agentic Transformer: LLaMA's layers over trajectories of continuous states and actions (Liu and
Abbeel, Emergent Agentic Transformer from Chain of Hindsight Experience; Ring Attention, section 5.3
and appendix D).

A decision is up to four tokens: return to go, state, action, reward. Each token is a short vector
of one of these kinds. The action is predicted at the state token: as one action, by squared error,
or as a mixture of several, by likelihood (Bishop, Mixture density networks). If episodes come from
many policies, the mean of their actions may be none of them; a mixture keeps them apart.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .config import TransformerConfig
from .frozen import array
from .linear import product
from .loss import LocalLosses, LossSums, global_sums
from .memory.chunked import chunked, chunked_total
from .norms import RMSNorm, scaled_norm
from .parameter_declarations import EmbedAndHeadFactory
from .projection import param, zero_param
from .transformer import TOKENS, Batch, Transformer
from .weight_gathering import Shards


class Kind(enum.IntEnum):
    """The kind of a trajectory's token."""

    RETURN_TO_GO = 0
    STATE = 1
    ACTION = 2
    REWARD = 3
    """The reward and, at a trajectory's end, the flag that it reached the target return."""


MIXTURE_DEVIATION = 0.2
"""Standard deviation of each component of a mixture of actions, which are in -1 .. 1."""


class TrajectorySizes(NamedTuple):
    """Sizes of a state and an action, and how many actions are predicted at a state."""

    observation: int
    action: int
    components: int = 1

    @property
    def predicted(self) -> int:
        """Numbers predicted at a state: the actions and, if several, the logits of their
        probabilities."""
        return self.action if self.components == 1 else self.components * (self.action + 1)

    @property
    def width(self) -> int:
        """Numbers in a token: the longest kind's. Others are zero-padded."""
        return max(self.observation, self.action, 2)


class ActionMixture(NamedTuple):
    """K actions predicted at each token, and the logarithms of their probabilities."""

    actions: Float[Array, "B T K A"]
    log_probabilities: Float[Array, "B T K"]


class TrajectoryEmbedAndHead(nnx.Module):
    """The modules before and after the layers: an embedding per kind of token, the final norm and
    the action head."""

    def __init__(self, config: TransformerConfig, *, sizes: TrajectorySizes, rngs: nnx.Rngs):
        hidden, std = config.hidden_size, config.initializer_range
        self.embed_inputs = nnx.Dict(
            weight=param(rngs, (len(Kind) * sizes.width, hidden), ("inputs", "embed"), std),
            bias=param(rngs, (len(Kind), hidden), ("kinds", "embed"), std, inputs=None),
        )
        self.norm = RMSNorm(config)
        self.action_head = nnx.Dict(
            weight=param(rngs, (hidden, sizes.predicted), ("embed", "actions"), std),
            bias=zero_param((sizes.predicted,), ("actions",)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgenticTransformer(Transformer):
    """Predicts the actions of trajectories.

    A batch holds `values` [B, L, W], each token's numbers; `kinds` int32 [B, L], its `Kind`;
    `targets` [B, L, A], the action that follows a state; and `loss_weights` [B, L], above 0 only at
    states; in addition to the coordinates.

    Attributes:
      sizes: of states and actions; W is `sizes.width` and A is `sizes.action`.

    Raises:
      ValueError: `sequence_parallel`, which this embedding and head do not support.
    """

    sizes: TrajectorySizes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel.split_tokens:
            raise ValueError(
                "mesh.sequence_parallel: found true, needs false for trajectories, whose embedding "
                "and head are too small to be split"
            )

    @property
    def embed_and_head_factory(self) -> EmbedAndHeadFactory:
        """The embeddings, the final norm and the action head."""
        return functools.partial(TrajectoryEmbedAndHead, sizes=self.sizes)

    # On a device

    def local_embed(self, params: Shards, batch: Batch) -> Float[Array, "B T E"]:
        """Returns the first layer's input: each token times its kind's matrix, plus that kind's
        bias."""
        weights = self.weights.gather_named(params, ("embed_inputs.weight", "embed_inputs.bias"))
        with jax.named_scope("embed"):
            return chunked(
                functools.partial(_embed, self.dtype),
                weights,
                {},
                {"values": batch["values"], "kinds": batch["kinds"]},
                dtype=self.dtype,
            )

    def local_actions(self, params: Shards, x: Float[Array, "B T E"]) -> Float[Array, "B T A"]:
        """Returns float32 actions in -1 .. 1, each token's most probable one, from the last layer's
        output."""
        actions, log_probabilities = self._predict(self._head_weights(params), x)
        best = jnp.argmax(log_probabilities, -1)
        return jnp.take_along_axis(actions, best[..., None, None], 2)[:, :, 0]

    def _head_weights(self, params: Shards) -> dict[str, jax.Array]:
        weights = self.weights.gather_named(
            params, ("norm.weight", "action_head.weight", "action_head.bias")
        )
        return {name: array(weight) for name, weight in weights.items()}

    def _predict(self, weights: dict[str, jax.Array], x: Float[Array, "B T E"]) -> ActionMixture:
        norm = scaled_norm(x, weights["norm.weight"], self.config)
        numbers = (
            product("bte,ea->bta", norm, weights["action_head.weight"], jnp.float32)
            + weights["action_head.bias"]
        )
        split = self.sizes.components * self.sizes.action
        actions = jnp.tanh(numbers[..., :split]).reshape(
            *x.shape[:2], self.sizes.components, self.sizes.action
        )
        logits = (
            numbers[..., split:]
            if self.sizes.components > 1
            else jnp.zeros((*x.shape[:2], 1), jnp.float32)
        )
        return ActionMixture(actions, jax.nn.log_softmax(logits))

    def local_losses(self, params: Shards, batch: Batch) -> LocalLosses:
        """Returns the losses of this device's tokens."""

        def losses(weights, arrays, constants):
            actions, log_probabilities = self._predict(weights, arrays["x"])
            squares = jnp.square(actions - constants["targets"][:, :, None])
            if self.sizes.components == 1:
                return jnp.mean(squares[:, :, 0], -1)
            return -jax.nn.logsumexp(
                log_probabilities - jnp.sum(squares, -1) / (2 * MIXTURE_DEVIATION**2), -1
            )

        x, sums = self.local_layers(params, batch)
        with jax.named_scope("head_and_loss"):
            total, tokens = chunked_total(
                losses,
                self._head_weights(params),
                {"x": x},
                {"targets": batch["targets"]},
                batch["loss_weights"],
                dtype=self.dtype,
                chunk=self.memory.loss_chunk,
            )
        return LocalLosses(
            total, tokens, self.auxiliary_losses(sums, batch), self.measures(sums, batch)
        )

    # Of a global batch

    def loss(self, params: Shards, batch: Batch) -> LossSums:
        """Returns the sums of weighted losses and of weights.

        Their quotient is the mean squared error of an action's elements; with several actions, the
        mean of -log sum_k p_k exp(-|a - a_k|^2 / (2 MIXTURE_DEVIATION^2)), which is 0 if one of
        them is certain and right.
        """

        def local(params, batch):
            return global_sums(self.local_losses(params, batch), batch["loss_weights"], None, 0)

        return self.sharded(local, PartitionSpec())(params, batch)

    def actions(self, params: Shards, batch: Batch) -> Float[Array, "B L A"]:
        """Returns the float32 action predicted at every token; meaningful at states."""

        def local(params, batch):
            return self.local_actions(params, self.local_hidden(params, batch))

        return self.sharded(local, PartitionSpec(*TOKENS, None))(params, batch)


def _embed(
    dtype: Any, weights: dict[str, jax.Array], arrays: Any, constants: dict[str, jax.Array]
) -> Float[Array, "B T E"]:
    """Places each token's numbers in its kind's columns, so that one product serves all kinds."""
    kind = jax.nn.one_hot(constants["kinds"], len(Kind), dtype=dtype)
    values: Float[Array, "B T W"] = constants["values"].astype(dtype)
    columns = (kind[..., :, None] * values[..., None, :]).reshape(*kind.shape[:2], -1)
    embedded = product("bti,ie->bte", columns, weights["embed_inputs.weight"])
    biases = product("btk,ke->bte", kind, weights["embed_inputs.bias"])
    return embedded + biases
