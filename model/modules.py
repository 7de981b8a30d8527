"""The transformer's modules, which declare every parameter (shape, initialiser, logical axes) with Flax NNX.

Everything else sees one flat dictionary of arrays: "embed_tokens.weight", "layers.self_attn.q_proj.weight", ...
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .config import TransformerConfig
from .dropout import TokenInfo
from .feedforward import (
    KEYS_VALUES,
    OUTPUT,
    QK_NORMS,
    QUERIES,
    Auxiliary,
    DropoutKeys,
    FeedForward,
    Projection,
    RMSNorm,
    param,
)
from .frozen import Weight, array
from .quantized_weights import declare_parts, is_quantized
from .rope import apply_rope, attention_scaling, inverse_frequencies
from .rope_config import RopeConfig
from .sharding import Parameter, TensorParallel

T = TypeVar("T")
Hidden = Float[Array, "B T E"]
# The layers' parameters are stacked, and stand in the flat dictionary under this prefix.
LAYERS = "layers."


class Tokens(NamedTuple):
    """What projections read beside hidden states.

    Attributes:
      labels: of the tokens, within the layer. rope: the layer's rotary embedding, or None; length: of the whole row, see
        `model.rope`.
    """

    labels: TokenInfo
    rope: RopeConfig | None
    length: int
    parallel: TensorParallel


class SelfAttention(nnx.Module):
    """The projections around attention; heads, padded ones among them, are split over `tensor`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        hidden, size, std, bias = (
            config.hidden_size,
            config.head_dim,
            config.initializer_range,
            config.attention_bias,
        )

        def heads_projection(name, heads, axis, stage):
            bias_declaration = ((heads, size), (axis, "head_dim")) if bias else ()
            return Projection(
                "bte,ehd->bthd",
                (hidden, heads, size),
                ("embed", axis, "head_dim"),
                std,
                *bias_declaration,
                name=name,
                stage=stage,
                config=config,
                rngs=rngs,
            )

        self.q_proj = heads_projection("q_proj", config.num_attention_heads, "heads", QUERIES)
        self.k_proj = heads_projection(
            "k_proj", config.num_key_value_heads, "kv_heads", KEYS_VALUES
        )
        self.v_proj = heads_projection(
            "v_proj", config.num_key_value_heads, "kv_heads", KEYS_VALUES
        )
        if norm := QK_NORMS[config.qk_norm]:
            self.q_norm = norm(config, config.num_attention_heads, "heads", QUERIES)
            self.k_norm = norm(config, config.num_key_value_heads, "kv_heads", KEYS_VALUES)
        self.o_proj = Projection(
            "bthd,hde->bte",
            (config.num_attention_heads, size, hidden),
            ("heads", "head_dim", "embed"),
            std,
            *(((hidden,), ("norm",)) if config.output_bias else ()),
            name="o_proj",
            stage=OUTPUT,
            config=config,
            rngs=rngs,
        )

    def queries(self, x: Float[Array, "B T E"], tokens: Tokens) -> Float[Array, "B T Hq D"]:
        """Returns the queries of normalised hidden states, for the heads that the weights have."""
        return self._positioned(
            self._heads(self.q_proj, x, tokens), getattr(self, "q_norm", None), tokens
        )

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
        return projection.add_bias(projection(x, tokens.parallel, tokens.labels.dropout))

    def _positioned(
        self, heads: Float[Array, "B T H D"], norm: Any, tokens: Tokens
    ) -> Float[Array, "B T H D"]:
        """Queries or keys with their norm and RoPE, if the layer has these."""
        if norm is not None:
            heads = norm(heads, tokens.parallel)
        if tokens.rope is None:
            return heads
        frequencies = inverse_frequencies(tokens.rope, self.config.rotary_dim, tokens.length)
        with jax.named_scope("rope"):
            return apply_rope(
                heads,
                tokens.labels.positions,
                frequencies,
                attention_scaling(tokens.rope),
                tokens.length,
            )

    def output(
        self,
        attended: Float[Array, "B T Hq D"],
        parallel: TensorParallel,
        dropout: DropoutKeys = None,
    ) -> Float[Array, "B T E"]:
        """Returns the output projection, summed over the tensor ranks; `dropout` as of `Projection`."""
        return self.o_proj.add_bias(
            parallel.combine(self.o_proj(attended, parallel, dropout), "heads")
        )


