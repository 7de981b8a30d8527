"""How the stack of decoder layers is run: the contract, and the plain scan over layers."""

from __future__ import annotations

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from model.attention import TokenCoords
from model.dropout import TokenInfo
from model.layer import LayerOutput, ShardedLayer
from model.weight_gathering import Shards, WeightGatherer

from .remat import scan_layers


@dataclasses.dataclass(frozen=True)
class LayerRunner(abc.ABC):
    """Runs all decoder layers on a device's tokens, inside `shard_map`.

    All runners compute the same function; they differ in what they keep for the backward pass, and
    in the pieces a layer runs in.

    Attributes:
      layers: one layer of each kind: layer i is run by layers[i % P], with P of them.
      weights: makes a layer's weights whole.
    """

    layers: tuple[ShardedLayer, ...]
    weights: WeightGatherer

    @abc.abstractmethod
    def run(
        self, shards: Shards, x: Float[Array, "B T E"], info: TokenInfo, coords: TokenCoords
    ) -> LayerOutput:
        """Returns the last layer's hidden states, and the auxiliary sums of all layers.

        Args:
          shards: of all layers' parameters, stacked, named as within the layer.
          x: the input of the first layer; info: the tokens', not yet of a layer.
        """


class ScanRunner(LayerRunner):
    """Scans over the layers, and keeps for the backward pass what the remat policy names
    (`remat.py`).

    The scan's carry has the token coordinates next to the hidden states. A mask computed from
    values outside the carry would be loop-invariant, and differentiating the scan would hoist it
    and keep it for every layer.
    """

    def run(self, shards, x, info, coords):
        def body(layer, carry, of_layer):
            x, info, coords = carry
            shards, number = of_layer
            x = checkpoint_name(x, "layer_input")
            y, auxiliary = self.run_layer(
                layer, self.weights.gather_layer(shards), x, info.of_layer(number), coords
            )
            return (y, info, coords), auxiliary

        memory = self.layers[0].memory
        bodies = [functools.partial(body, layer) for layer in self.layers]
        numbers = None if info.dropout is None else jnp.arange(jax.tree.leaves(shards)[0].shape[0])
        (y, *_), auxiliary = scan_layers(
            bodies, (x, info, coords), (shards, numbers), memory.remat, memory.every_k
        )
        return LayerOutput(y, auxiliary)

    def run_layer(
        self,
        layer: ShardedLayer,
        weights: dict[str, jax.Array],
        x: Float[Array, "B T E"],
        info: TokenInfo,
        coords: TokenCoords,
    ) -> LayerOutput:
        """Returns one layer's output from its whole weights."""
        return layer(weights, x, info, coords)
