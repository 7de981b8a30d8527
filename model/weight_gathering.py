"""From a device's parameter shards to the weights of its products."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .config import LAYERS, TransformerConfig
from .frozen import FrozenWeight, Plain, Weight
from .padding import own_key_head, trim
from .parameter_declarations import declare_layer
from .quantized_weights import assemble, quantized_names, weight_of
from .sharding import OnHost, Parameter, TensorParallel, gather, gather_frozen, to_device

Shards = dict[str, jax.Array | OnHost]


@dataclasses.dataclass(frozen=True)
class WeightGatherer:
    """Gathers parameters; its methods run inside `shard_map`.

    Attributes:
      config: the sizes, without padding, of the model or of a stack of its layers.
      parameters, specs: of all parameters, in memory.
      dtype: the precision in which trained weights are sent; they are float32 by type
        (`sharding.gather`).
      prefix: of the names of the stack's parameters.
    """

    config: TransformerConfig
    parallel: TensorParallel
    parameters: dict[str, Parameter]
    specs: dict[str, PartitionSpec]
    dtype: Any
    prefix: str = LAYERS

    def gather_named(self, params: Shards, names: Iterable[str]) -> dict[str, Weight]:
        """Returns these parameters whole, without padding of the hidden axis."""
        with jax.named_scope("gather_weights"):
            return {
                name: self._weight(
                    name,
                    self._gather(name, params[name], self.specs[name]),
                    self.parameters[name].axes,
                )
                for name in names
            }

    def of_layers(self, params: Shards) -> Shards:
        """Returns the parameters of the stack's layers, named as within a layer."""
        return {
            name.removeprefix(self.prefix): params[name]
            for name in self.parameters
            if name.startswith(self.prefix)
        }

    def gather_layer(self, shards: Shards) -> dict[str, Weight]:
        """Returns one layer's weights whole, from its shards, without the axis of the layers; both
        named as within the layer. They are gathered once per layer and direction."""
        return self.layer_weights(self.gather_layer_arrays(shards))

    def gather_layer_arrays(self, shards: Shards) -> dict[str, jax.Array]:
        """Returns one layer's parameters whole, from its shards. Quantized ones are gathered as
        codes."""
        with jax.named_scope("gather_weights"):
            return {
                name: self._gather(self.prefix + name, shard, self.layer_spec(name))
                for name, shard in shards.items()
            }

    def layer_weights(self, whole: dict[str, jax.Array]) -> dict[str, Weight]:
        """Returns a layer's weights from gathered arrays, without padding of the hidden axis, with
        frozen ones marked."""
        # In one order, so that each process compiles the same program.
        quantized = quantized_names(whole)
        plain = {
            name: self._weight(self.prefix + name, array, self._of(name).axes[1:])
            for name, array in whole.items()
            if weight_of(name) not in quantized
        }
        return {**plain, **{name: self._quantized(name, whole) for name in quantized}}

    def is_frozen(self, name: str) -> bool:
        """Whether a layer's parameter, named as within the layer, is frozen."""
        return self._of(name).frozen

    def _of(self, name: str) -> Parameter:
        """The stacked parameter of this name within a layer."""
        return self.parameters[self.prefix + name]

    def _gather(self, name: str, shard: jax.Array | OnHost, spec: PartitionSpec) -> jax.Array:
        shard = to_device(shard)
        return (
            gather_frozen(shard, spec)
            if self.parameters[name].frozen
            else gather(shard, spec, self.dtype)
        )

    def _weight(self, name: str, array: jax.Array, axes: tuple[str, ...]) -> Weight:
        array = trim(array, axes, self.config, self.parallel)
        return Plain(array) if self.parameters[name].frozen else array

    def _quantized(self, name: str, whole: dict[str, jax.Array]) -> FrozenWeight:
        """A layer's quantized weight, from all of its gathered parts."""
        prefix = f"{name}."
        own = declare_layer(self.config)[name]
        parts = [key for key in whole if key.startswith(prefix)]
        weight = assemble(
            name,
            {key.removeprefix(prefix): whole[key] for key in parts},
            own,
            {key.removeprefix(prefix): self._of(key).shape[1:] for key in parts},
            self.layer_spec(f"{name}.codes"),
        )
        return own_key_head(weight, own.axes, self.parallel)

    def layer_spec(self, name: str) -> PartitionSpec:
        """Returns the spec of one layer's shards, without the axis of the layers."""
        return PartitionSpec(*self.specs[self.prefix + name][1:])
