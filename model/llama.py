"""The LLaMA transformer: `Llama` runs it on a mesh, from a flat dictionary of sharded arrays that `modules` declares.

Everything between tokens and loss runs inside one `shard_map`: a device has its rows (data, fsdp), its tokens (sequence)
and its heads, width and vocabulary (tensor). Layers are stacked and scanned. The carry of that scan holds the token
coordinates beside the hidden states: anything computed from values outside it (a mask!) is loop-invariant, and
differentiating the scan would hoist it out and keep it for every layer.
"""
from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from .attention import AttentionOp, Keys, Mask, Queries, TokenCoords, attend, document_starts
from .attention.kernels import Kernel, get_kernel
from .config import LlamaConfig
from .feedforward import rms_norm
from .loss import LossSums, global_sums, token_losses
from .memory.chunked import chunked, chunked_total, product
from .memory.head_groups import attend_in_groups
from .memory.options import MemoryConfig, check_combination
from .memory.packed_shards import Parcels
from .memory.prefetch import Layer, run_layers
from .memory.query_chunks import layer_in_chunks
from .memory.remat import scan_layers
from .modules import bind, declare, init
from .sharding import BATCH_AXES, HIDDEN, Parallel, Parameter, Sharding, arrive, gather

TOKENS = PartitionSpec(BATCH_AXES, "sequence")
# The weights of a layer before attention.
INWARD = ("input_layernorm", "self_attn.q", "self_attn.k", "self_attn.v")


