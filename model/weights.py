"""How a device's shards of parameters become the weights that its products take."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .config import LlamaConfig
from .modules import LAYERS
from .padding import trim
from .sharding import OnHost, Parallel, Parameter, gather, to_device

Shards = dict[str, jax.Array | OnHost]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Gathers parameters; its methods run inside `shard_map`.

    Attributes:
      config: the model's own sizes; parameters, specs: of all parameters, in memory.
      dtype: the precision that weights are sent in; they are float32 by type (`sharding.gather`).
    """

    config: LlamaConfig
    parallel: Parallel
    parameters: dict[str, Parameter]
    specs: dict[str, PartitionSpec]
    dtype: Any

    def whole(self, params: Shards, names: Iterable[str]) -> dict[str, jax.Array]:
        """Returns these parameters whole, without their padding of the hidden axis."""
        with jax.named_scope("gather_weights"):
            return {name: trim(gather(to_device(params[name]), self.specs[name], self.dtype), self.parameters[name].axes,
                               self.config, self.parallel) for name in names}

    def of_layers(self, params: Shards) -> Shards:
        """Returns the parameters of the layers, stacked, named as within a layer."""
        return {name.removeprefix(LAYERS): params[name] for name, parameter in self.parameters.items()
                if "layers" in parameter.axes}

    def layer(self, shards: Shards) -> dict[str, jax.Array]:
        """Returns one layer's weights whole, from its shards; both named as within the layer. They are gathered once for all
        that the layer does in one direction."""
        with jax.named_scope("gather_weights"):
            return self.trim_layer({name: gather(to_device(shard), self.layer_spec(name), self.dtype)
                                    for name, shard in shards.items()})

    def trim_layer(self, whole: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns a layer's gathered weights without the padding of their hidden axis."""
        return {name: trim(weight, self.parameters[LAYERS + name].axes[1:], self.config, self.parallel)
                for name, weight in whole.items()}

    def layer_spec(self, name: str) -> PartitionSpec:
        """Returns the spec of one layer's shards, without the axis of the layers."""
        return PartitionSpec(*self.specs[LAYERS + name][1:])
