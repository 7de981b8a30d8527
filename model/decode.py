"""Greedy decoding: prefill through the distributed attention, then one token a step against the sharded cache.

Each device keeps the keys and values of the prompt tokens that it already holds; nothing is gathered. A new token's query
meets every device's part of the prompt (one partial each, merged over the sequence axis), and the few new tokens' own keys, of
which every device has a copy. Coordinates carry the mask, so prompts of different lengths, striped or not, need no care.
"""
from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from .attention import AttentionPartial, Keys, Queries, TokenCoords, merge
from .attention.layout import permutation
from .attention.partial import per_row
from .llama import TOKENS, Llama
from .sharding import BATCH_AXES

ROWS = PartitionSpec(BATCH_AXES)


def merge_over(partial: AttentionPartial, axis: str) -> AttentionPartial:
    """One part of attention from each device of a mesh axis -> the whole, on all of them."""
    top = lax.pmax(partial.lse, axis)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(partial.lse - top)
    total = lax.psum(weight, axis)
    safe = jnp.where(total == 0, 1.0, total)
    out = lax.psum(partial.out * per_row(weight), axis) / per_row(safe)
    return AttentionPartial(out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe)))


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

    def __call__(self, params, prompts: list[list[int]]) -> list[list[int]]:
        """Continuations of prompts (token ids, at most `rows` of them), greedy, without the stop id.

        Raises:
          ValueError: too many prompts, one that is empty, or one that is too long.
        """
        if len(prompts) > self.rows:
            raise ValueError(f"prompts: found {len(prompts)}, compiled for {self.rows} rows")
        for prompt in prompts:
            if not 0 < len(prompt) <= self.length:
                raise ValueError(f"prompt: found {len(prompt)} tokens; needs 1 to {self.length}")
        tokens = np.zeros((self.rows, self.length), np.int32)
        lengths = np.zeros(self.rows, np.int32)  # of a row that no prompt fills: 0
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
    def _row(self) -> int:
        """Prompt and new tokens: with the RoPE rule `dynamic` one embedding for all, so that cached keys stay true."""
        return self.length + self.new_tokens

    @functools.cached_property
    def _compiled(self):
        batch = dict.fromkeys(("tokens", "index", "segment_ids"), TOKENS)
        return jax.jit(jax.shard_map(self._local, mesh=self.model.mesh, in_specs=(self.model.specs, batch, ROWS),
                                     out_specs=ROWS, check_vma=False))

    def _local(self, params, batch, lengths):
        """One device's part: prompt -> int32 [B, new_tokens]."""
        model = self.model
        coords = model.local_coords(batch)
        x = model.local_embed(params, batch["tokens"])
        x, prompt_kv = model.local_layers(params, x, batch["index"], coords, keep_kv=True, length=self._row)
        # The last prompt token lies on one device of the sequence axis: the others add zeros.
        last = (batch["index"] == lengths[:, None] - 1)[..., None]
        x = lax.psum(jnp.sum(jnp.where(last, x, 0).astype(jnp.float32), 1, keepdims=True), "sequence").astype(x.dtype)
        first = self._choose(params, x)
        rows, kv_heads = first.shape[0], prompt_kv[0].shape[3]
        shape = (model.config.num_hidden_layers, rows, self.new_tokens, kv_heads, model.config.head_dim)
        new_kv = (jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype))

        def write(generated, going, token, step):
            stops = functools.reduce(jnp.logical_or, [token[:, 0] == stop for stop in self.stop_ids], jnp.bool_(False))
            return lax.dynamic_update_slice_in_dim(generated, token, step, 1), going & ~stops

        def unfinished(state):
            step, _, _, going = state
            # All devices must agree on when to stop: they meet in every step's collectives.
            return (step < self.new_tokens - 1) & (lax.psum(going.sum(), BATCH_AXES) > 0)

        def one_step(state):
            step, new_kv, generated, going = state
            token = lax.dynamic_slice_in_dim(generated, step, 1, 1)
            x, new_kv = self._token(params, token, lengths[:, None] + step, step, coords, prompt_kv, new_kv)
            return step + 1, new_kv, *write(generated, going, self._choose(params, x), step + 1)

        begun = write(jnp.zeros((rows, self.new_tokens), jnp.int32), lengths > 0, first, 0)
        return lax.while_loop(unfinished, one_step, (jnp.int32(0), new_kv, *begun))[2]

    def _choose(self, params, x):
        return jnp.argmax(self.model.local_logits(params, x), -1).astype(jnp.int32)

    def _token(self, params, token, index, step, coords, prompt_kv, new_kv):
        """One new token [B, 1] at `index` through all layers; its keys and values join new_kv at place `step`."""
        model = dataclasses.replace(self.model, sequence_parallel=False)  # one token cannot be split
        rows = token.shape[0]
        new_index = index - step + jnp.arange(self.new_tokens)[None]
        written = jnp.broadcast_to(jnp.arange(self.new_tokens)[None] <= step, (rows, self.new_tokens))
        # A prompt is one document, which begins at 0.
        new_coords = TokenCoords(new_index, written.astype(jnp.int32), jnp.zeros_like(new_index))
        here = TokenCoords(index, jnp.ones_like(index), jnp.zeros_like(index))
        attend = functools.partial(model.kernel.forward, mask=model.mask, scale=model.config.head_dim ** -0.5)

        def layer(x, given):
            shards, (prompt_k, prompt_v), (new_k, new_v) = given
            weights = model.local_weights(shards)
            q, k, v = model.local_project(weights, x, index, length=self._row)
            new_k = lax.dynamic_update_slice_in_dim(new_k, k, step, 1)
            new_v = lax.dynamic_update_slice_in_dim(new_v, v, step, 1)
            prompt = merge_over(attend(Queries(q, here), Keys(prompt_k, prompt_v, coords)), "sequence")
            attended = merge(prompt, attend(Queries(q, here), Keys(new_k, new_v, new_coords))).out.astype(x.dtype)
            return model.local_finish(weights, x, attended), (new_k, new_v)

        return lax.scan(layer, model.local_embed(params, token), (model.layer_shards(params), prompt_kv, new_kv))
