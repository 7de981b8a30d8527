"""Chooses the runner for the memory options."""

from __future__ import annotations

from model.layer import ShardedLayer
from model.weight_gathering import WeightGatherer

from .head_groups import HeadGroupRunner
from .layer_runner import LayerRunner, ScanRunner
from .prefetch import PrefetchRunner
from .query_chunks import QueryChunkRunner


def layer_runner(layers: tuple[ShardedLayer, ...], weights: WeightGatherer) -> LayerRunner:
    """Returns the runner of all layers for memory options that `options.check_combination`
    accepted.

    Args:
      layers: one of each kind, in their repeating order.
      weights: of the same model; gathers a layer's parameters where the runner asks for them.
    """
    memory = layers[0].memory
    if memory.prefetch:
        return PrefetchRunner(layers, weights)
    if memory.query_chunks > 1:
        return QueryChunkRunner(layers, weights)
    if memory.attention_groups > 1:
        return HeadGroupRunner(layers, weights)
    return ScanRunner(layers, weights)
