"""The model of trajectories: the same on every mesh, schedule and layout; its loss and embedding
against plain numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.trajectories.options import TrajectoryConfig
from data.trajectories.rows import Decisions, Scales, relabelled, row
from model.agentic import AgenticTransformer, Kind, TrajectorySizes
from model.attention.kernels import get_kernel
from model.attention.layout import permutation
from model.config import TransformerConfig
from model.families import FAMILIES
from model.memory.options import MemoryConfig
from model.norms import rms_norm
from tests.model.build import mesh_of

SIZES = TrajectorySizes(observation=5, action=2)
CONFIG = TransformerConfig(
    vocab_size=1,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
ROWS, LENGTH = 2, 64


def model_on(axes=None, config=CONFIG, sizes=SIZES, **options):
    options = {"kernel": get_kernel("reference"), **options}
    return AgenticTransformer(
        config, mesh_of(axes or {}), dtype=jnp.float32, sizes=sizes, **options
    )


def batch_of(rows=ROWS, length=LENGTH, padding=8, seed=0):
    """Returns two rows of (return, state, action, reward) tokens, the second one padded."""
    generator = np.random.default_rng(seed)
    kinds = np.tile(np.arange(4, dtype=np.int32), (rows, length // 4))
    index = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy()
    segment_ids = np.ones((rows, length), np.int32)
    segment_ids[1, length - padding :] = 0
    weights = ((kinds == Kind.STATE) & (segment_ids > 0)).astype(np.float32)
    values = generator.normal(size=(rows, length, SIZES.width)).astype(np.float32)
    targets = generator.uniform(-1, 1, size=(rows, length, SIZES.action)).astype(np.float32)
    return {
        "values": values,
        "kinds": kinds,
        "targets": targets,
        "loss_weights": weights,
        "positions": index.copy(),
        "index": index,
        "segment_ids": segment_ids,
    }


def permuted(batch, model, layout):
    order = permutation(LENGTH, model.mesh.shape["sequence"], layout)
    return {name: array[:, order] for name, array in batch.items()}


def loss_and_gradient(model, params, batch):
    def mean_loss(params):
        sums = model.loss(params, batch)
        return sums.total / sums.weight

    return jax.jit(jax.value_and_grad(mean_loss))(params)


def test_each_kind_of_input_is_embedded_with_its_own_matrix():
    model, batch = model_on(), batch_of()
    params = model.init(0)
    weight = np.asarray(params["embed_inputs.weight"]).reshape(len(Kind), SIZES.width, -1)
    expected = np.einsum("btw,btwe->bte", batch["values"], weight[batch["kinds"]])
    expected += np.asarray(params["embed_inputs.bias"])[batch["kinds"]]
    embed = jax.shard_map(
        model.local_embed,
        mesh=model.mesh,
        in_specs=(model.specs, jax.sharding.PartitionSpec()),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(embed)(params, batch), expected, atol=1e-6)


def test_the_loss_is_the_mean_squared_error_at_states():
    model, batch = model_on(), batch_of()
    params = model.init(0)
    predicted = np.asarray(jax.jit(model.actions)(params, batch), np.float64)
    assert np.abs(predicted).max() < 1
    errors = np.square(predicted - batch["targets"]).mean(-1)
    loss, _ = loss_and_gradient(model, params, batch)
    assert float(loss) == pytest.approx(
        (errors * batch["loss_weights"]).sum() / batch["loss_weights"].sum(), rel=1e-6
    )


def test_a_mixture_of_actions_trains_its_likelihood_and_chooses_the_most_probable():
    model, batch = model_on(sizes=SIZES._replace(components=3)), batch_of()
    params = model.init(0)
    assert params["action_head.weight"].shape[1] == 3 * (SIZES.action + 1)
    loss, gradient = loss_and_gradient(model, params, batch)

    def head_outputs(params, batch):
        x = rms_norm(model.local_hidden(params, batch), params["norm.weight"], CONFIG.rms_norm_eps)
        return x @ params["action_head.weight"] + params["action_head.bias"]

    everywhere = jax.sharding.PartitionSpec()
    head_outputs = jax.shard_map(
        head_outputs,
        mesh=model.mesh,
        in_specs=(model.specs, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )
    head_outputs = np.asarray(jax.jit(head_outputs)(params, batch), np.float64)
    actions = np.tanh(head_outputs[..., :6]).reshape(*head_outputs.shape[:2], 3, 2)
    probabilities = np.exp(head_outputs[..., 6:]) / np.exp(head_outputs[..., 6:]).sum(
        -1, keepdims=True
    )
    distances = np.square(actions - np.asarray(batch["targets"])[:, :, None]).sum(-1)
    losses = -np.log((probabilities * np.exp(-distances / (2 * 0.2**2))).sum(-1))
    weights = np.asarray(batch["loss_weights"])
    assert float(loss) == pytest.approx((losses * weights).sum() / weights.sum(), rel=1e-5)
    chosen = np.take_along_axis(actions, probabilities.argmax(-1)[..., None, None], 2)[:, :, 0]
    np.testing.assert_allclose(jax.jit(model.actions)(params, batch), chosen, atol=1e-5)
    assert all(np.isfinite(value).all() and np.abs(value).max() > 0 for value in gradient.values())


def test_an_action_does_not_depend_on_anything_after_its_state():
    model, batch = model_on(), batch_of()
    params, actions = model.init(0), jax.jit(model.actions)
    state = 21
    assert batch["kinds"][0, state] == Kind.STATE
    changed = {**batch, "values": batch["values"].copy()}
    changed["values"][:, state + 1 :] += 1
    np.testing.assert_array_equal(
        actions(params, changed)[:, : state + 1], actions(params, batch)[:, : state + 1]
    )


def test_a_new_model_with_gemmas_norms_does_not_predict_zeros():
    """The weights of its norms start at 0, with an offset of 1."""
    gemma = TransformerConfig(
        **{
            name: getattr(CONFIG, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
            )
        },
        family="gemma2",
        **FAMILIES["gemma2"].computes,
    )
    model = model_on(config=gemma)
    params = model.init(0)
    assert not np.asarray(params["norm.weight"]).any()
    predicted = jax.jit(model.actions)(params, batch_of())
    assert np.abs(np.asarray(predicted)).max() > 1e-4


@pytest.mark.parametrize(
    ("axes", "layout", "schedule", "memory"),
    [
        ({"fsdp": 2, "sequence": 4}, "striped", "ring", {}),
        pytest.param(
            {"tensor": 2, "sequence": 2},
            "zigzag",
            "ulysses",
            {"remat": "save_attention", "loss_chunk": 8},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"fsdp": 2, "tensor": 2, "sequence": 2},
            "striped",
            "all_gather",
            {"feed_forward_chunk": 8},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_loss_and_gradients_match_one_device(axes, layout, schedule, memory):
    config = (
        dataclasses.replace(CONFIG, hidden_size=40, head_dim=8) if "tensor" not in axes else CONFIG
    )
    one_device = model_on(config=config, memory=MemoryConfig(remat="nothing"))
    sharded = model_on(axes, config, schedule=schedule, memory=MemoryConfig(**memory))
    params = one_device.init(0)
    expected_loss, expected = loss_and_gradient(one_device, params, batch_of())
    loss, gradient = loss_and_gradient(
        sharded, sharded.init(0), permuted(batch_of(), sharded, layout)
    )
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for name, value in expected.items():
        unpadded = np.asarray(gradient[name])[tuple(slice(size) for size in value.shape)]
        np.testing.assert_allclose(
            unpadded, value, rtol=0, atol=1e-5 * float(jnp.abs(value).max()), err_msg=name
        )


# The columns of Ring Attention's Table 5: (mesh, kernel, chunk size).
TILES = get_kernel("xla", query_tile=8, key_tile=8)
COLUMNS = {
    "vanilla": ({}, get_kernel("reference"), 0),
    "memory-efficient": ({}, TILES, 0),
    "blockwise": ({}, TILES, 8),
    "ring": ({"fsdp": 2, "sequence": 4}, TILES, 4),
}


@pytest.fixture(scope="module")
def trajectories():
    """Returns two rows of three trajectories each, built as for training: 60 tokens and padding."""
    scales = Scales(np.zeros(SIZES.observation), np.ones(SIZES.observation), 2.0)
    generator = np.random.default_rng(4)

    def trajectory():
        return Decisions(
            generator.normal(size=(5, SIZES.observation)).astype(np.float32),
            generator.uniform(-1, 1, (5, SIZES.action)).astype(np.float32),
            generator.uniform(size=5).astype(np.float32),
        )

    rows = [
        row(
            relabelled([trajectory() for _ in range(3)]),
            scales,
            LENGTH,
            TrajectoryConfig(in_context=3),
        )
        for _ in range(ROWS)
    ]
    return {name: np.stack([arrays[name] for arrays in rows]) for name in rows[0]}


def in_column(name, batch):
    """Returns the loss and the gradient of a batch with a column's attention."""
    axes, kernel, chunk = COLUMNS[name]
    model = model_on(
        axes,
        kernel=kernel,
        schedule="ring" if axes else "local",
        memory=MemoryConfig(
            remat="nothing", projection_chunk=chunk, feed_forward_chunk=chunk, loss_chunk=chunk
        ),
    )
    return loss_and_gradient(
        model, model.init(0), permuted(batch, model, "striped" if axes else "contiguous")
    )


@pytest.fixture(scope="module")
def vanilla(trajectories):
    """Returns the loss and the gradient with attention that keeps every score."""
    return in_column("vanilla", trajectories)


@pytest.mark.parametrize("column", list(COLUMNS)[1:])
def test_all_kinds_of_attention_give_the_same_loss_and_gradient(column, trajectories, vanilla):
    """They differ only in memory."""
    (expected_loss, expected), (loss, gradient) = vanilla, in_column(column, trajectories)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5) and float(loss) > 0.1
    for name, value in expected.items():
        np.testing.assert_allclose(
            gradient[name], value, rtol=0, atol=1e-5 * float(jnp.abs(value).max()), err_msg=name
        )
