"""Optimizers and learning-rate schedules against optax and explicit formulas, sharded and not."""

import dataclasses
import functools
import math
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from data.errors import UserError
from model.adapter import AdapterConfig
from model.agentic import TrajectoryEmbedAndHead, TrajectorySizes
from model.config import TransformerConfig
from model.families import FAMILIES
from model.parameter_declarations import declare
from model.sharding import Parameter
from planning.parts import parts_gib
from tests.model.build import mesh_of, tiny
from trainer.checkpoint.saving import flatten
from trainer.config.checks import check
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.schema import MemoryConfig, ModelConfig, OptimizerConfig, RunConfig
from trainer.huggingface.table import hf_layout
from trainer.optimizer import (
    EightBitMoments,
    abstract_state,
    apply_updates,
    learning_rate,
    make_optimizer,
    moment_bits,
    moment_count,
)
from trainer.streaming import keep_unless_finite

STEPS, WARMUP, PEAK = 20, 4, 0.5
MESH = {"fsdp": 2, "tensor": 2, "sequence": 2}
SPECS = {
    "layers.self_attn.q_proj.weight": PartitionSpec(None, ("fsdp", "sequence"), "tensor"),
    "layers.self_attn.o_proj.weight": PartitionSpec(None, "tensor", None, ("fsdp", "sequence")),
    "layers.input_layernorm.weight": PartitionSpec(None, ("fsdp", "sequence")),
    "embed_tokens.weight": PartitionSpec("tensor", ("fsdp", "sequence")),
}
PARAMETERS = {
    "layers.self_attn.q_proj.weight": Parameter(
        (2, 256, 4, 64), ("layers", "embed", "heads", "head_dim"), inputs=1
    ),
    "layers.self_attn.o_proj.weight": Parameter(
        (2, 4, 64, 256), ("layers", "heads", "head_dim", "embed"), inputs=2
    ),
    "layers.input_layernorm.weight": Parameter((2, 256), ("layers", "norm")),
    "embed_tokens.weight": Parameter((512, 256), ("vocab", "embed"), inputs=0),
}
SHAPES = {name: parameter.shape for name, parameter in PARAMETERS.items()}
SMALL = {
    "layers.self_attn.q_proj.lora_A": Parameter((2, 256, 8), ("layers", "embed", "rank"), inputs=1)
}
MATRIX = {"w.weight": Parameter((64, 128), ("embed", "mlp"), inputs=1)}
NAMES = ("adamw", "lion", "adafactor", "muon")
constant = functools.partial(OptimizerConfig, schedule="constant", clip_norm=0.0)


def optimizer_of(config, parameters=PARAMETERS, unpadded_shapes=None):
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    return make_optimizer(config, STEPS, parameters, unpadded_shapes or shapes)