class DecoderLayer(nnx.Module):
    """The modules of one layer, and what it computes of each token by itself: a norm before attention and one before the
    feed-forward (LLaMA). `model.layer` runs it. A family with another layer has a subclass in LAYER_MODULES.

    Attribute `mixer` is the module through which tokens see each other.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config, QUERIES, KEYS_VALUES)
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config, OUTPUT)
        self.mlp = FeedForward(config, rngs=rngs)

    @property
    def mixer(self) -> SelfAttention:
        """The sequence mixer, under the name that Hugging Face gives it."""
        return self.self_attn

    def mixer_input(self, x: Hidden) -> Hidden:
        """Returns what the mixer's projections read."""
        return self.input_layernorm(x)

    def output(
        self,
        x: Hidden,
        mixed: Hidden,
        feed_forward: Callable[[Hidden], tuple[Hidden, Auxiliary]],
        add: Callable[[Hidden, Hidden], Hidden],
    ) -> tuple[Hidden, Auxiliary]:
        """Returns the layer's output, and the feed-forward's auxiliary sums.

        Args:
          x: the layer's input; mixed: the mixer's output for it.
          feed_forward: `mlp` on a device; add: adds a branch to the residual stream.
        """
        x = add(x, mixed)
        branch, auxiliary = feed_forward(self.post_attention_layernorm(x))
        return add(x, branch), auxiliary


class PostNormLayer(DecoderLayer):
    """A norm after attention and one after the feed-forward (OLMo 2)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.self_attn = SelfAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config, OUTPUT)
        self.post_feedforward_layernorm = RMSNorm(config, OUTPUT)
        self.mlp = FeedForward(config, rngs=rngs)

    def mixer_input(self, x):
        return x

    def output(self, x, mixed, feed_forward, add):
        x = add(x, self.post_attention_layernorm(mixed))
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
        self.mlp = FeedForward(config, rngs=rngs)

    def output(self, x, mixed, feed_forward, add):
        x = add(x, self.post_attention_layernorm(mixed))
        branch, auxiliary = feed_forward(self.pre_feedforward_layernorm(x))
        return add(x, self.post_feedforward_layernorm(branch)), auxiliary


# A layer's modules by `TransformerConfig.norms`.
LAYER_MODULES: dict[str, type[DecoderLayer]] = {
    "before": DecoderLayer,
    "after": PostNormLayer,
    "both": SandwichNormLayer,
}


class TokenEnds(nnx.Module):
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


# Makes the module of the parameters before and after the layers, from the model's sizes and `rngs`.
EndsFactory = Callable[..., nnx.Module]


def _flat(state: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


@functools.cache
def _layer_module(config: TransformerConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: LAYER_MODULES[config.norms](config, rngs=nnx.Rngs(0))))


def _declared(state: Any, hf_prefix: str) -> dict[str, Parameter]:
    def parameter(name, leaf):
        metadata = {
            key: leaf.get_metadata().get(key) for key in ("axes", "stages", "inputs", "hf_name")
        }
        return Parameter(
            leaf.shape,
            metadata["axes"],
            stages=metadata["stages"] or (),
            inputs=metadata["inputs"],
            hf_name=metadata["hf_name"] or hf_prefix + name,
        )

    return {name: parameter(name, leaf) for name, leaf in _flat(state).items()}


def declare_layer(config: TransformerConfig) -> dict[str, Parameter]:
    """Returns one layer's parameters, named as within the layer."""
    return _declared(_layer_module(config)[1], "model.layers.{i}.")


def declare(config: TransformerConfig, ends: EndsFactory = TokenEnds) -> dict[str, Parameter]:
    """Returns every parameter, by name; those of the layers are stacked on a leading axis.

    Args:
      ends: makes the module of the parameters before and after the layers.
    """
    parameters = _declared(
        nnx.state(nnx.eval_shape(lambda: ends(config, rngs=nnx.Rngs(0)))), "model."
    )
    for name, parameter in declare_layer(config).items():
        parameters[LAYERS + name] = dataclasses.replace(
            parameter,
            shape=(config.num_hidden_layers, *parameter.shape),
            axes=("layers", *parameter.axes),
        )
    if config.adapter is not None:
        parameters = {
            name: dataclasses.replace(parameter, frozen=not config.adapter.trains(name))
            for name, parameter in parameters.items()
        }
        if config.adapter.quantize != "none":
            for name in [
                name
                for name, parameter in parameters.items()
                if parameter.frozen and is_quantized(name)
            ]:
                parameters |= declare_parts(name, parameters.pop(name), config.adapter.quantize)
    return dict(sorted(parameters.items()))


