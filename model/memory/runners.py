"""Which runner serves the memory options."""
from __future__ import annotations

from model.layer import Layer
from model.weights import Weights

from .head_groups import HeadGroupRunner
from .layer_runner import LayerRunner, ScanRunner
from .prefetch import PrefetchRunner
from .query_chunks import QueryChunkRunner


def layer_runner(layer: Layer, weights: Weights) -> LayerRunner:
    """Returns what runs all layers as the layer's memory options say; `options.check_combination` has let them pass."""
    memory = layer.memory
    if memory.prefetch:
        return PrefetchRunner(layer, weights)
    if memory.query_chunks > 1:
        return QueryChunkRunner(layer, weights)
    if memory.attention_groups > 1:
        return HeadGroupRunner(layer, weights)
    return ScanRunner(layer, weights)