def rates(schedule, **fields):
    config = OptimizerConfig(learning_rate=PEAK, warmup_steps=WARMUP, schedule=schedule, **fields)
    return np.array([learning_rate(config, STEPS, jnp.int32(step)) for step in range(STEPS)])


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [("cosine", WARMUP, 0.1), ("linear", WARMUP, 0.1), ("wsd", 15, 0.1), ("constant", WARMUP, 1.0)],
)
def test_the_learning_rate_matches_optax(schedule, first, last):
    decay = optax.cosine_decay_schedule if schedule == "cosine" else None
    expected = [PEAK * (step + 1) / WARMUP for step in range(WARMUP)]
    for done in range(WARMUP + 1, STEPS + 1):
        if decay:
            expected.append(decay(PEAK, STEPS - first, alpha=last)(done - first))
        else:
            expected.append(optax.linear_schedule(PEAK, PEAK * last, STEPS - first, first)(done))
    np.testing.assert_allclose(rates(schedule, decay_fraction=0.25), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "stable"), [("constant", STEPS), ("wsd", 15), ("linear", 0), ("cosine", 0)]
)
def test_the_stable_phase_is_the_same_in_a_longer_run(schedule, stable):
    config = OptimizerConfig(schedule=schedule, warmup_steps=WARMUP, decay_fraction=0.25)
    assert config.stable_steps(STEPS) == stable
    same = [
        float(learning_rate(config, STEPS, step)) == float(learning_rate(config, 2 * STEPS, step))
        for step in map(jnp.int32, range(WARMUP, STEPS))
    ]
    assert all(same[: max(stable - WARMUP, 0)]) and (
        schedule == "constant" or not any(same[max(stable - WARMUP, 0) :])
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_warmup_as_a_fraction_equals_warmup_in_steps(schedule):
    config = OptimizerConfig(learning_rate=PEAK, warmup_fraction=WARMUP / STEPS, schedule=schedule)
    shared = [float(learning_rate(config, STEPS, jnp.int32(step))) for step in range(STEPS)]
    np.testing.assert_array_equal(shared, rates(schedule))
    assert config.stable_steps(STEPS) == 0, "a longer run warms up for longer"
    with pytest.raises(
        ValueError,
        match=r"optimizer\.warmup_fraction: found 0\.1, needs to be left out with .*warmup_steps",
    ):
        OptimizerConfig(warmup_fraction=0.1, warmup_steps=1)


@pytest.mark.parametrize(
    ("share", "steps"), [("0.07", 100), ("0.14", 50), ("0.03", 1000), ("0.031", 100)]
)
def test_a_warmup_fraction_is_of_the_written_decimal(share, steps):
    """0.07 * 100 in binary is more than 7, which made a warm-up of 8 steps."""
    config = OptimizerConfig(warmup_fraction=float(share))
    assert config.first_steps(steps) == math.ceil(Decimal(share) * steps)


def trained(config, mesh):
    """The parameters after three steps with gradients from a fixed seed, and the leaves of the
    optimizer state on the mesh."""
    random = np.random.default_rng(0)
    abstract = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, SPECS[name]))
        for name, shape in SHAPES.items()
    }
    params = {
        name: jax.device_put(random.normal(size=x.shape).astype(np.float32), x.sharding)
        for name, x in abstract.items()
    }
    optimizer = optimizer_of(config)
    states = abstract_state(optimizer, abstract, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, states)
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    jax.tree.map(
        lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)), state, states
    )

    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        step, out_shardings=({name: x.sharding for name, x in abstract.items()}, shardings)
    )
    for _ in range(3):
        gradient = {
            name: jax.device_put(random.normal(size=x.shape).astype(np.float32), x.sharding)
            for name, x in abstract.items()
        }
        params, state = step(params, state, gradient)
    return {name: np.asarray(x) for name, x in params.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_optimizer_matches_one_device(name):
    config = constant(name=name, learning_rate=0.1, weight_decay=0.1)
    sharded, alone = trained(config, mesh_of(MESH)), trained(config, mesh_of({}))
    for parameter, value in alone.items():
        np.testing.assert_allclose(
            sharded[parameter], value, rtol=1e-4, atol=1e-5, err_msg=parameter
        )


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_8_bit_moments_are_the_same_on_any_mesh(name):
    """Bitwise, since a number's rounding depends only on its index in the whole array."""
    config = constant(name=name, learning_rate=0.1, moment_dtype="8bit")
    sharded, alone = trained(config, mesh_of(MESH)), trained(config, mesh_of({}))
    for parameter, value in alone.items():
        np.testing.assert_array_equal(sharded[parameter], value, err_msg=parameter)


def test_bfloat16_weights_move_by_steps_below_their_resolution():
    """A thousand steps of a thousandth of the distance to the next number: one distance on average,
    where rounding to nearest would not move."""
    params = {"w.weight": jnp.ones((64, 64), jnp.bfloat16)}
    updates = {"w.weight": jnp.full((64, 64), 2.0**-7 / 1000, jnp.float32)}

    def step(i, params):
        return apply_updates(params, updates, i)

    moved = jax.lax.fori_loop(0, 1000, step, params)["w.weight"]
    assert moved.dtype == jnp.bfloat16
    assert float(moved.astype(jnp.float32).mean()) == pytest.approx(1 + 2.0**-7, abs=2.0**-7 / 20)


def test_a_non_finite_step_leaves_8_bit_moments_unchanged():
    """Codes are integers, as counters are, but must be restored."""
    config = OptimizerConfig(moment_dtype="8bit", schedule="constant")
    optimizer = optimizer_of(config, MATRIX)
    params = {"w.weight": jnp.ones((8, 128))}
    old = optimizer.init(params)
    gradient = {"w.weight": jax.random.normal(jax.random.key(0), (8, 128))}
    _, new = optimizer.update(gradient, old, params)
    moments = jax.tree.leaves(new, is_leaf=lambda x: isinstance(x, EightBitMoments))
    assert [int(x.steps) for x in moments if isinstance(x, EightBitMoments)] == [1]
    kept = keep_unless_finite(jnp.bool_(False), new, old)
    for x, before, after in zip(*map(jax.tree.leaves, (kept, old, new)), strict=True):
        np.testing.assert_array_equal(x, before if x.ndim else after)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True))


