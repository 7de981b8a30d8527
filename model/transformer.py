"""A transformer of LLaMA's layers on a mesh, without saying what its inputs and its loss are: `Transformer`.

Everything between inputs and loss runs inside one `shard_map`: a device has its rows (data, fsdp), its tokens (sequence), and
its heads and width (tensor). Parameters are one flat dictionary of sharded arrays, which `modules` declares.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from .adapter import MAGNITUDE
from .attention import AttentionOp, Mask, TokenCoords, document_starts
from .attention.kernels import Kernel, get_kernel
from .config import TransformerConfig
from .dropout import TokenInfo
from .feedforward import QK_NORMS, Auxiliary
from .layer import LayerOutput, ShardedLayer
from .memory.options import MemoryConfig, check_combination
from .memory.runners import layer_runner
from .modules import (
    LAYERS,
    EndsFactory,
    bind,
    declare,
    declare_layer,
    init,
    init_adapters,
    module_of,
    own_shapes,
)
from .padding import pad, sizes_in_memory, whole_heads
from .quantized_weights import quantized, weight_of
from .sharding import BATCH_AXES, STORAGE_AXES, Parameter, Sharding, TensorParallel, without_storage
from .weights import Shards, WeightGatherer

# How arrays [B, L, ...] of a batch are split.
TOKENS = PartitionSpec(BATCH_AXES, "sequence")
# Arrays [B, L, ...] by name: `positions`, `index`, `segment_ids`, `dropout` in training with it (`model.dropout`), and what a
# model adds (see ARCHITECTURE.md).
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Transformer(abc.ABC):
    """LLaMA's layers on a mesh; a model adds what is before and after them. Methods called `local_*` run inside `shard_map`,
    on a device's shards.

    Attributes:
      schedule, kernel, mask: see `model.attention`; the mask is the model's common window unless given. Layers that have a
        window of their own see what both windows show.
      dtype: the compute dtype; parameters that are trained stay float32.
      memory: what is kept for the backward pass, and in what pieces the rest is computed.
      storage_axes: mesh axes that the storage of parameters is split over.
      sequence_parallel: Megatron's (`TensorParallel.split_tokens`): hidden states are split over `tensor` too, along the
        length. Layers are then not computed in chunks of tokens, the loss still is.

    Raises:
      ValueError: a schedule that cannot serve the sequence axis; `sequence_parallel` where `tensor` does not split the heads
        and the feed-forward width; memory options that do not fit the model or each other.
    """

    config: TransformerConfig
    mesh: Mesh
    schedule: Any = "ring"
    kernel: Kernel = dataclasses.field(default_factory=get_kernel)
    dtype: Any = jnp.bfloat16
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    storage_axes: tuple[str, ...] = STORAGE_AXES
    sequence_parallel: bool = False
    # None until __post_init__ fills it in.
    mask: Mask = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.mask is None:
            object.__setattr__(self, "mask", Mask(window=self.config.common_window))
        parallel = self.parallel
        check_combination(
            self.memory,
            layers=self.config.num_hidden_layers,
            period=len(self.config.layer_kinds),
            key_heads=parallel.local_key_heads,
            schedule=self.schedule,
            sequence=self.mesh.shape["sequence"],
            sequence_parallel=parallel.split_tokens,
        )
        if self.config.adapter is not None:
            self.config.adapter.check_train(list(self.own_shapes))
        if (
            (norm := QK_NORMS[self.config.qk_norm])
            and norm.needs_all_heads
            and self.memory.attention_groups > 1
        ):
            raise ValueError(
                f"memory.attention_groups: found {self.memory.attention_groups}; the family {self.config.family} "
                "normalises all heads together, so it needs 1"
            )
        if parallel.split_tokens and not (parallel.heads and parallel.mlp):
            config = self.config
            size = (
                f"width, {config.intermediate_size}"
                if parallel.heads
                else f"heads, {config.num_attention_heads}"
            )
            raise ValueError(
                f"mesh.sequence_parallel: found true, and mesh.tensor = {parallel.tensor} does not divide the "
                f"model's {size}; false would work"
            )

    # What the model is made of

    @property
    @abc.abstractmethod
    def ends(self) -> EndsFactory:
        """Makes the module that declares the parameters before and after the layers."""

    @functools.cached_property
    def sharding(self) -> Sharding:
        """Where parameters lie."""
        return Sharding(self.mesh, self.config, self.storage_axes)

    @property
    def parallel(self) -> TensorParallel:
        """What the tensor axis splits."""
        return dataclasses.replace(
            self.sharding.parallel,
            split_tokens=self.sequence_parallel and self.mesh.shape["tensor"] > 1,
        )

    @property
    def in_memory(self) -> TransformerConfig:
        """The sizes of `parameters`, padding included (`model.padding`)."""
        return sizes_in_memory(self.sharding)

    @functools.cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every parameter as it is in memory, padding included. Frozen ones lie in the dtype that they are sent in."""
        return {
            name: dataclasses.replace(parameter, dtype=jnp.dtype(self.dtype).name)
            if parameter.frozen and weight_of(name) == name
            else parameter
            for name, parameter in declare(self.in_memory, self.ends).items()
        }

    @functools.cached_property
    def quantized_names(self) -> tuple[str, ...]:
        """The names of the weights that are quantized, in arrays of their own (`model.quantized_weights`)."""
        return tuple(sorted({weight_of(name) for name in self.parameters} - set(self.parameters)))

    @functools.cached_property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter without padding."""
        return own_shapes(self.config, self.ends)

    @functools.cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """The spec of each parameter."""
        return self.sharding.specs(self.parameters)

    @functools.cached_property
    def shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each parameter."""
        return self.sharding.shardings(self.parameters)

    @property
    def weights(self) -> WeightGatherer:
        """How shards become whole weights."""
        return WeightGatherer(self.config, self.parallel, self.parameters, self.specs, self.dtype)

    def attention(self, window: int | None = None) -> AttentionOp:
        """Returns attention over the shards of the sequence axis, within a layer's own window too."""
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

    def layers(self, length: int) -> tuple[ShardedLayer, ...]:
        """Returns one layer of each kind, in the period that they repeat in, for whole rows of `length` tokens."""
        return tuple(
            ShardedLayer(
                self.config,
                self.parallel,
                self.memory,
                self.dtype,
                self.attention(kind.window),
                kind.rope,
                length,
            )
            for kind in self.config.layer_kinds
        )

    def quantized(self, stored: Mapping[str, Any]) -> dict[str, Shaped[Array, ...]]:
        """Returns the codes of the weights `quantized_names` on their devices; none if there are none.

        Args:
          stored: the stacked layers' weights by name, as of `model.quantized_weights.quantized`.
        """
        if self.config.adapter is None or self.config.adapter.quantize == "none":
            return {}
        own = {
            LAYERS + name: (self.config.num_hidden_layers, *parameter.shape)
            for name, parameter in declare_layer(self.config).items()
        }
        return quantized(
            stored,
            self.config.adapter.quantize,
            {name: own[name] for name in self.quantized_names},
            self.parameters,
            self.shardings,
        )

    def init(self, seed: int) -> dict[str, Float[Array, ...]]:
        """Returns freshly initialised, sharded parameters. They are drawn at the model's own sizes, so that the mesh changes no
        number."""
        if self.config.adapter is not None and self.config.adapter.quantize != "none":
            adapter = dataclasses.replace(self.config.adapter, quantize="none")
            config = dataclasses.replace(self.config, adapter=adapter)
            drawn = dataclasses.replace(self, config=config, dtype=jnp.float32).init(seed)
            params = {
                name: self._with_padding(name, x)
                for name, x in drawn.items()
                if name in self.parameters
            }
            params |= self.quantized(drawn)
            return dict(sorted({**params, **self.init_magnitudes(params)}.items()))

        def padded(key):
            arrays = init(self.config, key, self.ends)
            return {
                name: pad(array, self.parameters[name].shape).astype(self.parameters[name].dtype)
                for name, array in arrays.items()
            }

        params = jax.jit(padded, out_shardings=self.shardings)(jax.random.key(seed))
        return {**params, **self.init_magnitudes(params)}

    def _with_padding(self, name: str, drawn: Float[Array, ...]) -> Float[Array, ...]:
        """Returns a parameter in its dtype, with the padding of this model instead of another's."""
        own, parameter = tuple(map(slice, self.own_shapes[name])), self.parameters[name]
        padded = jax.jit(
            lambda x: pad(x[own], parameter.shape).astype(parameter.dtype),
            out_shardings=self.shardings[name],
        )
        return padded(drawn)

    def init_adapters(self, seed: int) -> dict[str, Float[Array, ...]]:
        """Returns fresh adapters, those of `init`; none if the model has none."""

        def padded(key):
            return {
                name: pad(array, self.parameters[name].shape)
                for name, array in init_adapters(self.config, key).items()
            }

        names = jax.eval_shape(padded, jax.random.key(seed))
        return jax.jit(padded, out_shardings={name: self.shardings[name] for name in names})(
            jax.random.key(seed)
        )

    def init_magnitudes(
        self, params: dict[str, Shaped[Array, ...]]
    ) -> dict[str, Float[Array, ...]]:
        """Returns the lengths that DoRA begins with, those of the columns of W + s A B; none if the model's adapters have none.

        Args:
          params: all other parameters, on their devices.
        """
        names = [name for name in self.parameters if name.endswith(MAGNITUDE)]
        if not names:
            return {}
        parts = {name.rpartition(".")[0] for name in names}
        taken = [
            name
            for name in self.parameters
            if name not in names and weight_of(name).rpartition(".")[0] in parts
        ]
        specs = {name: without_storage(self.specs[name]) for name in names}

        def local(shards):
            def of_layer(layer_shards):
                layer = bind(self.config, self.weights.layer(layer_shards))
                return [
                    whole_heads(
                        module_of(layer, name.removeprefix(LAYERS)).norms(
                            self.parallel, self.dtype
                        ),
                        self.parameters[name].axes[1:],
                        self.parallel,
                    )
                    for name in names
                ]

            stacked = {name.removeprefix(LAYERS): x for name, x in shards.items()}
            return dict(zip(names, lax.map(of_layer, stacked), strict=True))

        def padded(shards):
            norms = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=({name: self.specs[name] for name in taken},),
                out_specs=specs,
                check_vma=False,
            )(shards)
            return {name: pad(x, self.parameters[name].shape) for name, x in norms.items()}

        shardings = {name: self.shardings[name] for name in names}
        return jax.jit(padded, out_shardings=shardings)({name: params[name] for name in taken})

    # On a device

    def local_coords(self, batch: Batch) -> TokenCoords:
        """Returns the coordinates of this device's tokens; for global tokens also their documents' starts, from the whole
        row."""
        coords = TokenCoords(batch["index"], batch["segment_ids"])
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
        """Returns the last layer's hidden states, and the auxiliary sums of all layers."""
        labels = TokenInfo(batch["positions"], batch.get("dropout"))
        runner = layer_runner(
            self.layers(labels.positions.shape[1] * self.mesh.shape["sequence"]), self.weights
        )
        x = self.local_embed(params, batch)
        output = runner.run(self.weights.of_layers(params), x, labels, self.local_coords(batch))
        return output._replace(hidden=self.parallel.whole(output.hidden))

    def auxiliary_losses(self, sums: Auxiliary) -> dict[str, Float[Array, ""]]:
        """Returns this device's summands of the losses that the layers' auxiliary sums make, by name: float32, on the scale of
        the weighted sum of the tokens' losses, which they are added to. Dense layers give no sums, and make no losses.

        Args:
          sums: of all layers, stacked [N, ...], over this device's tokens.
        """
        assert not sums, f"no loss is made of {', '.join(sums)}"
        return {}

    def _sharded(self, fn: Callable, out_specs: Any) -> Callable:
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=(self.specs, TOKENS), out_specs=out_specs, check_vma=False
        )
