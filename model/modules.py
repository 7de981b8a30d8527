"""The transformer's modules, which declare every parameter (shape, initialiser, logical axes) with Flax NNX.

`Llama` and everything around it see one flat dictionary of arrays: "embed_tokens.weight", "layers.self_attn.q_proj.weight", ...
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .config import LlamaConfig
from .dropout import TokenInfo
from .feedforward import AllHeadsNorm, DropoutKeys, FeedForward, HeadNorm, Projection, RMSNorm, param
from .frozen import Weight, array
from .quantized import declare_parts, is_quantized
from .rope import apply_rope, attention_scaling, inverse_frequencies
from .rope_config import RopeConfig
from .sharding import Parameter, TensorParallel

T = TypeVar("T")
# The layers' parameters are stacked, and stand in the flat dictionary under this prefix.
LAYERS = "layers."
# The stages of a decoder layer that read each of its submodules: the projections of q, of k and of v, and what follows
# attention (`model.layer`).
STAGES = {
    "input_layernorm": ("q", "k", "v"),
    "self_attn.q_proj": ("q",),
    "self_attn.k_proj": ("k",),
    "self_attn.v_proj": ("v",),
    "self_attn.q_norm": ("q",),
    "self_attn.k_norm": ("k",),
    "self_attn.o_proj": ("output",),
    "post_attention_layernorm": ("output",),
    "pre_feedforward_layernorm": ("output",),
    "post_feedforward_layernorm": ("output",),
    "mlp.gate_proj": ("output",),
    "mlp.up_proj": ("output",),
    "mlp.down_proj": ("output",),
}


class SelfAttention(nnx.Module):
    """The projections around attention; heads, padded ones among them, are split over `tensor`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden, size, std, bias = config.hidden_size, config.head_dim, config.initializer_range, config.attention_bias

        def heads_projection(name, heads, axis):
            bias_declaration = ((heads, size), (axis, "head_dim")) if bias else ()
            return Projection("bte,ehd->bthd", (hidden, heads, size), ("embed", axis, "head_dim"), std, *bias_declaration,
                              name=name, config=config, rngs=rngs)

        self.q_proj = heads_projection("q_proj", config.num_attention_heads, "heads")
        self.k_proj = heads_projection("k_proj", config.num_key_value_heads, "kv_heads")
        self.v_proj = heads_projection("v_proj", config.num_key_value_heads, "kv_heads")
        self.o_proj = Projection("bthd,hde->bte", (config.num_attention_heads, size, hidden), ("heads", "head_dim", "embed"),
                                 std, *(((hidden,), ("norm",)) if config.output_bias else ()),
                                 name="o_proj", config=config, rngs=rngs)
        for name, heads, axis in (("q", config.num_attention_heads, "heads"), ("k", config.num_key_value_heads, "kv_heads")):
            if config.qk_norm != "none":
                norm = HeadNorm(config) if config.qk_norm == "head" else AllHeadsNorm(config, heads, axis)
                setattr(self, f"{name}_norm", norm)

    def project(self, x: Float[Array, "B T E"], labels: TokenInfo, rope: RopeConfig | None, length: int,
                parallel: TensorParallel, stages: str = "qkv") -> tuple[Float[Array, "B T H D"], ...]:
        """Returns those of q, k and v that `stages` names, with RoPE, if the layer has it, applied to q and k.

        Args:
          x: normalised hidden states; H is the number of heads that the weights have.
          labels: the tokens', within the layer; length: of the whole row, see `model.rope`.
        """
        def heads(name):
            projection = getattr(self, f"{name}_proj")
            projected = projection.add_bias(projection(x, parallel, labels.dropout))
            if name == "v":
                return projected
            projected = self._normalised(name, projected, parallel)
            if rope is None:
                return projected
            frequencies = inverse_frequencies(rope, self.config.rotary_dim, length)
            with jax.named_scope("rope"):
                return apply_rope(projected, labels.positions, frequencies, attention_scaling(rope), length)

        return tuple(heads(name) for name in stages)

    def _normalised(self, name: str, heads: Float[Array, "B T H D"], parallel: TensorParallel) -> Float[Array, "B T H D"]:
        """The norm of queries ("q") or keys ("k") that precedes RoPE, if the model has one."""
        if self.config.qk_norm == "none":
            return heads
        norm = getattr(self, f"{name}_norm")
        if self.config.qk_norm == "head":
            return norm(heads)
        return norm(heads, parallel, self.config.num_attention_heads if name == "q" else self.config.num_key_value_heads)

    def output(self, attended: Float[Array, "B T Hq D"], parallel: TensorParallel,
               dropout: DropoutKeys = None) -> Float[Array, "B T E"]:
        """Returns the output projection, summed over the tensor ranks; `dropout` as of `Projection`."""
        return self.o_proj.add_bias(parallel.combine(self.o_proj(attended, parallel, dropout), "heads"))


class DecoderLayer(nnx.Module):
    """The modules of one layer: attention and feed-forward with their norms. `model.layer` runs them."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        if config.norms != "after":
            self.input_layernorm = RMSNorm(config)
        self.self_attn = SelfAttention(config, rngs=rngs)
        # Before the feed-forward if there are norms before alone, after attention otherwise, as Hugging Face has it.
        self.post_attention_layernorm = RMSNorm(config)
        if config.norms == "both":
            self.pre_feedforward_layernorm = RMSNorm(config)
        if config.norms != "before":
            self.post_feedforward_layernorm = RMSNorm(config)
        self.mlp = FeedForward(config, rngs=rngs)


class EmbedAndHead(nnx.Module):
    """The modules before and after the layers: the embedding table, the final norm and the head."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Dict(weight=param(
            rngs, (config.vocab_size, config.hidden_size), ("vocab", "embed"), config.initializer_range))
        self.norm = RMSNorm(config)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Dict(weight=param(
                rngs, (config.hidden_size, config.vocab_size), ("embed", "vocab"), config.initializer_range))


