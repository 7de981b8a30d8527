"""Low-rank adapters in the model: the same loss and gradients however the layers run, and no
gradients of frozen weights."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.adapter import AdapterConfig
from model.families import FAMILIES
from tests.model.build import initial, llama, mean_loss, packed_batch, permuted, tiny
from trainer.huggingface.peft import check_train
from trainer.mesh import place_batch
from trainer.step import StepBuilder
from trainer.text import text_batch

ADAPTER = AdapterConfig(rank=4, alpha=8.0, train=("norm",))
CONFIG = tiny(adapter=ADAPTER)
DORA = tiny(adapter=dataclasses.replace(ADAPTER, use_dora=True))
BATCH = (4, 64)  # rows, tokens


def loss_and_gradients(model, batch, params=None):
    """Returns the mean loss and its gradients by name, without padding, for adapters whose B is not
    zero."""
    params = params or initial(model)
    frozen = {name: x for name, x in params.items() if model.parameters[name].frozen}
    generator = np.random.default_rng(0)
    unpadded = {
        name: tuple(map(slice, model.unpadded_shapes[name]))
        for name in params
        if name not in frozen
    }

    def perturbed(name, x):
        noise = np.zeros(x.shape, np.float32)
        noise[unpadded[name]] = 0.05 * generator.normal(size=model.unpadded_shapes[name])
        return jax.device_put(x + noise, x.sharding)

    trained = {name: perturbed(name, params[name]) for name in unpadded}
    fn = jax.jit(
        jax.value_and_grad(lambda trained: mean_loss(model)({**trained, **frozen}, batch)[0])
    )
    value, gradients = fn(trained)
    return float(value), {name: np.asarray(x)[unpadded[name]] for name, x in gradients.items()}


@functools.cache
def on_one_device(config=CONFIG):
    return loss_and_gradients(llama(config), packed_batch(config, *BATCH))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"fsdp": 2, "tensor": 2, "sequence": 2}, {}),
        pytest.param({"fsdp": 2, "sequence": 2}, {"prefetch": True}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 4}, {}, marks=pytest.mark.slow),
        pytest.param({"sequence": 2}, {"attention_groups": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"sequence": 2}, {"query_chunks": 2, "remat": "nothing"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"sequence": 2},
            {"query_chunks": 2, "attention_groups": 2, "remat": "every_k"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"fsdp": 2}, {"remat": "everything"}, marks=pytest.mark.slow),
        pytest.param(
            {"sequence": 2, "tensor": 2}, {"sequence_parallel": True}, marks=pytest.mark.slow
        ),
        pytest.param({"sequence": 4}, {"schedule": "all_gather"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_and_gradients_match_one_device(mesh, options):
    check_against_one_device(CONFIG, mesh, options)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"fsdp": 2, "tensor": 2, "sequence": 2}, {}),
        pytest.param({"data": 2, "tensor": 4}, {}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "sequence": 2}, {"prefetch": True}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2}, {"remat": "everything"}, marks=pytest.mark.slow),
        pytest.param(
            {"sequence": 2, "tensor": 2}, {"sequence_parallel": True}, marks=pytest.mark.slow
        ),
        pytest.param({"fsdp": 3}, {}, marks=pytest.mark.slow),  # pads the hidden size
    ],
    ids=str,
)
def test_dora_matches_one_device(mesh, options):
    check_against_one_device(DORA, mesh, options)


def check_against_one_device(config, mesh, options):
    """Checks that loss and gradients are within 1e-5 of one device, gradients relative to the
    parameter's largest."""
    model = llama(config, mesh, **options)
    rows = 6 if mesh.get("fsdp") == 3 else BATCH[0]
    whole = packed_batch(config, rows, BATCH[1])
    batch, _ = permuted(whole, model)
    loss, gradients = loss_and_gradients(model, place_batch(batch, model.mesh))
    expected_loss, expected = (
        on_one_device(config) if rows == BATCH[0] else loss_and_gradients(llama(config), whole)
    )
    assert abs(loss - expected_loss) <= 1e-5
    assert gradients.keys() == expected.keys() and any(
        name.endswith("lora_A") for name in gradients
    )
    for name, x in expected.items():
        assert np.abs(gradients[name] - x).max() <= 1e-5 * np.abs(x).max(), name


def test_new_adapters_do_not_change_the_loss():
    """B is zero, and A is within PEFT's bounds and not constant; the base is that of a model
    without adapters."""
    batch = packed_batch(CONFIG, rows=1, length=32)
    plain, adapted = llama(tiny()), llama(CONFIG)
    params, adapters = plain.init(0), adapted.init_adapters(0)
    assert all(not np.any(x) for name, x in adapters.items() if name.endswith("lora_B"))
    a = np.asarray(adapters["layers.self_attn.o_proj.lora_A"])
    assert a.shape == (2, 8, 8, 4) and 0.1 < np.abs(a).max() <= 1 / 8 and abs(a.mean()) < 0.02
    losses = [
        jax.jit(mean_loss(model))(weights, batch)[0]
        for model, weights in ((adapted, {**params, **adapters}), (plain, params))
    ]
    assert losses[0] == losses[1]
    assert {name for name, parameter in adapted.parameters.items() if not parameter.frozen} == {
        *adapters,
        *(name for name in params if name.endswith("norm.weight")),
    }


