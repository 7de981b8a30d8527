"""The known parts of a step's memory: lower bounds, so that a search can skip candidates."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from model.adapter import AdapterConfig
from model.attention.names import MESH_AXES
from model.config import TransformerConfig
from model.padding import sizes_in_memory
from model.parameter_declarations import declare
from model.quantized_weights import weight_of
from model.sharding import Parameter, Sharding, TensorParallel
from trainer.config.schema import MemoryConfig, MeshConfig, RunConfig
from trainer.flops import all_layers
from trainer.mesh import abstract_mesh
from trainer.optimizer import moment_bits, moment_count, trainable_names

from .compiled import GIB


def parts_gib(run: RunConfig, model: TransformerConfig) -> dict[str, float]:
    """The known parts of a device's memory in GiB.

    These are the parameters, the moments of trained ones, and what layers keep for the backward
    pass: with c tokens per device and n bytes per number of the compute dtype, each layer's input
    takes n c E bytes, attention's output and log-sum-exp n c H D + 4 c H bytes, and so on.
    """
    memory, tensor = run.memory, run.mesh.tensor
    tokens, number = device_tokens(run), compute_bytes(run)
    computed, hidden = computed_sizes(model, run.adapter, tensor), hidden_numbers(run, model)
    layers = model.num_hidden_layers
    device_inputs, _ = _kept_inputs(memory, layers)
    heads = computed.num_attention_heads + 2 * computed.num_key_value_heads

    def widths(layer: TransformerConfig) -> float:
        # In a mixture each expert's output counts.
        outputs = (layer.num_experts_per_tok or 1) + bool(layer.shared_expert_intermediate_size)
        return (heads * model.head_dim + 2 * layer.active_width) / tensor + outputs * hidden

    parameters, moments = state_bytes(run, model)
    parts = {
        "parameters": 0 if memory.parameters_on_host else parameters,
        "moments": 0 if memory.moments_on_host else moments,
        "layer inputs": device_inputs * number * tokens * hidden,
        "attention outputs": _attention_bytes(run, model)
        if memory.policy.attention == "device"
        else 0,
        "products": number * tokens * all_layers(computed, widths) if memory.policy.products else 0,
    }
    return {name: size / GIB for name, size in parts.items()}


def host_parts_gib(run: RunConfig, model: TransformerConfig) -> dict[str, float]:
    """The known parts of host memory in GiB per device: kept layer inputs, parameters, moments."""
    memory, number = run.memory, compute_bytes(run)
    _, host_inputs = _kept_inputs(memory, model.num_hidden_layers)
    parameters, moments = state_bytes(run, model)
    parts = {
        "layer inputs": host_inputs * number * device_tokens(run) * hidden_numbers(run, model),
        "attention outputs": _attention_bytes(run, model)
        if memory.policy.attention == "host"
        else 0,
        "parameters": parameters * memory.parameters_on_host,
        "moments": moments * memory.moments_on_host,
    }
    return {name: size / GIB for name, size in parts.items()}


def _kept_inputs(memory: MemoryConfig, layers: int) -> tuple[float, float]:
    """The number of layer inputs that exist at a time (on the device, on the host).

    With every_k = k, layers / k inputs are kept; the backward pass adds the k of the current group.
    """
    inputs = layers / memory.every_k + memory.every_k if memory.policy.every_k else layers
    return (0, inputs) if memory.policy.inputs == "host" else (inputs, 0)


def _attention_bytes(run: RunConfig, model: TransformerConfig) -> float:
    """Bytes per device of all layers' attention outputs (compute dtype) and log-sum-exps
    (float32)."""
    computed = computed_sizes(model, run.adapter, run.mesh.tensor)
    heads = computed.num_attention_heads / run.mesh.tensor
    of_a_head = compute_bytes(run) * model.head_dim + 4
    return model.num_hidden_layers * device_tokens(run) * heads * of_a_head


@functools.cache
def computed_sizes(
    model: TransformerConfig, adapter: AdapterConfig, tensor: int
) -> TransformerConfig:
    """Returns the model whose heads and widths, divided by `tensor`, are those that a device
    computes with: more than the model's where `tensor` does not divide them, since they are then
    padded or all on each device."""
    parallel = TensorParallel.of(model.with_adapter(adapter), tensor)
    heads = parallel.query_heads if parallel.heads else tensor * parallel.query_heads
    widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    repeated: dict[str, Any] = {
        name: tensor * width
        for name in widths
        if (width := getattr(model, name)) and not parallel.mlp
    }
    return dataclasses.replace(
        model,
        num_attention_heads=heads,
        num_key_value_heads=tensor * parallel.local_key_heads,
        **repeated,
    )


def hidden_numbers(run: RunConfig, model: TransformerConfig) -> float:
    """Returns how many numbers of each token's hidden state a device holds between layers."""
    mesh = run.mesh
    return model.hidden_size / (mesh.tensor if mesh.sequence_parallel else 1)