def in_order(config: TransformerConfig) -> dict[str, Parameter]:
    """Returns every parameter of a language model, in the order in which a model uses them."""
    declared, names = (
        declare(config),
        (_made_order(LAYER_MODULES[config.norms], config), _made_order(TokenEnds, config)),
    )
    (table, *others), layers = names[1], [LAYERS + name for name in names[0]]
    return {name: declared[name] for name in (table, *layers, *others)}


def _made_order(module: Callable[..., nnx.Module], config: TransformerConfig) -> list[str]:
    """Returns the names of a module's parameters in the order in which it makes them."""
    names: list[str] = []

    def walk(module: nnx.Module, prefix: str) -> None:
        for name, child in vars(module).items():
            if isinstance(child, nnx.Param):
                names.append(prefix + name)
            elif isinstance(child, nnx.Module):
                walk(child, f"{prefix}{name}.")

    def make() -> nnx.Module:
        made = module(config, rngs=nnx.Rngs(0))
        walk(made, "")  # here, since what `eval_shape` returns is sorted
        return made

    nnx.eval_shape(make)
    return names


def own_shapes(
    config: TransformerConfig, ends: EndsFactory = TokenEnds
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter without the padding that a mesh may add in memory."""
    return {name: tuple(parameter.shape) for name, parameter in declare(config, ends).items()}


def init(
    config: TransformerConfig, key: jax.Array, ends: EndsFactory = TokenEnds
) -> dict[str, Float[Array, ...]]:
    """Returns fresh float32 parameters: normal with `initializer_range`, norms 1, biases 0, adapters as of `init_adapters`. To
    be jitted with output shardings."""
    ends_key, layers_key = jax.random.split(key)

    def init_layer(key):
        layer = nnx.state(LAYER_MODULES[config.norms](config, rngs=nnx.Rngs(key)))
        return {LAYERS + name: leaf[...] for name, leaf in _flat(layer).items()}

    layers = jax.vmap(init_layer)(jax.random.split(layers_key, config.num_hidden_layers))
    outside = {
        name: leaf[...]
        for name, leaf in _flat(nnx.state(ends(config, rngs=nnx.Rngs(ends_key)))).items()
    }
    return dict(sorted({**outside, **layers, **init_adapters(config, key)}.items()))


def init_adapters(config: TransformerConfig, key: jax.Array) -> dict[str, Float[Array, ...]]:
    """Returns fresh adapters as PEFT draws them: A uniform within 1 / sqrt(inputs), B zero; DoRA's lengths follow from the
    weights (`Transformer.init_magnitudes`). To be jitted with output shardings."""
    adapters = {
        LAYERS + name: parameter.shape
        for name, parameter in declare_layer(config).items()
        if name.endswith((".lora_A", ".lora_B"))
    }

    def draw(i, name, shape):
        shape = (config.num_hidden_layers, *shape)
        if name.endswith("lora_B"):
            return jnp.zeros(shape, jnp.float32)
        bound = math.prod(shape[1:-1]) ** -0.5
        return jax.random.uniform(jax.random.fold_in(key, i), shape, jnp.float32, -bound, bound)

    return {name: draw(i, name, adapters[name]) for i, name in enumerate(sorted(adapters))}


def bind(config: TransformerConfig, weights: dict[str, Weight]) -> DecoderLayer:
    """Returns a decoder layer with these weights.

    Args:
      weights: named as by `declare_layer`: "self_attn.q_proj.weight" becomes `layer.self_attn.q_proj.weight`. Some may be
        missing, if their modules are not called; names that a layer lacks are ignored. Frozen matrices stay as they are, for
        products to dequantize.
    """

    def value(name):
        return weights[name] if name.endswith("_proj.weight") else array(weights[name])

    graph, state = _layer_module(config)
    leaves = [
        (path, leaf.replace(value(name)) if name in weights else leaf)
        for (path, leaf), name in zip(nnx.to_flat_state(state), _flat(state), strict=True)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def module_of(layer: DecoderLayer, name: str) -> nnx.Module:
    """Returns the module of a layer that has the parameter of this name, as of `declare_layer`."""
    return functools.reduce(getattr, name.split(".")[:-1], layer)


def read_by(
    config: TransformerConfig, stages: Iterable[str], weights: dict[str, T]
) -> dict[str, T]:
    """Returns those of a layer's weights, named as within the layer, that any of these stages reads."""
    declared = declare_layer(config)
    return {
        name: weight for name, weight in weights.items() if set(declared[name].stages) & set(stages)
    }
