"""The transformer's modules: Flax NNX declares every parameter (shape, initialiser, logical axes), and computes one layer from
whole weights. `Llama` sees the flat dictionary alone.
"""
from __future__ import annotations

import functools

import jax
from flax import nnx

from .config import LlamaConfig
from .feedforward import FeedForward, Projection, RMSNorm, param
from .rope import apply_rope, attention_scaling, inverse_frequencies
from .sharding import Parallel, Parameter


class SelfAttention(nnx.Module):
    """The projections around attention; heads, padded ones among them, are split over `tensor`."""

    def __init__(self, config: LlamaConfig, *, rngs):
        self.config = config
        hidden, size, std, bias = config.hidden_size, config.head_dim, config.initializer_range, config.attention_bias

        def inward(heads, name):
            extra = ((heads, size), (name, "head_dim")) if bias else ()
            return Projection("bte,ehd->bthd", (hidden, heads, size), ("embed", name, "head_dim"), std, *extra, rngs=rngs)

        extra = ((hidden,), ("norm",)) if bias else ()
        self.q_proj = inward(config.num_attention_heads, "heads")
        self.k_proj = inward(config.num_key_value_heads, "kv_heads")
        self.v_proj = inward(config.num_key_value_heads, "kv_heads")
        self.o_proj = Projection("bthd,hde->bte", (config.num_attention_heads, size, hidden),
                                 ("heads", "head_dim", "embed"), std, *extra, rngs=rngs)

    def project(self, x, positions, length: int, parallel: Parallel, which: str = "qkv"):
        """x [B, T, E] -> `which` of q [B, T, Hq, D], k and v [B, T, Hkv, D], RoPE applied; the heads that the weights have.

        length: of the whole row, see `model.rope`.
        """
        x, rope = parallel.whole(x), self.config.rope
        turn = (positions, inverse_frequencies(rope, self.config.head_dim, length), attention_scaling(rope), length)

        def one(name):
            part = getattr(self, f"{name}_proj")
            heads = part.add_bias(part(x))
            return heads if name == "v" else apply_rope(heads, *turn)

        return tuple(one(name) for name in which)

    def combine(self, attended, parallel: Parallel):
        """[B, T, Hq, D] -> [B, T, E], summed over the tensor ranks."""
        return self.o_proj.add_bias(parallel.combine(self.o_proj(attended), "heads"))


class DecoderLayer(nnx.Module):
    """Attention and feed-forward with their norms."""

    def __init__(self, config: LlamaConfig, *, rngs):
        self.input_layernorm = RMSNorm(config)
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = FeedForward(config, rngs=rngs)


class Ends(nnx.Module):
    """What stands before and after the layers: the embedding table, the final norm, the head."""

    def __init__(self, config: LlamaConfig, *, rngs):
        self.embed_tokens = nnx.Dict(weight=param(
            rngs, (config.vocab_size, config.hidden_size), ("vocab", "embed"), config.initializer_range))
        self.norm = RMSNorm(config)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Dict(weight=param(
                rngs, (config.hidden_size, config.vocab_size), ("embed", "vocab"), config.initializer_range))


def _flat(state) -> dict:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


@functools.cache
def _layer_module(config: LlamaConfig):
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(config, rngs=nnx.Rngs(0))))


def declare(config: LlamaConfig) -> dict[str, Parameter]:
    """Every parameter's name, shape and logical axes, layers stacked on a leading axis."""
    _, layer = _layer_module(config)
    ends = nnx.state(nnx.eval_shape(lambda: Ends(config, rngs=nnx.Rngs(0))))
    found = {name: Parameter(leaf.shape, leaf.get_metadata()["axes"]) for name, leaf in _flat(ends).items()}
    for name, leaf in _flat(layer).items():
        axes = ("layers", *leaf.get_metadata()["axes"])
        found[f"layers.{name}"] = Parameter((config.num_hidden_layers, *leaf.shape), axes)
    return dict(sorted(found.items()))


def init(config: LlamaConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Fresh float32 parameters: normal with `initializer_range`, norms 1, biases 0. To be jitted with output shardings."""
    ends_key, layers_key = jax.random.split(key)

    def one_layer(key):
        layer = nnx.state(DecoderLayer(config, rngs=nnx.Rngs(key)))
        return {f"layers.{name}": leaf[...] for name, leaf in _flat(layer).items()}

    layers = jax.vmap(one_layer)(jax.random.split(layers_key, config.num_hidden_layers))
    ends = {name: leaf[...] for name, leaf in _flat(nnx.state(Ends(config, rngs=nnx.Rngs(ends_key)))).items()}
    return dict(sorted({**ends, **layers}.items()))


def bind(config: LlamaConfig, weights: dict[str, jax.Array]) -> DecoderLayer:
    """A decoder layer on these weights, named as within the layer; parts whose weights are not given must not be called."""
    graph, state = _layer_module(config)
    leaves = [(path, leaf.replace(weights[name]) if name in weights else leaf)
              for (path, leaf), name in zip(nnx.to_flat_state(state), _flat(state), strict=True)]
    return nnx.merge(graph, nnx.from_flat_state(leaves))
