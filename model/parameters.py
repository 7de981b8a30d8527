"""A model's parameters on a mesh: their declaration, placement and initialization."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from .adapter import MAGNITUDE
from .config import LayerStack, TransformerConfig
from .modules import LAYER_MODULES
from .padding import pad, sizes_in_memory, whole_heads
from .parameter_declarations import (
    EmbedAndHeadFactory,
    bind,
    declare,
    declare_layer,
    flat,
    module_of,
    unpadded_shapes,
)
from .quantized_weights import quantized, weight_of
from .sharding import (
    STORAGE_AXES,
    Parameter,
    Sharding,
    TensorParallel,
    storage_spec,
    without_storage,
)
from .weight_gathering import Shards, WeightGatherer


@dataclasses.dataclass(frozen=True)
class ModelParameters(abc.ABC):
    """A model's parameters on a mesh, in one flat dictionary of sharded arrays. `Transformer`
    computes with them.

    Attributes:
      config: the model's sizes, with its adapter.
      dtype: the compute dtype; trained parameters stay float32.
      storage_axes: mesh axes over which parameter storage is split.
    """

    config: TransformerConfig
    mesh: Mesh
    _: dataclasses.KW_ONLY
    dtype: Any = jnp.bfloat16
    storage_axes: tuple[str, ...] = STORAGE_AXES

    @property
    @abc.abstractmethod
    def embed_and_head_factory(self) -> EmbedAndHeadFactory:
        """Makes the module that declares the parameters before and after the layers."""

    @functools.cached_property
    def sharding(self) -> Sharding:
        """How parameters are split over the mesh."""
        return Sharding(self.mesh, self.config, self.storage_axes)

    @property
    def parallel(self) -> TensorParallel:
        """What the tensor axis splits."""
        return self.sharding.parallel

    @property
    def in_memory(self) -> TransformerConfig:
        """The sizes of `parameters`, padding included (`model.padding`)."""
        return sizes_in_memory(self.sharding)

    @functools.cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every parameter as it is in memory, padding included. Frozen ones are stored and sent in
        the compute dtype; constants stay float32."""
        return {
            name: dataclasses.replace(parameter, dtype=jnp.dtype(self.dtype).name)
            if parameter.frozen and not parameter.constant and weight_of(name) == name
            else parameter
            for name, parameter in declare(self.in_memory, self.embed_and_head_factory).items()
        }

    @functools.cached_property
    def quantized_names(self) -> tuple[str, ...]:
        """The names of the quantized weights, each stored as several arrays
        (`model.quantized_weights`)."""
        return tuple(sorted({weight_of(name) for name in self.parameters} - set(self.parameters)))

    @functools.cached_property
    def unpadded_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter without padding."""
        return unpadded_shapes(self.config, self.embed_and_head_factory)

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
        specs = {
            name: storage_spec(spec, self.parameters[name].axes)
            for name, spec in self.specs.items()
        }
        return WeightGatherer(self.config, self.parallel, self.parameters, specs, self.dtype)

    def weights_of(self, stack: LayerStack) -> WeightGatherer:
        """Returns how a stack's shards become whole weights."""
        return dataclasses.replace(self.weights, config=stack.config, prefix=stack.prefix)

    def quantized(self, stored: Mapping[str, Any]) -> dict[str, Shaped[Array, ...]]:
        """Returns the codes of the weights `quantized_names`, if any, on their devices.

        Args:
          stored: the stacked layers' weights by name, as in `model.quantized_weights.quantized`.
        """
        if self.config.adapter is None or self.config.adapter.quantize == "none":
            return {}
        own = {
            stack.prefix + name: (stack.layers, *parameter.shape)
            for stack in self.config.stacks
            for name, parameter in declare_layer(stack.config).items()
        }
        return quantized(
            stored,
            self.config.adapter.quantize,
            {name: own[name] for name in self.quantized_names},
            self.parameters,
            self.shardings,
        )

    def init(self, seed: int) -> dict[str, Float[Array, ...]]:
        """Returns freshly initialized, sharded parameters, drawn without padding so that the mesh
        changes no number."""
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
            arrays = draw(self.config, key, self.embed_and_head_factory)
            return {
                name: pad(array, self.parameters[name].shape).astype(self.parameters[name].dtype)
                for name, array in arrays.items()
            }

        params = jax.jit(padded, out_shardings=self.shardings)(jax.random.key(seed))
        return {**params, **self.init_magnitudes(params)}

    def _with_padding(self, name: str, drawn: Float[Array, ...]) -> Float[Array, ...]:
        """Returns a parameter in its dtype, with this model's padding instead of another's."""
        unpadded, parameter = tuple(map(slice, self.unpadded_shapes[name])), self.parameters[name]
        padded = jax.jit(
            lambda x: pad(x[unpadded], parameter.shape).astype(parameter.dtype),
            out_shardings=self.shardings[name],
        )
        return padded(drawn)

    def init_adapters(self, seed: int) -> dict[str, Float[Array, ...]]:
        """Returns fresh adapters, those of `init`; none if the model has none."""

        def padded(key):
            return {
                name: pad(array, self.parameters[name].shape)
                for name, array in draw_adapters(self.config, key).items()
            }

        key = jax.random.key(seed)
        shardings = {name: self.shardings[name] for name in jax.eval_shape(padded, key)}
        return jax.jit(padded, out_shardings=shardings)(key)

    def init_magnitudes(
        self, params: dict[str, Shaped[Array, ...]]
    ) -> dict[str, Float[Array, ...]]:
        """Returns DoRA's initial magnitudes, the norms of the columns of W + s A B; {} without
        DoRA.

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
            by_stack = (self._local_norms(stack, names, shards) for stack in self.config.stacks)
            return {name: x for norms in by_stack for name, x in norms.items()}

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

    def _local_norms(
        self, stack: LayerStack, names: list[str], shards: Shards
    ) -> dict[str, jax.Array]:
        """A stack's DoRA magnitudes, of those of these names, from a device's shards."""
        weights = self.weights_of(stack)
        names = [name for name in names if name.startswith(stack.prefix)]

        def of_layer(layer_shards):
            layer = bind(stack.config, weights.gather_layer(layer_shards))
            return [
                whole_heads(
                    module_of(layer, name.removeprefix(stack.prefix)).norms(
                        self.parallel, self.dtype
                    ),
                    self.parameters[name].axes[1:],
                    self.parallel,
                )
                for name in names
            ]

        of_stack = {
            name.removeprefix(stack.prefix): x
            for name, x in shards.items()
            if name.startswith(stack.prefix)
        }
        return dict(zip(names, lax.map(of_layer, of_stack), strict=True))


def draw(
    config: TransformerConfig, key: jax.Array, embed_and_head: EmbedAndHeadFactory
) -> dict[str, Float[Array, ...]]:
    """Returns fresh float32 parameters: normal with `initializer_range`, norms 1, biases 0,
    adapters from `draw_adapters`. To be jitted with output shardings."""
    outer_key, layers_key = jax.random.split(key)

    def init_layer(stack, key):
        layer = nnx.state(LAYER_MODULES[config.norms](stack.config, rngs=nnx.Rngs(key)))
        return {stack.prefix + name: leaf[...] for name, leaf in flat(layer).items()}

    keys = jax.random.split(layers_key, config.num_hidden_layers)
    layers: dict[str, Float[Array, ...]] = {}
    for stack in config.stacks:
        keys_of_stack = keys[stack.first : stack.first + stack.layers]
        layers |= jax.vmap(functools.partial(init_layer, stack))(keys_of_stack)
    outside = {
        name: leaf[...]
        for name, leaf in flat(nnx.state(embed_and_head(config, rngs=nnx.Rngs(outer_key)))).items()
    }
    return dict(sorted({**outside, **layers, **draw_adapters(config, key)}.items()))


def draw_adapters(config: TransformerConfig, key: jax.Array) -> dict[str, Float[Array, ...]]:
    """Returns fresh adapters as PEFT draws them: A uniform within 1 / sqrt(inputs), each expert's
    too, B zero; DoRA's magnitudes follow from the weights (`ModelParameters.init_magnitudes`). To
    be jitted with output shardings."""
    adapters = {
        stack.prefix + name: (stack.layers, parameter)
        for stack in config.stacks
        for name, parameter in declare_layer(stack.config).items()
        if name.endswith((".lora_A", ".lora_B"))
    }

    def drawn(i, name, layers, parameter):
        shape = (layers, *parameter.shape)
        if name.endswith("lora_B"):
            return jnp.zeros(shape, jnp.float32)
        inputs = [
            size
            for size, axis in zip(parameter.shape, parameter.axes, strict=True)
            if axis not in ("experts", "rank")
        ]
        bound = math.prod(inputs) ** -0.5
        return jax.random.uniform(jax.random.fold_in(key, i), shape, jnp.float32, -bound, bound)

    return {name: drawn(i, name, *adapters[name]) for i, name in enumerate(sorted(adapters))}
