"""Frozen weights as codes in the model: the same loss on every mesh, no float32 copies, and gathers
of codes only."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import codecs
from model.adapter import AdapterConfig
from model.quantized_weights import input_axes
from planning.parts import state_bytes
from tests.model.build import llama, mean_loss, packed_batch, permuted, tiny
from tests.model.test_adapter import loss_and_gradients
from trainer.config.schema import MeshConfig, ModelConfig, RunConfig
from trainer.mesh import place_batch
from trainer.step import StepBuilder
from trainer.text import text_batch

ADAPTER = AdapterConfig(rank=4, alpha=8.0, train=("norm",), quantize="nf4")
CONFIG = tiny(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=64, adapter=ADAPTER
)
INT8 = dataclasses.replace(CONFIG, adapter=dataclasses.replace(ADAPTER, quantize="int8"))
MIXTURE = dataclasses.replace(
    CONFIG,
    family="qwen3_moe",
    qk_norm="head",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
)
MIXTURE_INT8 = dataclasses.replace(MIXTURE, adapter=INT8.adapter)
DORA = dataclasses.replace(CONFIG, adapter=dataclasses.replace(ADAPTER, use_dora=True))
BATCH = (4, 64)  # rows, tokens


@functools.cache
def initial(family):
    """Returns fresh parameters before quantization."""
    config = CONFIG if family == "llama" else MIXTURE
    config = dataclasses.replace(config, adapter=dataclasses.replace(ADAPTER, quantize="none"))
    return {name: np.asarray(x) for name, x in llama(config).init(0).items()}


def parameters(model):
    """Returns the same parameters for any model without padding."""
    plain = initial(model.config.family)
    params = {
        name: jax.device_put(x, model.shardings[name])
        for name, x in plain.items()
        if name in model.parameters
    }
    params |= model.quantized(plain)
    return {**params, **model.init_magnitudes(params)}


@functools.cache
def on_one_device(config, rows=BATCH[0]):
    model = llama(config)
    return loss_and_gradients(model, packed_batch(config, rows, BATCH[1]), parameters(model))


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        pytest.param(CONFIG, {"fsdp": 2, "tensor": 2, "sequence": 2}, {}, marks=pytest.mark.slow),
        pytest.param(INT8, {"fsdp": 2, "tensor": 2, "sequence": 2}, {}, marks=pytest.mark.slow),
        pytest.param(DORA, {"fsdp": 2, "tensor": 2, "sequence": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            CONFIG, {"fsdp": 2, "sequence": 2}, {"prefetch": True}, marks=pytest.mark.slow
        ),
        pytest.param(INT8, {"fsdp": 2, "sequence": 2}, {"prefetch": True}, marks=pytest.mark.slow),
        pytest.param(CONFIG, {"data": 2, "tensor": 4}, {}, marks=pytest.mark.slow),
        pytest.param(CONFIG, {"sequence": 2}, {"attention_groups": 2}, marks=pytest.mark.slow),
        pytest.param(
            INT8,
            {"sequence": 2},
            {"query_chunks": 2, "attention_groups": 2, "remat": "every_k"},
            marks=pytest.mark.slow,
        ),
        pytest.param(CONFIG, {"fsdp": 2}, {"remat": "everything"}, marks=pytest.mark.slow),
        pytest.param(
            CONFIG,
            {"sequence": 2, "tensor": 2},
            {"sequence_parallel": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(CONFIG, {"fsdp": 3}, {}, marks=pytest.mark.slow),
        pytest.param(MIXTURE, {"fsdp": 2, "expert": 2, "tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param(MIXTURE_INT8, {"expert": 4, "sequence": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            MIXTURE, {"fsdp": 2, "sequence": 2}, {"prefetch": True}, marks=pytest.mark.slow
        ),
        *(
            pytest.param(CONFIG, {"sequence": 4}, {"schedule": schedule}, marks=pytest.mark.slow)
            for schedule in ("all_gather", "balanced", "ulysses")
        ),
    ],
    ids=lambda value: value.adapter.quantize if hasattr(value, "adapter") else str(value),
)
def test_loss_and_gradients_match_one_device(config, mesh, options):
    """Within 1e-5, gradients relative to the parameter's largest. Frozen weights have no
    gradients."""
    model = llama(config, mesh, **options)
    rows = 6 if mesh.get("fsdp") == 3 else BATCH[0]
    batch, _ = permuted(packed_batch(config, rows, BATCH[1]), model)
    params = model.init(0) if rows != BATCH[0] else parameters(model)
    assert {name: (x.shape, x.dtype) for name, x in params.items()} == {
        name: (parameter.shape, parameter.dtype) for name, parameter in model.parameters.items()
    }
    loss, gradients = loss_and_gradients(model, place_batch(batch, model.mesh), params)
    expected_loss, expected = on_one_device(config, rows)
    assert abs(loss - expected_loss) <= 1e-5
    assert gradients.keys() == expected.keys() and all(
        name.endswith((*config.adapter.parts, "norm.weight")) for name in gradients
    )
    for name, x in expected.items():
        assert np.abs(gradients[name] - x).max() <= 1e-5 * np.abs(x).max(), name


def test_the_loss_on_a_mesh_matches_one_device():
    """Within 1e-5 on fsdp 2 x tensor 2 x sequence 2; soak compares gradients too, on more
    meshes."""
    losses = []
    for mesh in ({}, {"fsdp": 2, "tensor": 2, "sequence": 2}):
        model = llama(CONFIG, mesh)
        batch, _ = permuted(packed_batch(CONFIG, *BATCH), model)
        losses.append(
            float(jax.jit(mean_loss(model))(parameters(model), place_batch(batch, model.mesh))[0])
        )
    assert abs(losses[0] - losses[1]) <= 1e-5


@pytest.mark.parametrize(
    "config",
    [CONFIG, INT8, MIXTURE, pytest.param(MIXTURE_INT8, marks=pytest.mark.slow)],
    ids=["nf4", "int8", "mixture nf4", "mixture int8"],
)
def test_the_loss_matches_the_dequantized_weights(config):
    """Dequantized by numpy and frozen as they are; quantization itself changes the loss."""
    plain_config = dataclasses.replace(
        config, adapter=dataclasses.replace(config.adapter, quantize="none")
    )
    model, plain = llama(config), llama(plain_config)
    params = parameters(model)
    weights = {name: jnp.asarray(x) for name, x in initial(config.family).items()}
    batch = packed_batch(config, *BATCH)
    loss = jax.jit(lambda model, params: model.loss(params, batch).total, static_argnums=0)
    plain_loss = loss(plain, weights)
    both = {
        "nf4": (codecs.quantize_nf4, codecs.dequantize_nf4),
        "int8": (codecs.quantize_int8, codecs.dequantize_int8),
    }
    quantize, dequantize = both[config.adapter.quantize]
    for name in model.quantized_names:
        stacked, inputs = np.asarray(weights[name]), input_axes(name)
        if "experts" in name:  # each expert's matrix separately
            stacked = stacked.reshape(-1, *stacked.shape[2:])
        rows = [layer.reshape(math.prod(layer.shape[:inputs]), -1).T for layer in stacked]
        weights[name] = jnp.asarray(
            np.stack([dequantize(quantize(row)).T for row in rows]).reshape(weights[name].shape)
        )
    assert len(model.quantized_names) == 7
    assert abs(loss(model, params) - loss(plain, weights)) <= 1e-6 * abs(plain_loss)
    assert abs(loss(model, params) - plain_loss) > 1e-5 * abs(plain_loss)


def test_shards_of_codes_have_whole_blocks():
    """If a mesh axis does not divide the blocks of a hidden size, another axis is split; also over
    tensor."""
    config = dataclasses.replace(CONFIG, hidden_size=192, intermediate_size=320)  # 3 and 5 blocks
    for mesh in ({"fsdp": 2, "sequence": 2}, {"fsdp": 2, "tensor": 2}, {"tensor": 4}, {"fsdp": 8}):
        model = llama(config, mesh)
        for name in model.quantized_names:
            codes, absmax = (model.parameters[f"{name}.{part}"] for part in ("codes", "absmax"))
            assert model.specs[f"{name}.codes"] == model.specs[f"{name}.absmax"]
            local = [
                model.shardings[f"{name}.{part}"].shard_shape(parameter.shape)
                for part, parameter in (("codes", codes), ("absmax", absmax))
            ]
            axis = input_axes(name)
            assert local[0][axis] == 32 * local[1][axis]
            assert math.prod(local[0]) * model.mesh.size <= math.prod(codes.shape) * mesh.get(
                "tensor", 1
            ), (name, mesh)


def lowered(quantize, mesh):
    config = tiny(
        hidden_size=448,
        intermediate_size=576,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=176,
        num_hidden_layers=3,
        adapter=AdapterConfig(rank=4, quantize=quantize),
    )
    model = llama(config, mesh, dtype=jnp.bfloat16)
    return model, StepBuilder(
        model, model.loss, text_batch(2, 32, model.mesh)
    ).lower_train().as_text()


def test_no_frozen_weight_is_float32_and_only_codes_are_gathered():
    """In the step as passed to the compiler: no copy, gradient or moment of a stacked matrix;
    gathers of NF4 carry at most 0.30 of bfloat16's bytes. A product dequantizes one projection from
    its levels, which compilers fuse."""
    _, plain = lowered("none", {"fsdp": 2})
    model, text = lowered("nf4", {"fsdp": 2})
    arrays = {
        math.prod(map(int, shape.split("x")[:-1]))
        for shape in re.findall(r"tensor<([\dx]+xf32)>", text)
    }
    stacked = {
        math.prod(model.parameters[f"{name}.codes"].shape) * 2 for name in model.quantized_names
    }
    assert not arrays & stacked

    def gathered(text):
        sizes = {"ui8": 0, "bf16": 0, "f32": 0}
        for shape, dtype in re.findall(
            r'stablehlo\.all_gather"?.*?-> tensor<((?:\d+x)+)(\w+)>', text
        ):
            sizes[dtype] += (
                math.prod(map(int, shape.strip("x").split("x")))
                * {"ui8": 1, "bf16": 2, "f32": 4}[dtype]
            )
        return sizes

    without, with_codes = gathered(plain), gathered(text)
    assert without["f32"] == with_codes["f32"] == 0 and without["ui8"] == 0 < with_codes["ui8"]
    assert with_codes["ui8"] <= 0.30 * (without["bf16"] - with_codes["bf16"])


def test_the_planner_counts_the_bytes_of_codes():
    """They match the model's arrays, on one device and two."""
    for quantize in ("nf4", "int8"):
        adapter = dataclasses.replace(ADAPTER, quantize=quantize, train=())
        for mesh in ({}, {"fsdp": 2}):
            model = llama(dataclasses.replace(CONFIG, adapter=adapter), mesh, dtype=jnp.bfloat16)
            run = RunConfig(
                adapter=adapter,
                mesh=MeshConfig(**mesh),
                model=ModelConfig(compute_dtype="bfloat16"),
            )
            own = sum(
                math.prod(model.shardings[name].shard_shape(array.shape))
                * jnp.dtype(array.dtype).itemsize
                for name, array in model.parameters.items()
            )
            planned, _ = state_bytes(run, dataclasses.replace(CONFIG, adapter=None))
            assert planned == own


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"quantize": "nf3"}, ["adapter.quantize", "'nf3'", "none, nf4, int8"]),
        ({"quantize": "nf4", "rank": 0}, ["adapter.rank", "adapter.quantize"]),
        ({"quantize": "nf4"}, ["adapter.quantize", "head_dim is 8", "64", "int8"]),
    ],
    ids=str,
)
def test_an_invalid_quantization_is_refused(fields, facts):
    """In one line that names the field and a valid value."""
    with pytest.raises(ValueError) as error:
        tiny(adapter=AdapterConfig(**{"rank": 4, **fields}))
    message = str(error.value)
    assert all(fact in message for fact in facts) and "\n" not in message, message
