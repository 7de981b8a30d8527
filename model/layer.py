"""One decoder layer as plain code: norm, projections, RoPE; attention; output projection, norm, feed-forward.

How it is scanned, rematerialised or cut into groups is in `model.memory`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from .attention import AttentionOp, Keys, Queries, TokenCoords, attend
from .config import LlamaConfig
from .dropout import TokenInfo
from .feedforward import KEYS_VALUES, OUTPUT, QUERIES, Auxiliary
from .memory.chunked import chunked_with_sums
from .memory.options import MemoryConfig
from .modules import Tokens, bind, read_by
from .rope_config import RopeConfig
from .sharding import TensorParallel

Heads = Float[Array, "B T H D"]
Hidden = Float[Array, "B T E"]


class LayerOutput(NamedTuple):
    """What a layer gives, or all layers together.

    Attributes:
      hidden: the hidden states.
      auxiliary: the layer's sums over a device's tokens; those of all layers are stacked on a leading axis. Dense layers have
        none, {}.
    """

    hidden: Hidden
    auxiliary: Auxiliary


@dataclasses.dataclass(frozen=True)
class Layer:
    """Runs one decoder layer on a device's tokens, inside `shard_map`. Its methods close over no traced value.

    Weights are whole (of this tensor rank), named as within the layer, and float32 by type.

    Attributes:
      config: the model's own sizes; length: tokens in a whole row, for RoPE.
      attention: attention over all shards of the sequence, and rope: the rotary embedding, of this layer's kind.
    """

    config: LlamaConfig
    parallel: TensorParallel
    memory: MemoryConfig
    dtype: Any
    attention: AttentionOp
    rope: RopeConfig | None
    length: int

    def __call__(self, weights: dict, x: Hidden, labels: TokenInfo, coords: TokenCoords) -> LayerOutput:
        """Returns the layer's output."""
        q, k, v = self.project(weights, x, labels)
        return self.finish(weights, x, self.attend(q, k, v, coords), labels)

    def project(self, weights: dict, x: Hidden, labels: TokenInfo) -> tuple[Heads, Heads, Heads]:
        """Returns queries, keys and values, for the heads that the weights have."""
        return self._project(weights, x, labels, (QUERIES, KEYS_VALUES))

    def project_through(self, weights: dict, x: Hidden, labels: TokenInfo) -> tuple[Hidden, Heads, Heads, Heads]:
        """Returns x, queries, keys and values. Whoever takes x from here has its gradient accumulated in place (`chunked`)."""
        return self._project(weights, x, labels, (QUERIES, KEYS_VALUES), "x")

    def queries_through(self, weights: dict, x: Hidden, labels: TokenInfo) -> tuple[Hidden, Heads]:
        """Returns x and the queries; see `project_through`."""
        return self._project(weights, x, labels, (QUERIES,), "x")

    def keys_values_through(self, weights: dict, x: Hidden, labels: TokenInfo) -> tuple[Hidden, Heads, Heads]:
        """Returns x, the keys and the values; see `project_through`."""
        return self._project(weights, x, labels, (KEYS_VALUES,), "x")

    def _project(self, weights: dict, x: Hidden, labels: TokenInfo, stages: tuple[str, ...],
                 through: str | None = None) -> tuple[Any, ...]:
        def project(weights, arrays, labels):
            layer = bind(self.config, weights)
            with jax.named_scope("input_norm"):
                x = self.parallel.whole(layer.mixer_input(arrays["x"]))
            tokens = Tokens(labels["tokens"], self.rope, self.length, self.parallel)
            with jax.named_scope("qkv_projection"):
                queries = (layer.mixer.queries(x, tokens),) if QUERIES in stages else ()
                return {}, (*queries, *(layer.mixer.keys_values(x, tokens) if KEYS_VALUES in stages else ()))

        return self._position_wise(project, read_by(self.config, stages, weights), {"x": x}, {"tokens": labels},
                                   self.memory.projection_chunk, through)[1]

    def attend(self, q: Heads, k: Heads, v: Heads, coords: TokenCoords) -> Heads:
        """Returns attention's output for this device's queries over the keys of all shards."""
        with jax.named_scope("attention"):
            return attend(self.attention, Queries(q, coords), Keys(k, v, coords)).out

    def finish(self, weights: dict, x: Hidden, attended: Heads, labels: TokenInfo) -> LayerOutput:
        """Returns the layer's output from its input and attention's output."""
        def finish(weights, arrays, labels):
            layer, dropout = bind(self.config, weights), labels["dropout"]
            with jax.named_scope("attention_output"):
                mixed = layer.mixer.output(arrays["attended"], self.parallel, dropout)
            with jax.named_scope("feed_forward"):
                hidden, auxiliary = layer.output(arrays["x"], mixed, lambda x: layer.mlp(x, self.parallel, dropout), self._add)
            return auxiliary, hidden

        auxiliary, hidden = self._position_wise(finish, read_by(self.config, (OUTPUT,), weights),
                                                {"x": x, "attended": attended}, {"dropout": labels.dropout},
                                                self.memory.feed_forward_chunk)
        return LayerOutput(hidden, auxiliary)

    def _add(self, x: Hidden, branch: Hidden) -> Hidden:
        """Returns the residual stream with what a branch adds to it."""
        multiplier = self.config.residual_multiplier
        return x + (branch if multiplier == 1 else branch * multiplier)

    def _position_wise(self, fn: Callable, weights: dict, arrays: dict, labels: dict, chunk: int,
                       through: str | None = None) -> tuple[Any, Any]:
        """Returns the sums and the results of fn, run in chunks of tokens that are computed again in the backward pass; with
        the remat policy `everything`, which keeps the results of products, all at once."""
        if self.memory.policy.products:
            sums, results = fn(weights, arrays, labels)
            return sums, (arrays[through], *results) if through else results
        # With split tokens a rank's chunks would not be chunks of the tokens that all ranks together have.
        chunk = 0 if self.parallel.split_tokens else chunk
        return chunked_with_sums(fn, weights, arrays, labels, dtype=self.dtype, chunk=chunk, through=through)
