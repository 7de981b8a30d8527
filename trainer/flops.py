"""The floating-point operations that a training step needs: the one formula, for metrics, plans, the cost model and benchmarks.

Only work that the model itself asks for is counted, as MFU has it: neither what remat computes again nor masked pairs
(Chowdhery et al., PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import numpy as np

from model.attention import Mask
from model.config import TransformerConfig


def visible_pairs(lengths: np.ndarray, mask: Mask = Mask()) -> int:
    """The number of query-key pairs that a causal mask shows within documents of these lengths (in tokens)."""
    lengths = np.asarray(lengths).astype(np.int64)  # 100M tokens make 5e15 pairs
    pairs = int((lengths * (lengths + 1) // 2).sum())
    if (
        mask.window is not None
    ):  # the last query misses so many keys, the one before it one fewer, ...
        missed = np.maximum(lengths - mask.window - mask.global_tokens, 0)
        pairs -= int((missed * (missed + 1) // 2).sum())
    return pairs


def pairs_per_layer(config: TransformerConfig, lengths: np.ndarray, mask: Mask = Mask()) -> float:
    """The number of visible query-key pairs, averaged over layers that may have windows of their own."""
    kinds = config.layer_kinds
    pairs = [visible_pairs(lengths, mask.within(kind.window)) for kind in kinds]
    return (
        sum(pairs[i % len(kinds)] for i in range(config.num_hidden_layers))
        / config.num_hidden_layers
    )


def layer_weights(config: TransformerConfig) -> int:
    """The number of weights in the matrices of one layer that a token is multiplied with:
    attention's projections, and the feed-forward network or the router and the token's experts."""
    query_width = config.num_attention_heads * config.head_dim
    key_value_width = config.num_key_value_heads * config.head_dim
    widths = (config.num_experts_per_tok or 1) * config.expert_width
    return config.hidden_size * (
        2 * query_width + 2 * key_value_width + 3 * widths + config.num_experts
    )


def stored_layer_weights(config: TransformerConfig) -> int:
    """The number of weights in all matrices of one layer, those of all experts among them."""
    idle = config.num_experts - (config.num_experts_per_tok or 0) if config.num_experts else 0
    return layer_weights(config) + 3 * config.hidden_size * config.expert_width * idle


def head_weights(config: TransformerConfig) -> int:
    """The number of weights in the matrix that makes logits."""
    return config.hidden_size * config.vocab_size


def training_flops(
    weights: float, attention_width: float, tokens: float, pairs: float, frozen: float = 0
) -> float:
    """FLOPs of one training step, forward and backward.

    A weight of a matrix takes 2 a token forward and 4 backward. A visible pair takes 4 for each number of a query forward
    (a product for the score and one for the value) and 8 backward.

    Args:
      weights: of all matrices that tokens are multiplied by; an embedding that is only looked up is none.
      attention_width: layers x query heads x head size.
      tokens: all tokens but padding, whether in the loss or not.
      pairs: visible query-key pairs, of one layer and head.
      frozen: how many of the weights have no gradient, which saves 2 FLOPs a token for each.
    """
    return (6.0 * weights - 2.0 * frozen) * tokens + 12.0 * attention_width * pairs


def flops_per_step(config: TransformerConfig, tokens: float, pairs: float) -> float:
    """FLOPs of one training step of this model; `tokens` and `pairs` as in `training_flops`. Beside adapters, the model's own
    matrices are frozen."""
    base = config.num_hidden_layers * layer_weights(config) + head_weights(config)
    adapters = (
        0
        if config.adapter is None
        else config.num_hidden_layers
        * config.adapter.rank
        * sum(sum(config.projection_sizes(name)) for name in config.adapter.projections)
    )
    attention_width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return training_flops(
        base + adapters, attention_width, tokens, pairs, frozen=base if adapters else 0
    )
