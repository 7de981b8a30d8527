"""Every parameter by name, as declared by the Flax modules, and a layer's modules bound to given
weights.

Everything outside `model.modules` sees one flat dictionary of arrays: "embed_tokens.weight",
"layers.self_attn.q_proj.weight", ... If the layers are several stacks (`TransformerConfig.stacks`),
the names have the numbers of a stack's first and last layer: "layers.0-2.mlp.up_proj.weight".
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from flax import nnx

from .config import LAYERS, TransformerConfig
from .frozen import Weight, array
from .modules import LAYER_MODULES, DecoderLayer, TokenEmbedAndHead
from .quantized_weights import declare_parts, is_quantized
from .sharding import Parameter

T = TypeVar("T")
_STACK = re.compile(r"\blayers\.(\d+)-\d+\.")
# Makes the module of parameters before and after the layers, from the model's sizes and `rngs`.
EmbedAndHeadFactory = Callable[..., nnx.Module]


def flat(state: nnx.State) -> dict[str, Any]:
    """Returns the leaves of a state of Flax NNX by their dotted names."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def without_stack(name: str) -> str:
    """Returns a parameter's name without the numbers of its stack, if it has any."""
    return _STACK.sub(LAYERS, name)


def first_layer(name: str) -> int:
    """Returns the number of the first of the layers whose parameters this one stacks."""
    found = _STACK.match(name)
    return int(found[1]) if found else 0


@functools.cache
def _layer_module(config: TransformerConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: LAYER_MODULES[config.norms](config, rngs=nnx.Rngs(0))))


def _declared(state: Any, hf_prefix: str) -> dict[str, Parameter]:
    def parameter(name, leaf):
        metadata = {
            key: leaf.get_metadata().get(key)
            for key in ("axes", "stages", "inputs", "hf_name", "constant")
        }
        constant = bool(metadata["constant"])
        return Parameter(
            leaf.shape,
            metadata["axes"],
            frozen=constant,
            constant=constant,
            stages=metadata["stages"] or (),
            inputs=metadata["inputs"],
            hf_name=metadata["hf_name"] or hf_prefix + name,
        )

    return {name: parameter(name, leaf) for name, leaf in flat(state).items()}


def declare_layer(config: TransformerConfig) -> dict[str, Parameter]:
    """Returns the parameters of one layer of a stack, named as within the layer."""
    return _declared(_layer_module(config)[1], "model.layers.{i}.")


def declare(
    config: TransformerConfig, embed_and_head: EmbedAndHeadFactory = TokenEmbedAndHead
) -> dict[str, Parameter]:
    """Returns every parameter, by name; those of a stack of layers have a leading axis.

    Args:
      embed_and_head: makes the module of the parameters before and after the layers.
    """
    parameters = _declared(
        nnx.state(nnx.eval_shape(lambda: embed_and_head(config, rngs=nnx.Rngs(0)))), "model."
    )
    for stack in config.stacks:
        for name, parameter in declare_layer(stack.config).items():
            parameters[stack.prefix + name] = dataclasses.replace(
                parameter,
                shape=(stack.layers, *parameter.shape),
                axes=("layers", *parameter.axes),
            )
    if config.adapter is not None:
        parameters = {
            name: dataclasses.replace(
                parameter, frozen=parameter.constant or not config.adapter.trains(name)
            )
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
    """Returns every parameter of a language model, in order of use."""
    declared = declare(config)
    layers = [
        stack.prefix + name
        for stack in config.stacks
        for name in _made_order(LAYER_MODULES[config.norms], stack.config)
    ]
    table, *others = _made_order(TokenEmbedAndHead, config)
    return {name: declared[name] for name in (table, *layers, *others)}


@functools.cache
def _made_order(module: Callable[..., nnx.Module], config: TransformerConfig) -> tuple[str, ...]:
    """Returns the names of a module's parameters in order of creation."""
    names: list[str] = []

    def walk(module: nnx.Module, prefix: str) -> None:
        for name, child in vars(module).items():
            if isinstance(child, nnx.Param):
                names.append(prefix + name)
            elif isinstance(child, nnx.Module):
                walk(child, f"{prefix}{name}.")

    def make() -> nnx.Module:
        made = module(config, rngs=nnx.Rngs(0))
        walk(made, "")  # here, since the results of `eval_shape` are sorted
        return made

    nnx.eval_shape(make)
    return tuple(names)


def unpadded_shapes(
    config: TransformerConfig, embed_and_head: EmbedAndHeadFactory = TokenEmbedAndHead
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter without the padding that a mesh may add in memory."""
    parameters = declare(config, embed_and_head)
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def bind(config: TransformerConfig, weights: dict[str, Weight]) -> DecoderLayer:
    """Returns a decoder layer with these weights.

    Args:
      weights: named as by `declare_layer`: "self_attn.q_proj.weight" becomes
        `layer.self_attn.q_proj.weight`. Some may be missing if their modules are not called; names
        a layer lacks are ignored. Frozen matrices stay unchanged, for products to dequantize.
    """

    def value(name):
        return weights[name] if name.endswith("_proj.weight") else array(weights[name])

    graph, state = _layer_module(config)
    leaves = [
        (path, leaf.replace(value(name)) if name in weights else leaf)
        for (path, leaf), name in zip(nnx.to_flat_state(state), flat(state), strict=True)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def module_of(layer: DecoderLayer, name: str) -> nnx.Module:
    """Returns the layer's module with the parameter of this name, as in `declare_layer`."""
    return functools.reduce(getattr, name.split(".")[:-1], layer)


def read_by(
    config: TransformerConfig, stages: Iterable[str], weights: dict[str, T]
) -> dict[str, T]:
    """Returns the layer's weights, named as within the layer, that any of these stages reads."""
    declared = declare_layer(config)
    return {
        name: weight for name, weight in weights.items() if set(declared[name].stages) & set(stages)
    }