def arrays_of_state(config, declared):
    mesh = mesh_of({})
    whole = NamedSharding(mesh, PartitionSpec())
    abstract = {
        name: jax.ShapeDtypeStruct(parameter.shape, jnp.float32, sharding=whole)
        for name, parameter in declared.items()
    }
    return jax.tree.leaves(abstract_state(optimizer_of(config, declared), abstract, mesh))


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_planned_bytes_of_moments_match_the_state(moments):
    config = OptimizerConfig(moment_dtype=moments)
    held = sum(x.size * x.dtype.itemsize for x in arrays_of_state(config, PARAMETERS) if x.ndim)
    planned = sum(
        moment_count(config, parameter)
        * np.prod(parameter.shape)
        * moment_bits(config, parameter)
        / 8
        for parameter in PARAMETERS.values()
    )
    assert held == planned


def test_lions_update_is_the_sign_of_its_interpolated_moment():
    config = constant(name="lion", learning_rate=0.1, beta1=0.9, beta2=0.99)
    optimizer, params = optimizer_of(config, MATRIX), {"w.weight": jnp.array([1.0, 2.0])}
    state, moment, value = optimizer.init(params), np.zeros(2), np.array([1.0, 2.0])
    for gradient in (np.array([1.0, -1.0]), np.array([-3.0, 0.5])):
        updates, state = optimizer.update({"w.weight": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        value = value - 0.1 * np.sign(0.9 * moment + 0.1 * gradient)
        moment = 0.99 * moment + 0.01 * gradient
        np.testing.assert_allclose(params["w.weight"], value, rtol=1e-6)


def test_muons_update_of_a_layers_matrix_is_orthogonal():
    """All singular values are about equal, for inputs [E] and outputs [H, D], and for inputs [H, D]
    and outputs [E]."""
    config = constant(name="muon", learning_rate=1.0)
    optimizer = optimizer_of(config)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    gradient = {name: jax.random.normal(jax.random.key(0), shape) for name, shape in SHAPES.items()}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    for name in ("layers.self_attn.q_proj.weight", "layers.self_attn.o_proj.weight"):
        for layer in np.asarray(updates[name]).reshape(2, 256, 256):
            values = np.linalg.svd(layer, compute_uv=False)
            assert (
                values.max() < 2 * np.median(values)
                and (values > 0.5 * np.median(values)).mean() > 0.95
            )
    # AdamW's first update has the same magnitude everywhere.
    assert np.ptp(np.abs(np.asarray(updates["embed_tokens.weight"]))) < 1e-2


def test_muons_update_of_each_experts_matrix_is_orthogonal():
    config = constant(name="muon", learning_rate=1.0)
    name, shape = "layers.mlp.experts.up_proj.weight", (2, 3, 64, 96)
    declared = {name: Parameter(shape, ("layers", "experts", "embed", "mlp"), inputs=1)}
    optimizer, params = optimizer_of(config, declared), {name: jnp.zeros(shape)}
    gradient = {name: jax.random.normal(jax.random.key(0), shape)}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    for matrix in np.asarray(updates[name]).reshape(-1, 64, 96):
        values = np.linalg.svd(matrix, compute_uv=False)
        assert values.max() < 2 * values.min()


def moments_of(state):
    """The places and shapes of a state's moments."""
    return {
        jax.tree_util.keystr(path): x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if x.ndim
    }


def test_muon_takes_optaxs_steps():
    """With several axes of inputs or outputs merged; also the same tree of states, which saved
    checkpoints hold."""
    config = constant(name="muon", learning_rate=0.1, weight_decay=0.1)
    merged = {
        "layers.self_attn.q_proj.weight": ((1,), (2, 3)),
        "layers.self_attn.o_proj.weight": ((1, 2), (3,)),
        "layers.input_layernorm.weight": None,
        "embed_tokens.weight": None,
    }
    reference = optax.contrib.muon(
        0.1,
        weight_decay=0.1,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.epsilon,
        consistent_rms=0.2,
        weight_decay_mask=lambda params: dict.fromkeys(params, True),
        muon_weight_dimension_numbers={
            name: axes and optax.contrib.MuonDimensionNumbers(*axes)
            for name, axes in merged.items()
        },
    )
    optimizer = optimizer_of(config)
    random = np.random.default_rng(0)
    params = {name: jnp.asarray(random.normal(size=shape)) for name, shape in SHAPES.items()}
    state, expected_state = optimizer.init(params), reference.init(params)
    for _ in range(2):
        gradient = {name: jnp.asarray(random.normal(size=shape)) for name, shape in SHAPES.items()}
        updates, state = optimizer.update(gradient, state, params)
        expected, expected_state = reference.update(gradient, expected_state, params)
        for name, x in expected.items():
            np.testing.assert_allclose(updates[name], x, rtol=1e-5, err_msg=name)
    assert moments_of(state[1]) == moments_of(expected_state)


def test_bfloat16_moments_do_not_round_muons_coefficients():
    """The first step, whose moment is not rounded yet, is that of float32."""
    declared = {"layers.w": Parameter((2, 8, 12), ("layers", "embed", "mlp"), inputs=1)}
    params = {"layers.w": jnp.zeros((2, 8, 12))}
    gradient = {"layers.w": jax.random.normal(jax.random.key(0), (2, 8, 12))}
    steps = []
    for dtype in ("float32", "bfloat16"):
        optimizer = optimizer_of(OptimizerConfig(name="muon", moment_dtype=dtype), declared)
        state = optimizer.init(params)
        dtypes = {name: str(x.dtype) for name, x in flatten(state).items() if x.ndim}
        coefficients = [dtypes.pop(name) for name in [*dtypes] if name.endswith("ns_coeffs")]
        assert coefficients == ["float32"] and set(dtypes.values()) == {dtype}
        steps.append(optimizer.update(gradient, state, params)[0]["layers.w"])
    np.testing.assert_array_equal(*steps)


def padded_step(name, own, padded, parameter, layers_gradient):
    """The update of one parameter whose array is larger than it, without the padding; the second
    step's, whose gradient is three times the first's, so that Adafactor clips it."""
    config = constant(name=name, learning_rate=1.0)
    declared = {"w": dataclasses.replace(parameter, shape=padded)}
    optimizer = optimizer_of(config, declared, {"w": own})
    extra = [(0, after - before) for before, after in zip(own, padded, strict=True)]
    params = {"w": jnp.zeros(padded)}
    state = optimizer.init(params)
    for scale in (1, 3):
        gradient = jnp.pad(scale * jnp.asarray(layers_gradient, jnp.float32), extra)
        updates, state = optimizer.update({"w": gradient}, state, params)
    assert not np.any(np.asarray(updates["w"])[:, :, own[2] :]), "the padding stays zero"
    return np.asarray(updates["w"])[tuple(map(slice, own))]


@pytest.mark.parametrize("head_dim", [64, 16])
@pytest.mark.parametrize("name", NAMES)
def test_heads_padded_in_memory_do_not_change_a_step(name, head_dim):
    """Muon's update, and Adafactor's clipping and factors, which need 128 outputs, depend on a
    matrix's size, of which padding is no part."""
    own, parameter = (2, 256, 6, head_dim), PARAMETERS["layers.self_attn.q_proj.weight"]
    gradient = np.random.default_rng(0).normal(size=own)
    alone = padded_step(name, own, own, parameter, gradient)
    padded = padded_step(name, own, (2, 256, 8, head_dim), parameter, gradient)
    np.testing.assert_allclose(padded, alone, rtol=1e-4, atol=1e-6)


def test_adafactor_clips_each_layers_weight_alone():
    """As optax does with the one weight, whatever the gradients of other layers."""
    own, parameter = (2, 256, 4, 64), PARAMETERS["layers.self_attn.q_proj.weight"]
    gradient = np.random.default_rng(0).normal(size=own)
    gradient[1] *= np.linspace(0.1, 30, 256)[:, None, None]
    ours = padded_step("adafactor", own, own, parameter, gradient)
    for layer in range(2):
        reference = optax.chain(
            optax.scale_by_factored_rms(decay_rate=0.8, epsilon=1e-30),
            optax.clip_by_block_rms(1.0),
        )
        weight = jnp.zeros((256, 256))
        state = reference.init(weight)
        for scale in (1, 3):
            one = jnp.asarray(scale * gradient[layer].reshape(256, 256), jnp.float32)
            update, state = reference.update(one, state, weight)
        assert np.sqrt(np.mean(np.square(update))) == pytest.approx(1), "it is clipped"
        np.testing.assert_allclose(-ours[layer].reshape(256, 256), update, rtol=1e-5, atol=1e-6)


def adafactors_update(gradients, factored):
    """The last update of arrays [..., inputs, outputs], each matrix alone, or of vectors
    [..., outputs], by algorithms 4 and 5 of Adafactor's paper."""
    axes = (-2, -1) if factored else ()
    rows = columns = 0.0
    for step, gradient in enumerate(gradients, 1):
        decay, square = 1 - step**-0.8, gradient**2 + 1e-30
        rows = decay * rows + (1 - decay) * square.sum(axes[1:], keepdims=True)
        columns = decay * columns + (1 - decay) * square.sum(axes[:1], keepdims=True)
    moment = rows * columns / rows.sum(axes[:1], keepdims=True) if factored else rows
    return gradient / np.sqrt(moment)


@pytest.mark.parametrize(
    ("shape", "axes", "inputs"),
    [
        ((2, 144, 128, 4), ("layers", "experts", "embed", "rank"), 1),
        ((1, 144, 128, 136), ("layers", "experts", "embed", "mlp"), 1),
        ((2, 144, 136), ("layers", "experts", "mlp"), None),
        ((144, 128, 8), ("layers", "embed", "rank"), 1),
        ((144, 136), ("layers", "norm"), None),
    ],
)
def test_adafactor_factors_each_matrix_alone(shape, axes, inputs):
    """Not across experts or layers, even if they are the largest axes; nor vectors."""
    declared = {"w": Parameter(shape, axes, inputs=inputs)}
    config = constant(name="adafactor", learning_rate=1.0, warmup_steps=0)
    optimizer, params = optimizer_of(config, declared), {"w": jnp.zeros(shape)}
    random, state = np.random.default_rng(0), optimizer.init(params)
    stacked = declared["w"].stacked
    own = tuple(range(stacked, len(shape)))
    scales = np.expand_dims(random.uniform(0.1, 10, shape[:stacked]), own)
    gradients = [step * scales * random.normal(size=shape) for step in (1, 3)]
    for gradient in gradients:
        updates, state = optimizer.update({"w": jnp.asarray(gradient, jnp.float32)}, state, params)
    expected = adafactors_update(gradients, inputs is not None and min(shape[-2:]) >= 128)
    expected /= np.maximum(1, np.sqrt(np.mean(expected**2, own, keepdims=True)))
    np.testing.assert_allclose(-updates["w"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["self_attn.o_proj.lora_magnitude_vector", "self_attn.sinks"])
@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_layers_are_not_treated_as_matrices(name, kind):
    """They are neither decayed nor orthogonalized by Muon: a gradient in one layer leaves the other
    layer's numbers as they are."""
    config = constant(name=name, learning_rate=0.1, weight_decay=0.1)
    with_dora = tiny(adapter=AdapterConfig(rank=2, use_dora=True))
    declared = declare(with_dora) | declare(TransformerConfig.preset("gpt-oss-20b"))
    vectors, shape = f"layers.{kind}", declared[f"layers.{kind}"].shape
    optimizer = optimizer_of(config, declared)
    params = {vectors: jnp.full(shape, 3.0)}
    updates, _ = optimizer.update(
        {vectors: jnp.zeros(shape).at[0].set(1.0)}, optimizer.init(params), params
    )
    assert not np.any(updates[vectors][1])
    assert np.ptp(updates[vectors][0]) < 1e-6 and np.all(updates[vectors][0] < 0)


def test_matrices_are_those_of_two_axes_in_hugging_faces_files():
    """In every preset, for each expert alone: what transformers' trainers decay. The biases of
    trajectories' models, which are in no such file, are vectors."""
    embed_and_head = functools.partial(TrajectoryEmbedAndHead, sizes=TrajectorySizes(5, 2))
    for name, parameter in declare(tiny(), embed_and_head).items():
        assert parameter.is_matrix != name.endswith((".bias", "norm.weight")), name
    presets = [name for family in FAMILIES.values() for name in family.presets]
    assert len(presets) > 20
    for preset in presets:
        config = TransformerConfig.preset(preset)
        declared = declare(config)
        for entry in hf_layout(config):
            if not declared[entry.name].constant:  # never trained
                expected = len(entry.hf_shape) == 2
                assert declared[entry.name].is_matrix == expected, (preset, entry.name)


@pytest.mark.parametrize("declared", [PARAMETERS, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("name", NAMES)
def test_planned_moments_match_the_state(name, declared):
    config = OptimizerConfig(name=name)
    held = sum(x.size for x in arrays_of_state(config, declared))
    planned = sum(
        moment_count(config, parameter) * np.prod(parameter.shape)
        for parameter in declared.values()
    )
    assert held == pytest.approx(
        planned, abs=0.02 * sum(np.prod(parameter.shape) for parameter in declared.values())
    )
    sizes = {
        chosen: parts_gib(RunConfig(optimizer=OptimizerConfig(name=chosen)), tiny())["moments"]
        for chosen in (name, "adamw")
    }
    assert sizes[name] <= sizes["adamw"]


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizers_that_are_not_elementwise_cannot_be_streamed_from_the_host(name):
    config = RunConfig(
        model=ModelConfig(preset="tiny", tokenizer="t"),
        data=DataConfig(sources=(SourceConfig("a.json"),)),
        optimizer=OptimizerConfig(name=name),
        memory=MemoryConfig(moments_on_host=True),
    )
    with pytest.raises(
        UserError,
        match=f"optimizer.name: found '{name}', needs adamw or lion with memory.moments_on_host",
    ):
        check(config)


def test_matrices_decay_and_norms_and_biases_do_not():
    """With no gradient, a step with rate 1 and decay 0.1 removes a tenth of each matrix."""
    config = OptimizerConfig(
        learning_rate=1.0, weight_decay=0.1, schedule="constant", warmup_steps=0
    )
    names = ("a.weight", "layers.input_layernorm.weight", "layers.q_proj.bias")
    parameters = {
        names[0]: Parameter((2, 2), ("embed", "mlp"), inputs=1),
        names[1]: Parameter((2, 2), ("layers", "norm")),
        names[2]: Parameter((2, 2), ("layers", "head_dim")),
    }
    optimizer = optimizer_of(config, parameters)
    params = {name: jnp.full((2, 2), 3.0) for name in names}
    zeros = {name: jnp.zeros((2, 2)) for name in names}
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert [round(float(updates[name][0, 0]), 6) for name in names] == [-0.3, 0, 0]
