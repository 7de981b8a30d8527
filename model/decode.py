"""Greedy decoding: prefill through the distributed attention, then one token a step against the sharded cache.

Each device keeps the keys and values of the prompt tokens that it already has; nothing is gathered. A new token's query attends
to every device's part of the prompt (one partial result each, merged over the sequence axis), and to the few new tokens' own
keys, of which every device has a copy. Coordinates carry the mask, so prompts of different lengths, striped or not, need no
special case.
"""
from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .attention import Keys, Queries, TokenCoords, merge
from .attention.layout import permutation
from .cache import ROWS, merge_over
from .llama import TOKENS, Batch, Llama
from .memory.layer_runner import ScanRunner
from .sharding import BATCH_AXES
from .weights import Shards


class PrefillRunner(ScanRunner):
    """Runs the layers on the prompts, and keeps every layer's keys and values [N, B, T, Hkv, D]."""

    def run_layer(self, weights, x, positions, coords):
        q, k, v = self.layer.project(weights, x, positions)
        return self.layer.finish(weights, x, self.layer.attend(q, k, v, coords)), (k, v)


@dataclasses.dataclass(frozen=True)
class Generator:
    """Greedy decoding of one compiled shape: `rows` prompts of at most `length` tokens, `new_tokens` more.

    Attributes:
      model: computes on its mesh; `length` is a multiple of the sequence axis, `rows` of data x fsdp.
      stop_ids: ids that end a row.
    """

    model: Llama
    layout: str
    rows: int
    length: int
    new_tokens: int
    stop_ids: tuple[int, ...]

    def __call__(self, params: Shards, prompts: list[list[int]]) -> list[list[int]]:
        """Returns the greedy continuations of prompts (token ids, at most `rows` of them), without the stop id.

        Raises:
          ValueError: too many prompts, one that is empty, or one that is too long.
        """
        if len(prompts) > self.rows:
            raise ValueError(f"prompts: found {len(prompts)}, compiled for {self.rows} rows")
        for prompt in prompts:
            if not 0 < len(prompt) <= self.length:
                raise ValueError(f"prompt: found {len(prompt)} tokens; needs 1 to {self.length}")
        tokens = np.zeros((self.rows, self.length), np.int32)
        lengths = np.zeros(self.rows, np.int32)  # 0 for a row without a prompt
        for row, prompt in enumerate(prompts):
            tokens[row, :len(prompt)] = prompt
            lengths[row] = len(prompt)
        index = np.broadcast_to(np.arange(self.length, dtype=np.int32), tokens.shape)
        order = permutation(self.length, self.model.mesh.shape["sequence"], self.layout)
        batch = {"tokens": tokens, "index": index, "segment_ids": (index < lengths[:, None]).astype(np.int32)}
        batch = {name: np.ascontiguousarray(x[:, order]) for name, x in batch.items()}
        generated = np.asarray(self._compiled(params, batch, lengths))
        return [self._until_stop(row.tolist()) for row in generated[:len(prompts)]]

    def _until_stop(self, ids: list[int]) -> list[int]:
        stops = [i for i, token in enumerate(ids) if token in self.stop_ids]
        return ids[:stops[0]] if stops else ids

    @property
    def _row_length(self) -> int:
        """Prompt and new tokens: with the RoPE rule `dynamic` all have one embedding, so that cached keys stay valid."""
        return self.length + self.new_tokens

    @functools.cached_property
    def _compiled(self):
        batch = dict.fromkeys(("tokens", "index", "segment_ids"), TOKENS)
        return jax.jit(jax.shard_map(self._local, mesh=self.model.mesh, in_specs=(self.model.specs, batch, ROWS),
                                     out_specs=ROWS, check_vma=False))

    def _local(self, params: Shards, batch: Batch, lengths: Int[Array, " B"]) -> Int[Array, "B new_tokens"]:
        """Runs inside `shard_map`: returns the new tokens of this device's rows."""
        model = self.model
        coords = model.local_coords(batch)
        x = model.local_embed(params, batch)
        prefill = PrefillRunner(model.layer(self._row_length), model.weights)
        x, prompt_kv = prefill.scan(model.weights.of_layers(params), x, batch["index"], coords)
        x = model.parallel.whole(x)
        # The last prompt token is on one device of the sequence axis: the others add zeros.
        last = (batch["index"] == lengths[:, None] - 1)[..., None]
        x = lax.psum(jnp.sum(jnp.where(last, x, 0).astype(jnp.float32), 1, keepdims=True), "sequence").astype(x.dtype)
        first = self._choose(params, x)
        rows, kv_heads = first.shape[0], prompt_kv[0].shape[3]
        shape = (model.config.num_hidden_layers, rows, self.new_tokens, kv_heads, model.config.head_dim)
        new_kv = (jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype))

        def write(generated, is_active, token, step):
            stops = functools.reduce(jnp.logical_or, [token[:, 0] == stop for stop in self.stop_ids], jnp.bool_(False))
            return lax.dynamic_update_slice_in_dim(generated, token, step, 1), is_active & ~stops

        def unfinished(state):
            step, _, _, is_active = state
            # All devices must stop at the same step, since every step has collectives.
            return (step < self.new_tokens - 1) & (lax.psum(is_active.sum(), BATCH_AXES) > 0)

        def generate_one(state):
            step, new_kv, generated, is_active = state
            token = lax.dynamic_slice_in_dim(generated, step, 1, 1)
            x, new_kv = self._token(params, token, lengths[:, None] + step, step, coords, prompt_kv, new_kv)
            return step + 1, new_kv, *write(generated, is_active, self._choose(params, x), step + 1)

        first_write = write(jnp.zeros((rows, self.new_tokens), jnp.int32), lengths > 0, first, 0)
        return lax.while_loop(unfinished, generate_one, (jnp.int32(0), new_kv, *first_write))[2]

    def _choose(self, params: Shards, x: Float[Array, "B 1 E"]) -> Int[Array, "B 1"]:
        """The most likely next token."""
        return jnp.argmax(self.model.local_logits(params, x), -1).astype(jnp.int32)

    def _token(self, params, token, index, step, coords, prompt_kv, new_kv):
        """Runs one new token [B, 1] at `index` through all layers; its keys and values are written to new_kv at `step`."""
        model = dataclasses.replace(self.model, sequence_parallel=False)  # one token cannot be split
        rows = token.shape[0]
        new_index = index - step + jnp.arange(self.new_tokens)[None]
        written = jnp.broadcast_to(jnp.arange(self.new_tokens)[None] <= step, (rows, self.new_tokens))
        # A prompt is one document, which starts at 0.
        new_coords = TokenCoords(new_index, written.astype(jnp.int32), jnp.zeros_like(new_index))
        token_coords = TokenCoords(index, jnp.ones_like(index), jnp.zeros_like(index))
        attend = functools.partial(model.kernel.forward, mask=model.mask, scale=model.config.head_dim ** -0.5)
        decoder_layer = model.layer(self._row_length)

        def run_layer(x, of_layer):
            shards, (prompt_k, prompt_v), (new_k, new_v) = of_layer
            weights = model.weights.layer(shards)
            q, k, v = decoder_layer.project(weights, x, index)
            new_k = lax.dynamic_update_slice_in_dim(new_k, k, step, 1)
            new_v = lax.dynamic_update_slice_in_dim(new_v, v, step, 1)
            queries = Queries(q, token_coords)
            prompt = merge_over(attend(queries, Keys(prompt_k, prompt_v, coords)), "sequence")
            attended = merge(prompt, attend(queries, Keys(new_k, new_v, new_coords))).out.astype(x.dtype)
            return decoder_layer.finish(weights, x, attended), (new_k, new_v)

        x = model.local_embed(params, {"tokens": token})
        return lax.scan(run_layer, x, (model.weights.of_layers(params), prompt_kv, new_kv))
