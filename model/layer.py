"""One decoder layer as plain code: norm, projections, RoPE; attention; output projection, norm,
feed-forward.

`model.runners` scans, rematerializes and splits it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from .attention import AttentionOp, Keys, Queries, TokenCoords, attend
from .config import TransformerConfig
from .dropout import TokenInfo
from .feedforward import Auxiliary
from .frozen import array
from .memory.chunked import chunked_with_sums, passed_through
from .memory.options import MemoryConfig
from .modules import SelfAttention, Tokens
from .parameter_declarations import bind, read_by
from .rope_config import RopeConfig
from .sharding import TensorParallel
from .stages import KEYS_VALUES, OUTPUT, QUERIES

Heads = Float[Array, "B T H D"]
Hidden = Float[Array, "B T E"]
# The attention sinks among a layer's weights.
SINKS = "self_attn.sinks"


def with_sink_gradient(dw: dict[str, Any], gradient: Float[Array, " H"] | None) -> dict[str, Any]:
    """Returns a layer's gradients, including that of its sinks if it has and trains them."""
    if gradient is None or dw[SINKS] is None:
        return dw
    return {**dw, SINKS: dw[SINKS] + gradient}


class LayerOutput(NamedTuple):
    """The results of a layer, or of all layers together.

    Attributes:
      hidden: the hidden states.
      auxiliary: the layer's sums over a device's tokens, or all layers' stacked on a leading axis;
        {} for dense layers.
    """

    hidden: Hidden
    auxiliary: Auxiliary


@dataclasses.dataclass(frozen=True)
class ShardedLayer:
    """Runs one decoder layer on a device's tokens, inside `shard_map`. Its methods close over no
    traced value.

    Weights are whole (of this tensor rank), named as within the layer, and float32 by type.

    Attributes:
      config: the model's sizes without padding.
      attention: attention over all shards of the sequence, of this layer's kind.
      rope: the rotary embedding of this layer's kind, or None.
      length: tokens in a whole row, for RoPE.
    """

    config: TransformerConfig
    parallel: TensorParallel
    memory: MemoryConfig
    dtype: Any
    attention: AttentionOp
    rope: RopeConfig | None
    length: int

    def __call__(
        self, weights: dict, x: Hidden, info: TokenInfo, coords: TokenCoords
    ) -> LayerOutput:
        """Returns the layer's output."""
        q, k, v = self.project(weights, x, info)
        return self.finish(weights, x, self.attend(weights, q, k, v, coords), info)

    def project(self, weights: dict, x: Hidden, info: TokenInfo) -> tuple[Heads, Heads, Heads]:
        """Returns queries, keys and values, for the heads in the weights."""
        project = self._projection(SelfAttention.queries_keys_values)
        weights = read_by(self.config, (QUERIES, KEYS_VALUES), weights)
        return self._position_wise(
            lambda *part: ({}, project(*part)), weights, x, info, self.memory.projection_chunk
        )[1]

    def project_through(
        self, weights: dict, x: Hidden, info: TokenInfo
    ) -> tuple[Hidden, tuple[Heads, Heads, Heads]]:
        """Returns x, and queries, keys and values. Using the returned x lets its gradient
        accumulate in place (see `passed_through`)."""
        return self._project_through(
            SelfAttention.queries_keys_values, (QUERIES, KEYS_VALUES), weights, x, info
        )

    def queries_through(self, weights: dict, x: Hidden, info: TokenInfo) -> tuple[Hidden, Heads]:
        """Returns x and the queries; see `project_through`."""
        return self._project_through(SelfAttention.queries, (QUERIES,), weights, x, info)

    def keys_values_through(
        self, weights: dict, x: Hidden, info: TokenInfo
    ) -> tuple[Hidden, tuple[Heads, Heads]]:
        """Returns x, and the keys and values; see `project_through`."""
        return self._project_through(SelfAttention.keys_values, (KEYS_VALUES,), weights, x, info)

    def _project_through(
        self, read: Callable, stages: tuple[str, ...], weights: dict, x: Hidden, info: TokenInfo
    ) -> tuple[Hidden, Any]:
        project, weights = self._projection(read), read_by(self.config, stages, weights)
        if self.memory.policy.products:
            return x, project(weights, x, info)
        return passed_through(
            project,
            weights,
            x,
            info,
            dtype=self.dtype,
            chunk=self._chunk(self.memory.projection_chunk),
        )

    def _projection(self, read: Callable) -> Callable:
        """The position-wise work from a layer's input to the projections that `read` returns."""

        def project(weights, x, info):
            layer = bind(self.config, weights)
            with jax.named_scope("input_norm"):
                x = self.parallel.all_gather_tokens(layer.attention_input(x))
            tokens = Tokens(info, self.rope, self.length, self.parallel)
            with jax.named_scope("qkv_projection"):
                return read(layer.self_attn, x, tokens)

        return project

    def attend(self, weights: dict, q: Heads, k: Heads, v: Heads, coords: TokenCoords) -> Heads:
        """Returns attention's output for this device's queries over the keys of all shards."""
        with jax.named_scope("attention"):
            return attend(
                self.attention, Queries(q, coords), Keys(k, v, coords), self.sinks(weights)
            ).out

    @staticmethod
    def sinks(weights: dict) -> Float[Array, " H"] | None:
        """Returns the learnt scores that join the softmax denominators, if the model has any."""
        return array(weights[SINKS]) if SINKS in weights else None

    def finish(self, weights: dict, x: Hidden, attended: Heads, info: TokenInfo) -> LayerOutput:
        """Returns the layer's output from its input and attention's output."""

        def finish(weights, arrays, info):
            layer = bind(self.config, weights)
            with jax.named_scope("attention_output"):
                attended = layer.self_attn.output(arrays["attended"], self.parallel, info.dropout)
            with jax.named_scope("feed_forward"):
                hidden, auxiliary = layer.output(
                    arrays["x"], attended, lambda x: layer.mlp(x, self.parallel, info), self._add
                )
            return auxiliary, hidden

        auxiliary, hidden = self._position_wise(
            finish,
            read_by(self.config, (OUTPUT,), weights),
            {"x": x, "attended": attended},
            info.without_positions,
            self.memory.feed_forward_chunk,
        )
        return LayerOutput(hidden, auxiliary)

    def _add(self, x: Hidden, branch: Hidden) -> Hidden:
        """Returns the residual stream plus a branch."""
        multiplier = self.config.residual_multiplier
        return x + (branch if multiplier == 1 else branch * multiplier)

    def _position_wise(
        self, fn: Callable, weights: dict, arrays: Any, info: Any, chunk: int
    ) -> tuple[Any, Any]:
        """Returns the sums and results of fn, run in chunks of tokens that are recomputed in the
        backward pass; all at once with the remat policy `everything`, which keeps the results of
        products."""
        if self.memory.policy.products:
            return fn(weights, arrays, info)
        return chunked_with_sums(
            fn, weights, arrays, info, dtype=self.dtype, chunk=self._chunk(chunk)
        )

    def _chunk(self, chunk: int) -> int:
        """A chunk's tokens: all if tokens are split, since a rank's chunks would not be chunks of
        all ranks' tokens."""
        return 0 if self.parallel.split_tokens else chunk
