"""The FLOPs of a training step, for metrics, plans, the cost model and benchmarks.

As in MFU, only the model's work counts: no recomputation, no masked pairs (Chowdhery et al., PaLM,
arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

import numpy as np

from model.adapter import ATTENTION, FEED_FORWARD
from model.attention import Mask
from model.config import TransformerConfig
from model.parameter_declarations import LAYERS, declare


def visible_pairs(lengths: np.ndarray, mask: Mask = Mask()) -> int:
    """The query-key pairs that a causal mask allows in documents of these lengths (tokens)."""
    lengths = np.asarray(lengths).astype(np.int64)  # 100M tokens make 5e15 pairs
    pairs = int((lengths * (lengths + 1) // 2).sum())
    # The last query misses this many keys, the one before it one fewer, ...
    if mask.window is not None:
        missed = np.maximum(lengths - mask.window - mask.global_tokens, 0)
        pairs -= int((missed * (missed + 1) // 2).sum())
    return pairs


def pairs_per_layer(
    config: TransformerConfig,
    lengths: np.ndarray,
    mask: Mask = Mask(),
    shared: np.ndarray | int = 0,
) -> float:
    """The number of visible query-key pairs, averaged over layers with different windows.

    Args:
      lengths: tokens of each document.
      shared: how many tokens of an earlier document, computed there, each document also sees.
    """
    kinds = config.layer_kinds
    before = np.broadcast_to(shared, np.shape(lengths))
    pairs = [
        visible_pairs(lengths + before, mask.within(kind.window))
        - visible_pairs(before, mask.within(kind.window))
        for kind in kinds
    ]
    return (
        sum(pairs[i % len(kinds)] for i in range(config.num_hidden_layers))
        / config.num_hidden_layers
    )


def layer_weights(config: TransformerConfig) -> int:
    """The weights of one layer, one with experts if some have them, that a token passes through.

    These are attention's projections, and the feed-forward network or the router, the token's
    experts and shared experts.
    """
    query_width = config.num_attention_heads * config.head_dim
    key_value_width = config.num_key_value_heads * config.head_dim
    return config.hidden_size * (
        2 * query_width
        + 2 * key_value_width
        + 3 * config.active_width
        + config.num_experts
        + (config.shared_expert_gate and config.num_experts > 0)
    )


def stored_layer_weights(config: TransformerConfig) -> int:
    """The weights in all matrices of one layer, as in `layer_weights`, all experts included."""
    idle = config.num_experts - (config.num_experts_per_tok or 0) if config.num_experts else 0
    return layer_weights(config) + 3 * config.hidden_size * config.expert_width * idle


def all_layers(config: TransformerConfig, count: Callable[[TransformerConfig], float]) -> float:
    """The sum over all layers of what `count` finds in one layer, given the stack that has it."""
    return sum(stack.layers * count(stack.config) for stack in config.stacks)


def head_weights(config: TransformerConfig) -> int:
    """The number of weights in the matrix that makes logits."""
    return config.hidden_size * config.vocab_size


def training_flops(
    weights: float, attention_width: float, tokens: float, pairs: float, frozen: float = 0
) -> float:
    """FLOPs of one training step, forward and backward.

    Per token, a weight of a matrix takes 2 forward and 4 backward. A visible pair takes 4 per query
    element forward (a product for the score and one for the value) and 8 backward.

    Args:
      weights: of all matrices that tokens pass through, which excludes the embedding.
      attention_width: layers x query heads x head size.
      tokens: all tokens except padding, in the loss or not.
      pairs: visible query-key pairs, of one layer and head.
      frozen: the number of weights without a gradient, which saves 2 FLOPs per token each.
    """
    return (6.0 * weights - 2.0 * frozen) * tokens + 12.0 * attention_width * pairs


def frozen_weights(config: TransformerConfig, frozen: Collection[str]) -> int:
    """The weights that a token passes through and that have no gradient.

    Args:
      frozen: names of the parameters that are not trained.
    """
    head = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    total = 0
    for name, parameter in declare(dataclasses.replace(config, adapter=None)).items():
        used = parameter.is_matrix and (name == head or name.startswith(LAYERS))
        if used and name in frozen:
            size = math.prod(parameter.shape)
            if "experts" in parameter.axes:
                assert config.num_experts_per_tok is not None
                size = size // config.num_experts * config.num_experts_per_tok
            total += size
    return total


def flops_per_step(
    config: TransformerConfig, tokens: float, pairs: float, frozen: float | None = None
) -> float:
    """FLOPs of one training step of this model.

    `tokens` and `pairs` are as in `training_flops`.

    Args:
      frozen: `frozen_weights`; by default all but adapters', if the model has adapters.
    """
    base = all_layers(config, layer_weights) + head_weights(config)
    adapters, adapter = 0, config.adapter
    for name in adapter.projections if adapter is not None else ():
        assert adapter is not None
        copies = (config.num_experts_per_tok or 1) if name in FEED_FORWARD else 1
        size = adapter.rank * sum(config.projection_sizes(name))
        layers = config.num_hidden_layers
        if name not in ATTENTION and config.num_experts:
            layers = config.expert_layers
        adapters += layers * copies * size
    attention_width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    if frozen is None:
        frozen = base if adapters else 0
    return training_flops(base + adapters, attention_width, tokens, pairs, frozen)