# Makes the module of the parameters before and after the layers, from the model's sizes and `rngs`.
EndsFactory = Callable[..., nnx.Module]


def _flat(state: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


@functools.cache
def _layer_module(config: LlamaConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(config, rngs=nnx.Rngs(0))))


def _declared(state: Any) -> dict[str, Parameter]:
    return {name: Parameter(leaf.shape, leaf.get_metadata()["axes"]) for name, leaf in _flat(state).items()}


def declare_layer(config: LlamaConfig) -> dict[str, Parameter]:
    """Returns one layer's parameters, named as within the layer."""
    return _declared(_layer_module(config)[1])


def declare(config: LlamaConfig, ends: EndsFactory = EmbedAndHead) -> dict[str, Parameter]:
    """Returns every parameter, by name; those of the layers are stacked on a leading axis.

    Args:
      ends: makes the module of the parameters before and after the layers.
    """
    parameters = _declared(nnx.state(nnx.eval_shape(lambda: ends(config, rngs=nnx.Rngs(0)))))
    for name, parameter in declare_layer(config).items():
        parameters[LAYERS + name] = Parameter((config.num_hidden_layers, *parameter.shape), ("layers", *parameter.axes))
    if config.adapter is not None:
        parameters = {name: dataclasses.replace(parameter, frozen=not config.adapter.trains(name))
                      for name, parameter in parameters.items()}
        if config.adapter.quantize != "none":
            for name in [name for name, parameter in parameters.items() if parameter.frozen and is_quantized(name)]:
                parameters |= declare_parts(name, parameters.pop(name), config.adapter.quantize)
    return dict(sorted(parameters.items()))


def own_shapes(config: LlamaConfig, ends: EndsFactory = EmbedAndHead) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter without the padding that a mesh may add in memory."""
    return {name: tuple(parameter.shape) for name, parameter in declare(config, ends).items()}


def init(config: LlamaConfig, key: jax.Array, ends: EndsFactory = EmbedAndHead) -> dict[str, Float[Array, ...]]:
    """Returns fresh float32 parameters: normal with `initializer_range`, norms 1, biases 0, adapters as of `init_adapters`. To
    be jitted with output shardings."""
    ends_key, layers_key = jax.random.split(key)

    def init_layer(key):
        layer = nnx.state(DecoderLayer(config, rngs=nnx.Rngs(key)))
        return {LAYERS + name: leaf[...] for name, leaf in _flat(layer).items()}

    layers = jax.vmap(init_layer)(jax.random.split(layers_key, config.num_hidden_layers))
    outside = {name: leaf[...] for name, leaf in _flat(nnx.state(ends(config, rngs=nnx.Rngs(ends_key)))).items()}
    return dict(sorted({**outside, **layers, **init_adapters(config, key)}.items()))


def init_adapters(config: LlamaConfig, key: jax.Array) -> dict[str, Float[Array, ...]]:
    """Returns fresh adapters as PEFT draws them: A uniform within 1 / sqrt(inputs), B zero; DoRA's lengths follow from the
    weights (`Transformer.init_magnitudes`). To be jitted with output shardings."""
    adapters = {LAYERS + name: parameter.shape for name, parameter in declare_layer(config).items()
                if name.endswith((".lora_A", ".lora_B"))}

    def draw(i, name, shape):
        shape = (config.num_hidden_layers, *shape)
        if name.endswith("lora_B"):
            return jnp.zeros(shape, jnp.float32)
        bound = math.prod(shape[1:-1]) ** -0.5
        return jax.random.uniform(jax.random.fold_in(key, i), shape, jnp.float32, -bound, bound)

    return {name: draw(i, name, adapters[name]) for i, name in enumerate(sorted(adapters))}


def bind(config: LlamaConfig, weights: dict[str, Weight]) -> DecoderLayer:
    """Returns a decoder layer with these weights.

    Args:
      weights: named as by `declare_layer`: "self_attn.q_proj.weight" becomes `layer.self_attn.q_proj.weight`. Some may be
        missing, if their modules are not called; names that a layer lacks are ignored. Frozen matrices stay as they are, for
        products to dequantize.
    """
    def value(name):
        return weights[name] if name.endswith("_proj.weight") else array(weights[name])

    graph, state = _layer_module(config)
    leaves = [(path, leaf.replace(value(name)) if name in weights else leaf)
              for (path, leaf), name in zip(nnx.to_flat_state(state), _flat(state), strict=True)]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def module_of(layer: DecoderLayer, name: str) -> nnx.Module:
    """Returns the module of a layer that has the parameter of this name, as of `declare_layer`."""
    return functools.reduce(getattr, name.split(".")[:-1], layer)


def read_by(stages: Iterable[str], weights: dict[str, T]) -> dict[str, T]:
    """Returns those of a layer's weights, named as within the layer, that any of these stages reads."""
    submodules = {submodule for submodule, readers in STAGES.items() if set(readers) & set(stages)}
    return {name: weight for name, weight in weights.items() if name.rpartition(".")[0] in submodules}
