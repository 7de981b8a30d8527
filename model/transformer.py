"""`Transformer`: the decoder layers on a mesh, independent of inputs and loss.

Everything between inputs and loss runs inside one `shard_map`: a device holds some rows (data,
fsdp), tokens (sequence), and heads and width (tensor). Parameters are one flat dictionary of
sharded arrays, declared in `model.modules`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .attention import AttentionOp, Mask, TokenCoords, document_starts
from .attention.kernels import Kernel, get_kernel
from .attention.names import BATCH_AXES
from .config import LayerStack
from .dropout import TokenInfo
from .experts import RouterTotals, router_losses, router_measures
from .feedforward import Auxiliary
from .layer import LayerOutput, ShardedLayer
from .memory.options import MemoryConfig, check_combination
from .norms import QK_NORMS
from .parameters import ModelParameters
from .runners.choice import layer_runner
from .sharding import TensorParallel
from .weight_gathering import Shards

# How arrays [B, L, ...] of a batch are split.
TOKENS = PartitionSpec(BATCH_AXES, "sequence")
# The mesh axes that tokens are split over.
EVERY_TOKEN = (*BATCH_AXES, "sequence")
# A part of a batch holds the whole batch's `RouterTotals` under this name.
ROUTER_TOTALS = "router_totals"
# Arrays [B, L, ...] by name: `positions`, `index`, `segment_ids`, `dropout` if training uses it
# (`model.dropout`), and the model's own (see ARCHITECTURE.md).
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Transformer(ModelParameters):
    """The decoder layers on a mesh; a model adds what comes before and after them. Methods called
    `local_*` run inside `shard_map`, on a device's shards.

    Attributes:
      schedule, kernel, mask: see `model.attention`; the mask is the model's common window unless
        given. Layers with their own window see what both windows allow.
      memory: what is kept for the backward pass, and in which pieces the rest is computed.
      sequence_parallel: Megatron's (`TensorParallel.split_tokens`): hidden states are also split
        over `tensor`, along the length. Layers are then not computed in chunks of tokens, but the
        loss still is.

    Raises:
      ValueError: the schedule cannot serve the sequence axis; `sequence_parallel` without `tensor`
        splitting heads and feed-forward width; or memory options do not fit the model or each
        other.
    """

    schedule: Any = "ring"
    kernel: Kernel = dataclasses.field(default_factory=get_kernel)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    sequence_parallel: bool = False
    # None until __post_init__ fills it in.
    mask: Mask = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.mask is None:
            object.__setattr__(self, "mask", Mask(window=self.config.common_window))
        parallel = self.parallel
        ranks, experts = self.mesh.shape["expert"], self.config.num_experts
        if experts % ranks:
            divisors = [str(n) for n in range(1, experts + 1) if experts % n == 0]
            raise ValueError(
                f"mesh.expert: found {ranks}, which does not divide the model's {experts} experts; "
                f"{', '.join(divisors)} do"
            )
        check_combination(
            self.memory,
            stacks=[(stack.layers, len(stack.config.layer_kinds)) for stack in self.config.stacks],
            key_heads=parallel.local_key_heads,
            schedule=self.schedule,
            sequence=self.mesh.shape["sequence"],
            sequence_parallel=parallel.split_tokens,
        )
        if (
            (norm := QK_NORMS[self.config.qk_norm])
            and norm.needs_all_heads
            and self.memory.attention_groups > 1
        ):
            raise ValueError(
                f"memory.attention_groups: found {self.memory.attention_groups}; the family "
                f"{self.config.family} normalizes all heads together, so it needs 1"
            )
        if parallel.split_tokens and not (parallel.heads and parallel.mlp):
            config = self.config
            size = (
                f"width, {', '.join(map(str, config.feed_forward_widths))}"
                if parallel.heads
                else f"heads, {config.num_attention_heads}"
            )
            raise ValueError(
                f"mesh.sequence_parallel: found true, and mesh.tensor = {parallel.tensor} does not "
                f"divide the model's {size}; false would work"
            )

    @property
    def parallel(self) -> TensorParallel:
        """What the tensor axis splits."""
        return dataclasses.replace(
            self.sharding.parallel,
            split_tokens=self.sequence_parallel and self.mesh.shape["tensor"] > 1,
        )

    def attention(self, window: int | None = None) -> AttentionOp:
        """Returns attention over the shards of the sequence axis, also limited to a layer's
        window."""
        kernel = self.kernel.with_softcap(self.config.attn_logit_softcapping).with_rows_in_order(
            True
        )
        return AttentionOp.create(
            self.config.head_dim,
            schedule=self.schedule,
            kernel=kernel,
            axis="sequence",
            size=self.mesh.shape["sequence"],
            mask=self.mask.within(window),
            scale=self.config.scale,
        )

    def layers(self, stack: LayerStack, length: int) -> tuple[ShardedLayer, ...]:
        """Returns one layer of each kind in a stack, in their repeating order, for whole rows of
        `length` tokens."""
        return tuple(
            ShardedLayer(
                stack.config,
                self.parallel,
                self.memory,
                self.dtype,
                self.attention(kind.window),
                kind.rope,
                length,
            )
            for kind in stack.config.layer_kinds
        )

    # On a device

    def local_coords(self, batch: Batch) -> TokenCoords:
        """Returns the coordinates of this device's tokens; for global tokens also their documents'
        starts, from the whole row."""
        coords = TokenCoords(batch["index"], batch["segment_ids"], shared=batch.get("shared"))
        if not self.mask.global_tokens:
            return coords
        tokens = coords.index.shape[1]
        rows = (
            lax.all_gather(x, "sequence", axis=1, tiled=True)
            for x in (coords.index, coords.segment_ids)
        )
        offset = lax.axis_index("sequence") * tokens
        return coords._replace(
            start=lax.dynamic_slice_in_dim(document_starts(*rows), offset, tokens, 1)
        )

    @abc.abstractmethod
    def local_embed(self, params: Shards, batch: Batch) -> Float[Array, "B T E"]:
        """Returns the first layer's input."""

    def local_hidden(self, params: Shards, batch: Batch) -> Float[Array, "B T E"]:
        """Returns the last layer's hidden states."""
        return self.local_layers(params, batch).hidden

    def local_layers(self, params: Shards, batch: Batch) -> LayerOutput:
        """Returns the last layer's hidden states, and the auxiliary sums of all layers with
        experts."""
        real = batch["segment_ids"] > 0 if self.config.num_experts else None
        info = TokenInfo(batch["positions"], batch.get("dropout"), real)
        length = info.positions.shape[1] * self.mesh.shape["sequence"]
        x, coords, sums = self.local_embed(params, batch), self.local_coords(batch), []
        for stack in self.config.stacks:
            weights = self.weights_of(stack)
            runner = layer_runner(self.layers(stack, length), weights)
            shards = weights.of_layers(params)
            x, auxiliary = runner.run(shards, x, info.from_layer(stack.first), coords)
            sums += [auxiliary] if auxiliary else []
        if len(sums) > 1:
            sums = [jax.tree.map(lambda *parts: jnp.concatenate(parts), *sums)]
        return LayerOutput(self.parallel.all_gather_tokens(x), sums[0] if sums else {})

    def auxiliary_losses(self, sums: Auxiliary, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Returns this device's partial sums of auxiliary losses from the layers' auxiliary sums,
        by name: float32, on the scale of the weighted sum of the tokens' losses, to which they are
        added. None for dense layers.

        Args:
          sums: of all layers with experts, stacked [N, ...], over this device's tokens.
          batch: this device's part.
        """
        if not self.config.num_experts:
            assert not sums, f"no loss is made of {', '.join(sums)}"
            return {}
        totals = (
            batch[ROUTER_TOTALS] if ROUTER_TOTALS in batch else self._router_totals(sums, batch)
        )
        return router_losses(sums, totals, self.config)

    def measures(self, sums: Auxiliary, batch: Batch) -> dict[str, Float[Array, ""]]:
        """Returns a batch's other metrics over all devices, as `experts.router_measures` does; none
        for dense layers. Arguments as in `auxiliary_losses`."""
        if not self.config.num_experts:
            return {}
        entropy = lax.psum(sums["entropy"].sum(), EVERY_TOKEN)
        part = self._router_totals(sums, batch)
        return router_measures(part, batch.get(ROUTER_TOTALS, part), entropy, self.config)

    def _router_totals(self, sums: Auxiliary, batch: Batch) -> RouterTotals:
        real = jnp.sum(batch["segment_ids"] > 0, dtype=jnp.float32)
        own = lax.stop_gradient(sums["tokens"]), real, jnp.sum(batch["loss_weights"])
        return RouterTotals(*lax.psum(own, EVERY_TOKEN))

    def router_totals(self, params: Shards, batch: Batch) -> RouterTotals:
        """Returns the totals of a global batch. For a batch computed in parts, their sums must be
        in each part under ROUTER_TOTALS, so that losses do not depend on the parts."""

        def local(params, batch):
            return self._router_totals(self.local_layers(params, batch).auxiliary, batch)

        return self.sharded(local, PartitionSpec())(params, batch)

    def sharded(self, fn: Callable, out_specs: Any) -> Callable:
        """Returns fn, which takes a device's shards and part of a batch, as a function of global
        parameters and a global batch."""

        def run(params, batch):
            specs = {name: PartitionSpec() if name == ROUTER_TOTALS else TOKENS for name in batch}
            return jax.shard_map(
                fn,
                mesh=self.mesh,
                in_specs=(self.specs, specs),
                out_specs=out_specs,
                check_vma=False,
            )(params, batch)

        return run