@dataclasses.dataclass(frozen=True)
class Llama:
    """A LLaMA on a mesh. Methods called `local_*` run inside `shard_map`, on a device's shards.

    Attributes:
      schedule, kernel, mask: see `model.attention`.
      dtype: compute precision; parameters stay float32.
      memory: what is kept for the backward pass, and in what pieces the rest is computed.
      sequence_parallel: Megatron's: hidden states are split over `tensor` too, along the length (`Parallel.split_tokens`);
        layers are then not computed in chunks, the loss still is.

    Raises:
      ValueError: a schedule that cannot serve the sequence axis; `sequence_parallel` where `tensor` does not split the heads
        and the feed-forward width; memory options that do not fit the model or each other.
    """

    config: LlamaConfig
    mesh: Mesh
    schedule: object = "ring"
    kernel: Kernel = dataclasses.field(default_factory=get_kernel)
    dtype: object = jnp.bfloat16
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    storage_axes: tuple[str, ...] = ("fsdp", "sequence")
    sequence_parallel: bool = False
    mask: Mask = Mask()

    def __post_init__(self):
        check_combination(
            self.memory, layers=self.config.num_hidden_layers, key_heads=self.parallel.local_key_heads, schedule=self.schedule,
            sequence=self.mesh.shape["sequence"], sequence_parallel=self.parallel.split_tokens)
        if self.parallel.split_tokens and not (self.parallel.heads and self.parallel.mlp):
            raise ValueError(f"sequence_parallel: tensor = {self.parallel.tensor} does not divide the heads "
                             f"({self.config.num_attention_heads}) or the width ({self.config.intermediate_size})")

    @functools.cached_property
    def sharding(self) -> Sharding:
        return Sharding(self.mesh, self.config, self.storage_axes)

    @functools.cached_property
    def parameters(self) -> dict[str, Parameter]:
        """As in memory: with the vocabulary and the heads padded to what `tensor` divides, the hidden size to what the ranks do
        that share the storage."""
        return declare(self.in_memory)

    @functools.cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        return self.sharding.specs(self.parameters)

    @functools.cached_property
    def shardings(self):
        return self.sharding.shardings(self.parameters)

    @property
    def parallel(self) -> Parallel:
        return dataclasses.replace(self.sharding.parallel,
                                   split_tokens=self.sequence_parallel and self.mesh.shape["tensor"] > 1)

    @property
    def in_memory(self) -> LlamaConfig:
        """The sizes of `parameters`, padding among them."""
        return self.sharding.padded(self.parallel.padded(self.config))

    def init(self, seed: int) -> dict[str, jax.Array]:
        """Fresh parameters, born sharded."""
        def padded(key):  # drawn at the model's own size, so that the mesh changes no number
            return {name: jnp.pad(x, [(0, n - m) for n, m in zip(self.parameters[name].shape, x.shape, strict=True)])
                    for name, x in init(self.config, key).items()}

        return jax.jit(padded, out_shardings=self.shardings)(jax.random.key(seed))

    def _whole(self, params, names) -> dict:
        """These parameters, gathered from their shards."""
        return {name: self._trim(name, gather(arrive(params[name]), self.specs[name], self.dtype)) for name in names}

    def _trim(self, name: str, whole):
        """A whole parameter (a layer's, of `layers.`) without what fills its hidden axis up in memory; of key heads that
        `tensor` does not split, the one that this rank's query heads share."""
        parallel, axes = self.parallel, self.parameters[name].axes[-whole.ndim:]
        whole = whole[tuple(slice(self.config.hidden_size) if axis in HIDDEN else slice(None) for axis in axes)]
        if "kv_heads" in axes and parallel.heads and not parallel.kv_heads:
            head = parallel.rank() * parallel.key_heads // parallel.tensor
            whole = lax.dynamic_slice_in_dim(whole, head, 1, axes.index("kv_heads"))
        return whole

    def _run(self, fn, weights, arrays, labels, chunk, through=None):
        return chunked(fn, weights, arrays, labels, dtype=self.dtype, chunk=chunk, through=through)

    def local_embed(self, params, tokens):
        """int32 [B, T] -> [B, T, E]. The float32 table is indexed and the rows cast, so that its gradient is float32."""
        parallel = self.parallel

        def embed(weights, arrays, labels):
            table, ids = weights["embed_tokens.weight"], labels["tokens"]
            if parallel.tensor > 1:
                ids = ids - parallel.rank() * table.shape[0]
            here = (ids >= 0) & (ids < table.shape[0])
            rows = jnp.where(here[..., None], table[jnp.where(here, ids, 0)], 0.0)
            return parallel.combine(rows.astype(self.dtype), "vocab")

        return self._run(embed, self._whole(params, ["embed_tokens.weight"]), {}, {"tokens": tokens}, 0)

    @staticmethod
    def layer_shards(params) -> dict:
        """The parameters of the layers, named as within a layer, stacked."""
        return {name.removeprefix("layers."): w for name, w in params.items() if name.startswith("layers.")}

    def local_weights(self, shards: dict) -> dict:
        """One layer's weights (names within the layer), whole: gathered once for all that the layer does in one direction."""
        return {name: self._trim(f"layers.{name}", gather(arrive(shard), self._layer_spec(name), self.dtype))
                for name, shard in shards.items()}

    def _layer_spec(self, name: str) -> PartitionSpec:
        return PartitionSpec(*self.specs[f"layers.{name}"][1:])

    def _layer_call(self, fn, weights, part, arrays, labels, chunk, through=None):
        """fn over those of a layer's weights that start with one of `part`; run again in the backward chunk by chunk, but
        for the policy `everything`, which keeps what fn computes."""
        weights = {name: w for name, w in weights.items() if name.startswith(part)}
        if self.memory.remat == "everything":
            return (arrays[through], *fn(weights, arrays, labels)) if through else fn(weights, arrays, labels)
        # A rank's chunks would not be chunks of the tokens that all ranks together hold.
        return self._run(fn, weights, arrays, labels, 0 if self.parallel.split_tokens else chunk, through)

    def local_project(self, weights, x, positions, which: str = "qkv", *, length: int, through: str | None = None):
        """A layer's norm, projections and RoPE, from whole weights: `which` of q, k, v (through="x": behind x, see `chunked`);
        length is the whole row's."""
        def project(weights, arrays, labels):
            layer = bind(self.config, weights)
            x = layer.input_layernorm(arrays["x"])
            return layer.self_attn.project(x, labels["positions"], length, self.parallel, which)

        part = ("input_layernorm", *(f"self_attn.{name}" for name in which))
        chunk = self.memory.projection_chunk
        return self._layer_call(project, weights, part, {"x": x}, {"positions": positions}, chunk, through)

    def local_layer(self, weights, x, positions, coords: TokenCoords, length: int, keep_kv: bool):
        """A layer, from whole weights: its output [B, T, E], and with keep_kv k and v."""
        if keep_kv or self.memory.attention_groups == self.memory.query_chunks == 1:
            q, k, v = self.local_project(weights, x, positions, length=length)
            attended, _ = attend(self._attention, Queries(q, coords), Keys(k, v, coords))
            return self.local_finish(weights, x, attended), (k, v) if keep_kv else None
        op = self._attention
        project = functools.partial(self.local_project, length=length, through="x")
        if self.memory.query_chunks > 1:
            return layer_in_chunks(project, self.local_finish, op, self.memory.query_chunks, self.memory.attention_groups,
                                   weights, x, positions, coords, self.dtype), None
        inward = {name: w for name, w in weights.items() if name.startswith(INWARD)}
        found = attend_in_groups(project, op, self.memory.attention_groups, inward, x, positions, coords, self.dtype)
        return self.local_finish(weights, *found), None

    @property
    def _attention(self) -> AttentionOp:
        return AttentionOp.create(self.config.head_dim, schedule=self.schedule, kernel=self.kernel, axis="sequence",
                                  size=self.mesh.shape["sequence"], mask=self.mask)

    def local_finish(self, weights, x, attended):
        """A layer from attention's output to the next layer's input, from whole weights."""
        def finish(weights, arrays, labels):
            layer = bind(self.config, weights)
            x = arrays["x"] + layer.self_attn.combine(arrays["attended"], self.parallel)
            return x + layer.mlp(layer.post_attention_layernorm(x), self.parallel)

        part = ("self_attn.o", "post_attention", "mlp")
        return self._layer_call(finish, weights, part, {"x": x, "attended": attended}, {}, self.memory.feed_forward_chunk)

    def local_coords(self, batch) -> TokenCoords:
        """The coordinates of this device's tokens; for global tokens their documents' starts too, from all of the row."""
        coords = TokenCoords(batch["index"], batch["segment_ids"])
        if not self.mask.global_tokens:
            return coords
        tokens = coords.index.shape[1]
        row = (lax.all_gather(x, "sequence", axis=1, tiled=True) for x in (coords.index, coords.segment_ids))
        here = lax.axis_index("sequence") * tokens
        return coords._replace(start=lax.dynamic_slice_in_dim(document_starts(*row), here, tokens, 1))

    def local_layers(self, params, x, positions, coords: TokenCoords, keep_kv: bool = False, length: int | None = None):
        """All layers: [B, T, E] -> [B, T, E], and with keep_kv every layer's k and v [layers, B, T, Hkv, D].

        length: of the row for the RoPE rule `dynamic`, if tokens are to follow; else what x holds over all devices.
        """
        layers = self.layer_shards(params)
        length = length or positions.shape[1] * self.mesh.shape["sequence"]
        if self.memory.prefetch and not keep_kv:
            return self.parallel.whole(run_layers(self._prefetching(layers, length), layers, x, positions, coords))

        def body(carry, shards):
            x, positions, coords = carry
            x = checkpoint_name(x, "layer_input")
            weights = self.local_weights(shards)
            x, kv = self.local_layer(weights, x, positions, coords, length, keep_kv)
            return (x, positions, coords), kv

        (x, _, _), kv = scan_layers(body, (x, positions, coords), layers, self.memory.remat, self.memory.every_k)
        x = self.parallel.whole(x)
        return (x, kv) if keep_kv else x

    def _prefetching(self, layers, length: int) -> Layer:
        """How a layer is run while the next one's weights arrive; layers: all layers' shards."""
        specs = {name: self._layer_spec(name) for name in layers}
        shapes = {name: w.shape[1:] for name, w in layers.items()}
        parcels = Parcels.of(specs, shapes, self.mesh.shape["fsdp"], self.mesh.shape["sequence"], self.dtype)
        return Layer(
            parcels, lambda whole: {name: self._trim(f"layers.{name}", w) for name, w in whole.items()}, self.local_weights,
            functools.partial(self.local_project, length=length, through="x"), self.local_finish,
            self._attention, self.memory.policy.attention, self.memory.policy.offload,
            INWARD)

    def _head(self, weights, x):
        """Final norm, and logits of this tensor rank's vocabulary, float32; minus infinity where it is padded."""
        norm = rms_norm(x, weights["norm.weight"], self.config.rms_norm_eps)
        # Rounded to bfloat16, a logit above 8 would be off by up to 0.03, and so would its token's loss.
        if self.config.tie_word_embeddings:
            logits = product("bte,ve->btv", norm, weights["embed_tokens.weight"], jnp.float32)
        else:
            logits = product("bte,ev->btv", norm, weights["lm_head.weight"], jnp.float32)
        if self.parallel.vocab_size == self.config.vocab_size:
            return logits
        ids = self.parallel.rank() * logits.shape[-1] + jnp.arange(logits.shape[-1])
        return jnp.where(ids < self.config.vocab_size, logits, -jnp.inf)

    @property
    def _head_names(self):
        return ["norm.weight", "embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"]

    def local_logits(self, params, x):
        """[B, T, E] -> float32 [B, T, V], all of the vocabulary on every tensor rank. For evaluation: not chunked."""
        def head(weights, arrays, labels):
            logits = self._head(weights, arrays["x"])
            if self.parallel.tensor > 1:
                logits = lax.all_gather(logits, "tensor", axis=2, tiled=True)[..., :self.config.vocab_size]
            return logits

        return self._run(head, self._whole(params, self._head_names), {"x": x}, {}, 0)

    def local_losses(self, params, batch):
        """-log p(target) of every token of this device: the weighted sum, and each, float32 [B, T], without gradient.

        Logits exist for one chunk at a time, and no chunk's are computed twice.
        """
        x = self.local_embed(params, batch["tokens"])
        x = self.local_layers(params, x, batch["positions"], self.local_coords(batch))

        def loss(weights, arrays, labels):
            return token_losses(self._head(weights, arrays["x"]), labels["targets"], self.parallel)

        return chunked_total(loss, self._whole(params, self._head_names), {"x": x}, {"targets": batch["targets"]},
                             batch["loss_weights"], dtype=self.dtype, chunk=self.memory.loss_chunk)

    def token_losses(self, params, batch):
        """-log p(target) of every token of a global batch (see ARCHITECTURE.md): float32 [B, L]."""
        return self._sharded(lambda params, batch: self.local_losses(params, batch)[1], TOKENS)(params, batch)

    def logits(self, params, batch):
        """Logits of every token of a global batch: float32 [B, L, V]. For tests and short inputs."""
        def local(params, batch):
            x = self.local_embed(params, batch["tokens"])
            x = self.local_layers(params, x, batch["positions"], self.local_coords(batch))
            return self.local_logits(params, x)

        return self._sharded(local, PartitionSpec(*TOKENS, None))(params, batch)

    def loss(self, params, batch, sources: int = 0) -> LossSums:
        """The sums of weighted losses and of weights over a global batch; their quotient is the mean cross-entropy in nats.

        Take gradients of the total outside: inside `shard_map` they would be wrong once a psum over `tensor` is in the loss.

        Args:
          sources: how many sources the batch's `source_ids` [B, L] tell apart; each then has sums of its own.
        """
        def local(params, batch):
            total, losses = self.local_losses(params, batch)
            return global_sums(total, losses, batch["loss_weights"], batch.get("source_ids"), sources)

        return self._sharded(local, PartitionSpec())(params, batch)

    def _sharded(self, fn, out_specs):
        return jax.shard_map(fn, mesh=self.mesh, in_specs=(self.specs, TOKENS), out_specs=out_specs, check_vma=False)
