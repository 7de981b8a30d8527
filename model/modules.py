"""The transformer's Flax modules: each declares its parameters (shape, initializer, logical axes,
stage, Hugging Face's name) and computes with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float

from .config import TransformerConfig
from .dropout import TokenInfo
from .experts import MixtureOfExperts
from .feedforward import Auxiliary, FeedForward
from .norms import QK_NORMS, RMSNorm
from .projection import DropoutKeys, Projection, param, zero_param
from .rope import apply_rope, attention_scaling, inverse_frequencies, query_factors
from .rope_config import RopeConfig
from .sharding import TensorParallel
from .stages import ATTENTION, KEYS_VALUES, OUTPUT, QUERIES

Hidden = Float[Array, "B T E"]


class Tokens(NamedTuple):
    """Inputs of projections besides hidden states.

    Attributes:
      info: the tokens', within the layer.
      rope: the layer's rotary embedding, or None.
      length: of the whole row, see `model.rope`.
    """

    info: TokenInfo
    rope: RopeConfig | None
    length: int
    parallel: TensorParallel


class SelfAttention(nnx.Module):
    """The projections around attention; heads, including padded ones, are split over `tensor`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        projection = functools.partial(Projection, config=config, rngs=rngs)

        def heads_projection(name, heads, axis, stage):
            return projection(
                "bte,ehd->bthd",
                (hidden, heads, size),
                ("embed", axis, "head_dim"),
                config.attention_bias,
                name=name,
                stage=stage,
            )

        of_queries = config.num_attention_heads, "heads", QUERIES
        of_keys = config.num_key_value_heads, "kv_heads", KEYS_VALUES
        self.q_proj = heads_projection("q_proj", *of_queries)
        self.k_proj = heads_projection("k_proj", *of_keys)
        self.v_proj = heads_projection("v_proj", *of_keys)
        if norm := QK_NORMS[config.qk_norm]:
            self.q_norm = norm(config, *of_queries)
            self.k_norm = norm(config, *of_keys)
        if config.attention_sinks:  # `ShardedLayer.attend` reads them
            self.sinks = zero_param((config.num_attention_heads,), ("heads",), stages=(ATTENTION,))
        self.o_proj = projection(
            "bthd,hde->bte",
            (config.num_attention_heads, size, hidden),
            ("heads", "head_dim", "embed"),
            config.output_bias,
            name="o_proj",
            stage=OUTPUT,
        )

    def queries_keys_values(
        self, x: Float[Array, "B T E"], tokens: Tokens
    ) -> tuple[Float[Array, "B T H D"], ...]:
        """Returns the results of `queries` and of `keys_values`."""
        return self.queries(x, tokens), *self.keys_values(x, tokens)

    def queries(self, x: Float[Array, "B T E"], tokens: Tokens) -> Float[Array, "B T Hq D"]:
        """Returns the queries of normalized hidden states, for the heads in the weights."""
        queries = self._positioned(
            self._heads(self.q_proj, x, tokens), getattr(self, "q_norm", None), tokens
        )
        beta, original = (
            self.config.llama_4_scaling_beta,
            self.config.rope.original_max_position_embeddings,
        )
        if not beta or original is None:
            return queries
        factors = query_factors(tokens.info.positions, beta, original)[..., None, None]
        return (queries * factors).astype(queries.dtype)

    def keys_values(
        self, x: Float[Array, "B T E"], tokens: Tokens
    ) -> tuple[Float[Array, "B T Hkv D"], ...]:
        """Returns the keys and the values, as `queries` does."""
        keys = self._positioned(
            self._heads(self.k_proj, x, tokens), getattr(self, "k_norm", None), tokens
        )
        return keys, self._heads(self.v_proj, x, tokens)

    def _heads(
        self, projection: Projection, x: Float[Array, "B T E"], tokens: Tokens
    ) -> Float[Array, "B T H D"]:
        return projection.add_bias(projection(x, tokens.parallel, tokens.info.dropout))

    def _positioned(
        self, heads: Float[Array, "B T H D"], norm: Any, tokens: Tokens
    ) -> Float[Array, "B T H D"]:
        """Queries or keys with norm and RoPE, if the layer has them."""
        if norm is not None:
            heads = norm(heads, tokens.parallel)
        if tokens.rope is None:
            return heads
        frequencies = inverse_frequencies(tokens.rope, self.config.rotary_dim, tokens.length)
        with jax.named_scope("rope"):
            return apply_rope(
                heads,
                tokens.info.positions,
                frequencies,
                attention_scaling(tokens.rope),
                tokens.length,
                interleaved=self.config.rope_interleaved,
            )

    def output(
        self,
        attended: Float[Array, "B T Hq D"],
        parallel: TensorParallel,
        dropout: DropoutKeys = None,
    ) -> Float[Array, "B T E"]:
        """Returns the output projection, summed over the tensor ranks; `dropout` as in
        `Projection`."""
        return self.o_proj.add_bias(
            parallel.reduce_output(self.o_proj(attended, parallel, dropout), "heads")
        )