def compute_bytes(run: RunConfig) -> int:
    """Bytes per number of the compute dtype."""
    return np.dtype(run.model.compute_dtype).itemsize


def device_tokens(run: RunConfig) -> float:
    """The tokens that a device computes at a time."""
    mesh = run.mesh
    return (
        run.data.context_length
        * run.train.batch_size
        / (mesh.rows * mesh.sequence)
        / run.train.accumulation
    )


def state_bytes(run: RunConfig, model: TransformerConfig) -> tuple[float, float]:
    """Bytes per device of (parameters, moments of trained ones).

    Trained parameters and moments have the dtypes of the section optimizer; an adapter's base is in
    the compute dtype or quantized. A float32 average of the trained weights counts as a moment.
    """
    return _state_bytes(run, model, numbers_per_device(run, model))


def _state_bytes(
    run: RunConfig, model: TransformerConfig, numbers: Mapping[str, int]
) -> tuple[float, float]:
    """`state_bytes` of that many numbers of each parameter."""
    declared = declared_once(model.with_adapter(run.adapter))
    trained = trained_names(run, model)

    def total(names: Iterable[str], bytes_of: Callable[[str], float]) -> float:
        return sum(bytes_of(name) * numbers[name] for name in names)

    weight_bytes = np.dtype(run.optimizer.weight_dtype).itemsize

    def number_bytes(name: str) -> int:
        if weight_of(name) != name:  # codes and their scales
            return np.dtype(declared[name].dtype).itemsize
        if name in trained:
            return weight_bytes
        return compute_bytes(run) if declared[name].frozen else 4

    def moment_bytes(name: str) -> float:
        parameter = declared[name]
        return moment_count(run.optimizer, parameter) * moment_bits(run.optimizer, parameter) / 8

    average_bytes = 4 if run.optimizer.average_decay else 0
    moments = total(trained, lambda name: moment_bytes(name) + average_bytes)
    return total(declared, number_bytes), moments


def numbers_per_device(run: RunConfig, model: TransformerConfig) -> dict[str, int]:
    """Returns how many numbers of each parameter a device holds, padding included."""
    sizes = tuple(getattr(run.mesh, axis) for axis in MESH_AXES)
    return _numbers_per_device(model.with_adapter(run.adapter), sizes)


@functools.cache
def _numbers_per_device(model: TransformerConfig, sizes: tuple[int, ...]) -> dict[str, int]:
    """`numbers_per_device` on a mesh with axes of these sizes."""
    axes: dict[str, Any] = dict(zip(MESH_AXES, sizes, strict=True))
    mesh = abstract_mesh(MeshConfig(**axes))
    sharding = Sharding(mesh, model)
    return {
        name: math.prod(NamedSharding(mesh, spec).shard_shape(parameter.shape))
        for name, parameter in declared_once(sizes_in_memory(sharding)).items()
        for spec in [sharding.spec(name, parameter)]
    }


def checkpoint_bytes(run: RunConfig, model: TransformerConfig) -> tuple[float, float]:
    """A checkpoint's bytes of (parameters, moments); an adapter's base is not saved."""
    declared = declared_once(model.with_adapter(run.adapter))
    numbers = {name: math.prod(parameter.shape) for name, parameter in declared.items()}
    parameters, moments = _state_bytes(run, model, numbers)
    if run.adapter.rank:
        parameters = 4.0 * sum(numbers[name] for name in trained_names(run, model))
    return parameters, moments


def local_checkpoint_bytes(run: RunConfig, model: TransformerConfig, hosts: int) -> float:
    """A host's bytes of a local checkpoint: its share of the state, including replicas along
    `mesh.data`."""
    whole = sum(checkpoint_bytes(run, model))
    return min(whole, whole * run.mesh.data / hosts)


def trained_names(run: RunConfig, model: TransformerConfig) -> list[str]:
    """The names of the parameters that the run trains."""
    declared = declared_once(model.with_adapter(run.adapter))
    names = [name for name, parameter in declared.items() if not parameter.frozen]
    return trainable_names(names, run.model.trainable)


@functools.cache
def declared_once(model: TransformerConfig) -> dict[str, Parameter]:
    """The model's parameters by name, cached: flax is slow, and a search needs them often."""
    return declare(model)