def test_new_magnitudes_are_the_norms_of_the_weights_columns():
    """Against numpy, on one device and on meshes; DoRA then computes what the base does, up to
    rounding."""
    batch = packed_batch(DORA, rows=1, length=32)
    plain, losses = llama(tiny()), []
    params = plain.init(0)
    for mesh in ({}, {"fsdp": 2, "tensor": 2, "sequence": 2}, {"tensor": 4}):
        model = llama(DORA, mesh)
        adapted = model.init(0)
        for name, inputs in (
            ("self_attn.q_proj", 1),
            ("self_attn.k_proj", 1),
            ("self_attn.o_proj", 2),
            ("mlp.down_proj", 1),
        ):
            weight = np.asarray(params[f"layers.{name}.weight"], np.float64)
            norms = np.sqrt(np.sum(weight**2, tuple(range(1, 1 + inputs))))
            np.testing.assert_allclose(
                np.asarray(adapted[f"layers.{name}.lora_magnitude_vector"]), norms, rtol=1e-6
            )
        if not mesh:
            losses = [
                float(jax.jit(mean_loss(model))(adapted, batch)[0]),
                float(jax.jit(mean_loss(plain))(params, batch)[0]),
            ]
    assert abs(losses[0] - losses[1]) <= 1e-6 * losses[1]


def float32_sizes(adapter):
    """Returns the sizes of all float32 arrays in the traced training step of a bfloat16 model, and
    the sizes of its matrices, both stacked and per layer."""
    config = tiny(
        hidden_size=88,
        intermediate_size=112,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=24,
        vocab_size=176,
        num_hidden_layers=3,
        adapter=adapter,
    )
    model = llama(config, dtype=jnp.bfloat16)
    text = StepBuilder(model, model.loss, text_batch(2, 32, model.mesh)).lower_train().as_text()
    arrays = {
        math.prod(map(int, shape.split("x")[:-1]))
        for shape in re.findall(r"tensor<([\dx]+xf32)>", text)
    }
    matrices = [
        parameter.shape
        for name, parameter in model.parameters.items()
        if name.endswith(("_proj.weight", "s.weight"))
    ]
    return arrays, {
        math.prod(shape[start:]) for shape in matrices for start in (0, 1) if len(shape[start:]) > 1
    }


def test_no_float32_array_has_the_size_of_a_frozen_matrix():
    """No copy, gradient or moment in the step as passed to the compiler; if everything is trained,
    every matrix has them."""
    for use_dora in (False, True):
        arrays, matrices = float32_sizes(AdapterConfig(rank=4, use_dora=use_dora))
        assert not arrays & matrices, arrays & matrices
    arrays, matrices = float32_sizes(None)
    assert arrays >= matrices


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        (
            {"targets": ("q_proj", "key")},
            ["adapter.targets", "'key'", "q_proj, k_proj, v_proj", "all-linear"],
        ),
        (
            {"targets": ("q_proj", "all-linear")},
            ["adapter.targets: found [q_proj, all-linear], needs all-linear alone, or names"],
        ),
        ({"rank": -1}, ["adapter.rank", "-1"]),
        (
            {"rank": 17},
            ["adapter.rank: found 17", "at most 16", "k_proj has 64 inputs and 16 outputs"],
        ),
        (
            {"rank": 4, "train": ("embeddings",)},
            ["adapter.train", "'embeddings'", "embed_tokens", "lm_head"],
        ),
        ({"train": ("norm", "")}, ["adapter.train: found an empty name", "embed_tokens"]),
        ({"alpha": 0.0}, ["adapter.alpha", "positive"]),
        ({"path": "x", "rank": 0}, ["adapter.rank", "adapter.path"]),
        ({"use_dora": True, "rank": 0}, ["adapter.rank", "adapter.use_dora"]),
    ],
    ids=str,
)
def test_an_invalid_adapter_is_refused(fields, facts):
    """In one line that names the field and a valid value."""
    with pytest.raises(ValueError) as error:
        check_train(llama(tiny(adapter=AdapterConfig(**{"rank": 4, **fields}))).config)
    message = str(error.value)
    assert all(fact in message for fact in facts) and "\n" not in message, message


MIXTURE = {
    "family": "qwen2_moe",
    "attention_bias": True,
    "output_bias": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "shared_expert_gate": True,
}
GPT_OSS = {
    "family": "gpt_oss",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    **FAMILIES["gpt_oss"].computes,
}


@pytest.mark.parametrize(
    ("model", "train", "words"),
    [
        ({}, "q_proj", "found 'q_proj', and q_proj has an adapter; a module has an adapter or is "),
        ({}, "proj", "found 'proj', and [qkvo]_proj has an adapter"),
        ({"family": "phi3"}, "gate_proj", "up_proj is missing; this model's files store gate_proj"),
        (GPT_OSS, "self_attn", "found 'self_attn', and self_attn has modules inside"),
        (MIXTURE, "down_proj", "found 'down_proj', and down_proj is of experts, .*"),
        (MIXTURE, "down_proj", ".*; shared_expert.down_proj names only the shared one"),
    ],
)
def test_modules_that_an_export_could_not_hold_are_not_trained_in_full(model, train, words):
    """PEFT's format has an adapter of a module or its weight, and one weight for projections that
    its files stack."""
    adapter = AdapterConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    with pytest.raises(ValueError, match=f"^adapter.train: {words}"):
        check_train(tiny(**model, adapter=dataclasses.replace(adapter, train=(train,))))


def test_all_projections_of_one_tensor_or_a_shared_expert_are_trained_in_full():
    adapter = AdapterConfig(rank=4, targets=("q_proj", "k_proj", "v_proj"))
    for model, train in (
        ({"family": "phi3"}, ("gate_proj", "up_proj")),
        (MIXTURE, ("shared_expert.down_proj",)),
    ):
        built = llama(tiny(**model, adapter=dataclasses.replace(adapter, train=train)))
        check_train(built.config)
        trained = {name for name, x in built.parameters.items() if not x.frozen}
        assert {name for name in trained if "lora" not in name} == {
            name for name in built.parameters if name.removesuffix(".weight").endswith(train)
        }