def feed_forward(config: TransformerConfig, rngs: nnx.Rngs) -> FeedForward | MixtureOfExperts:
    """Returns what follows attention in a layer: a feed-forward, or a mixture of them."""
    return (MixtureOfExperts if config.num_experts else FeedForward)(config, rngs=rngs)


class DecoderLayer(nnx.Module):
    """The modules of one layer and its per-token computation: a norm before attention and one
    before the feed-forward (LLaMA).

    `model.layer` runs it. A family with another layer has a subclass in LAYER_MODULES.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config, QUERIES, KEYS_VALUES)
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config, OUTPUT)
        self.mlp = feed_forward(config, rngs)

    def attention_input(self, x: Hidden) -> Hidden:
        """Returns what attention's projections read."""
        return self.input_layernorm(x)

    def output(
        self,
        x: Hidden,
        attended: Hidden,
        feed_forward: Callable[[Hidden], tuple[Hidden, Auxiliary]],
        add: Callable[[Hidden, Hidden], Hidden],
    ) -> tuple[Hidden, Auxiliary]:
        """Returns the layer's output, and the feed-forward's auxiliary sums.

        Args:
          x: the layer's input; attended: attention's output for it, projected.
          feed_forward: `mlp` on a device; add: adds a branch to the residual stream.
        """
        x = add(x, attended)
        branch, auxiliary = feed_forward(self.post_attention_layernorm(x))
        return add(x, branch), auxiliary


class PostNormLayer(DecoderLayer):
    """A norm after attention and one after the feed-forward (OLMo 2)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config, OUTPUT)
        self.post_feedforward_layernorm = RMSNorm(config, OUTPUT)
        self.mlp = feed_forward(config, rngs)

    def attention_input(self, x):
        return x

    def output(self, x, attended, feed_forward, add):
        x = add(x, self.post_attention_layernorm(attended))
        branch, auxiliary = feed_forward(x)
        return add(x, self.post_feedforward_layernorm(branch)), auxiliary


class SandwichNormLayer(DecoderLayer):
    """A norm before and after each (Gemma 2 and 3)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config, QUERIES, KEYS_VALUES)
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config, OUTPUT)
        self.pre_feedforward_layernorm = RMSNorm(config, OUTPUT)
        self.post_feedforward_layernorm = RMSNorm(config, OUTPUT)
        self.mlp = feed_forward(config, rngs)

    def output(self, x, attended, feed_forward, add):
        x = add(x, self.post_attention_layernorm(attended))
        branch, auxiliary = feed_forward(self.pre_feedforward_layernorm(x))
        return add(x, self.post_feedforward_layernorm(branch)), auxiliary


# A layer's modules by `TransformerConfig.norms`.
LAYER_MODULES: dict[str, type[DecoderLayer]] = {
    "before": DecoderLayer,
    "after": PostNormLayer,
    "both": SandwichNormLayer,
}


class TokenEmbedAndHead(nnx.Module):
    """The modules before and after the layers: the embedding table, the final norm and the head."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Dict(
            weight=param(
                rngs,
                (config.vocab_size, config.hidden_size),
                ("vocab", "embed"),
                config.initializer_range,
                inputs=0,
            )
        )
        self.norm = RMSNorm(config)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Dict(
                weight=param(
                    rngs,
                    (config.hidden_size, config.vocab_size),
                    ("embed", "vocab"),
                    config.initializer_range,
                    hf_name="lm_head.weight",
                )
            )
