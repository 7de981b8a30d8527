"""The training step's options: accumulation in float32, frozen parameters, bfloat16 moments,
non-finite steps."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.adapter import AdapterConfig
from model.dropout import token_keys
from model.families import FAMILIES
from model.loss import LossSums, SourceSums
from model.memory.options import MemoryConfig
from model.sharding import Parameter
from planning.compiled.transfers import collectives
from tests.model.build import ALL_AT_ONCE, MESHES, llama, mesh_of, packed_batch, tiny
from trainer.checkpoint.store import CheckpointStore
from trainer.config.schema import OptimizerConfig, TrainConfig
from trainer.mesh import place_batch
from trainer.step import StepBuilder
from trainer.text import text_batch

ROWS, LENGTH = 8, 32
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, final_fraction=1.0, clip_norm=0.0)
ON_DEVICE = MemoryConfig()


@functools.cache
def built(
    mesh="one",
    trainable=".*",
    optimizer=OPTIMIZER,
    non_finite="stop",
    memory=ON_DEVICE,
    config=None,
):
    """A model, its builder and its compiled step."""
    options = {
        name: getattr(memory, name)
        for name in ("remat", "every_k", "attention_groups", "query_chunks")
    }
    model = llama(config or tiny(), MESHES[mesh], **ALL_AT_ONCE, **options)
    builder = StepBuilder(
        model,
        model.loss,
        text_batch(ROWS, LENGTH, model.mesh),
        optimizer,
        TrainConfig(steps=20, non_finite=non_finite),
        memory,
        trainable,
    )
    return model, builder, builder.lower_train().compile()


def one_step(model, builder, step, batch):
    """(parameters before, trained parameters after, optimizer state after, metrics) for the first
    step."""
    before = model.init(0)
    params = {
        name: jax.device_put(jnp.copy(x), builder.abstract_params[name].sharding)
        for name, x in before.items()
    }
    trained = {name: params.pop(name) for name in builder.trainable}
    frozen = params
    after, state, metrics = step(
        trained,
        frozen,
        builder.init_optimizer(trained),
        place_batch(batch, model.mesh),
        np.int32(0),
    )
    return before, after, state, metrics


def first_moments(state) -> dict:
    """Adam's first moments by name: after one step, without clipping, a tenth of the gradient."""
    (moments,) = [
        leaf.mu
        for leaf in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu"))
        if hasattr(leaf, "mu")
    ]
    return {name: np.asarray(x) for name, x in moments.items()}


def with_empty_rows(batch, rows):
    """The batch with only its first rows; the loader's others."""
    kept = (np.arange(len(batch["index"])) < rows)[:, None]
    return {name: x if name == "index" else x * kept.astype(x.dtype) for name, x in batch.items()}


MIXTURE = tiny(
    family="qwen3_moe",
    qk_norm="head",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    output_router_logits=True,
    router_aux_loss_coef=0.3,
    router_z_loss_coef=0.02,
)
DROPPED = tiny(adapter=AdapterConfig(rank=4, alpha=8.0, dropout=0.5))


@pytest.mark.parametrize(
    ("config", "mesh", "parts"),
    [
        (tiny(), {}, 4),
        pytest.param(tiny(), {"fsdp": 2, "sequence": 2}, 1, marks=pytest.mark.slow),
        pytest.param(MIXTURE, {}, 1, marks=pytest.mark.slow),
        pytest.param(MIXTURE, {"fsdp": 2}, 4, marks=pytest.mark.slow),
        pytest.param(DROPPED, {"fsdp": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_empty_rows_leave_the_gradient_of_the_others(config, mesh, parts):
    """Against the plain gradient of a batch of those rows alone; of four parts three are empty."""
    model = llama(config, mesh, **ALL_AT_ONCE)
    builder = StepBuilder(
        model,
        model.loss,
        text_batch(ROWS, LENGTH, model.mesh),
        OPTIMIZER,
        TrainConfig(steps=20, accumulation=parts),
    )
    batch = packed_batch(config, ROWS, LENGTH)
    before, _, state, metrics = one_step(
        model, builder, builder.lower_train().compile(), with_empty_rows(batch, 1)
    )
    single = llama(config, **ALL_AT_ONCE)
    few = {name: x[:1] for name, x in batch.items()}
    if config.adapter:
        few["dropout"] = np.asarray(token_keys(builder.seed, np.int32(0), few["index"]))
    trained = {name: np.asarray(before.pop(name)) for name in builder.trainable}
    others = {name: np.asarray(x) for name, x in before.items()}

    def loss(trained):
        sums = single.loss({**trained, **others}, few)
        return sums.trained / sums.weight, sums

    (_, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    assert float(metrics.weight) == float(sums.weight) == few["loss_weights"].sum()
    assert float(metrics.loss) == pytest.approx(float(sums.total / sums.weight), rel=1e-6)
    for name, expected in sums.auxiliary.items():
        assert float(metrics.auxiliary[name]) == pytest.approx(
            float(expected / sums.weight), rel=1e-5
        )
    for name, expected in sums.measures.items():
        assert float(metrics.measures[name]) == pytest.approx(
            float(expected / sums.weight), rel=1e-5, abs=1e-6
        )
    for name, moment in first_moments(state).items():
        expected = np.asarray(gradient[name]) / 10
        assert np.abs(moment - expected).max() <= 2e-6 * np.abs(expected).max(), name


def weighted(total, weight):
    """The LossSums of a loss without sources, auxiliary losses or measures."""
    none = jnp.zeros(0)
    return LossSums(total, weight, SourceSums(none, none), {}, {})


def toy_model(parameters, shape=()):
    """What a step needs of a model with these parameters."""
    mesh = mesh_of(dict(shape))
    return SimpleNamespace(
        mesh=mesh,
        config=tiny(),
        parameters=parameters,
        unpadded_shapes={name: parameter.shape for name, parameter in parameters.items()},
        shardings=dict.fromkeys(parameters, NamedSharding(mesh, PartitionSpec())),
    )


def one_weight_step(loss, tokens, loss_weight=1.0, parts=1, shape=(), totals=None):
    """Metrics of a step of a model with one parameter, equal to 1, on rows of one token."""
    model = toy_model({"w": Parameter((1,), ("norm",))}, shape)
    train = TrainConfig(steps=20, accumulation=parts)
    batch = text_batch(len(tokens), 1, model.mesh)
    builder = StepBuilder(model, loss, batch, OPTIMIZER, train, totals=totals)
    rows = {name: np.ones((len(tokens), 1), x.dtype) for name, x in batch.items()}
    rows["tokens"][:, 0] = tokens
    rows["loss_weights"][:] = loss_weight
    params = {"w": jax.device_put(jnp.ones(1), model.shardings["w"])}
    *_, metrics = builder.lower_train().compile()(
        params, {}, builder.init_optimizer(params), place_batch(rows, model.mesh), np.int32(0)
    )
    return metrics


@pytest.mark.parametrize("weight", [1.0, 1 / 64])
def test_parts_are_added_in_float32(weight):
    """Eight parts in bfloat16, one with a gradient of 512 and seven with 1: a bfloat16 accumulator
    would stay at 512. The sum is divided by the total weight, even when that is less than 1."""

    def loss(params, batch):
        narrow = params["w"].astype(jnp.bfloat16) * batch["tokens"].astype(jnp.bfloat16)
        total = jnp.sum(narrow.astype(jnp.float32) * batch["loss_weights"])
        return weighted(total, jnp.sum(batch["loss_weights"]))

    metrics = one_weight_step(loss, [512, *[1] * 7], weight, parts=8)
    assert float(metrics.grad_norm) == 519 / 8
    one_by_one = functools.reduce(jnp.add, jnp.asarray([512, *[1] * 7], jnp.bfloat16))
    assert float(one_by_one) == 512


def test_every_accumulation_part_has_rows_of_every_device():
    """Two devices hold rows 1, 2 and rows 4, 8: no row moves to another device."""

    def loss(params, batch):
        square = jnp.square(jnp.sum(batch["tokens"]).astype(jnp.float32))
        return weighted(params["w"].sum() * square, jnp.float32(1))

    metrics = one_weight_step(loss, [1, 2, 4, 8], parts=2, shape={"fsdp": 2})
    assert float(metrics.loss) == ((1 + 4) ** 2 + (2 + 8) ** 2) / 2


@pytest.mark.parametrize("parts", [1, 2])
def test_every_accumulation_part_sees_the_totals_of_the_whole_batch(parts):
    """KTO's KL term needs this; with a single part, the totals are its own."""

    def totals(params, batch):
        return {"sum": jnp.sum(batch["tokens"]).astype(jnp.float32)}

    def loss(params, batch):
        whole = batch["sum"] if "sum" in batch else totals(params, batch)["sum"]
        assert ("sum" in batch) == (parts > 1)
        return weighted(params["w"].sum() * whole, jnp.float32(1))

    assert float(one_weight_step(loss, [1, 2, 4, 8], parts=parts, totals=totals).loss) == 15


@pytest.mark.parametrize("weight", [1.0, np.inf], ids=["finite", "not finite"])
def test_moments_on_the_host_use_clipped_gradients_and_stay_when_a_step_is_not_finite(weight):
    """A toy model of one layer stack and one other parameter, against optax's AdamW on unsharded
    arrays."""
    stack, other = Parameter((2, 3), ("layers", "norm")), Parameter((4,), ("norm",))
    model = toy_model({"layers.w": stack, "v": other})

    def loss(params, batch):
        total = 30 * jnp.sum(params["layers.w"] ** 2) + jnp.sum(params["v"] ** 3)
        weights = batch["loss_weights"].sum()
        return weighted(total * weights, weights)

    optimizer = OptimizerConfig(
        learning_rate=0.1, final_fraction=1.0, clip_norm=0.5, weight_decay=0.0, warmup_steps=0
    )
    builder = StepBuilder(
        model,
        loss,
        text_batch(1, 1, model.mesh),
        optimizer,
        TrainConfig(steps=20, non_finite="skip"),
        MemoryConfig(moments_on_host=True),
    )
    before = {"layers.w": jnp.arange(6.0).reshape(2, 3), "v": jnp.ones(4)}
    batch = {
        name: np.full((1, 1), weight if name == "loss_weights" else 1, x.dtype)
        for name, x in builder.abstract_batch.items()
    }
    state = builder.init_optimizer(before)
    after, state, metrics = builder.lower_train().compile()(
        jax.tree.map(jnp.copy, before), {}, state, place_batch(batch, model.mesh), np.int32(0)
    )
    gradient = {"layers.w": 60 * np.asarray(before["layers.w"]), "v": np.full(4, 3.0)}
    norm = np.sqrt(sum((x**2).sum() for x in gradient.values()))
    moments = first_moments(state)
    if np.isfinite(weight):
        assert float(metrics.grad_norm) == pytest.approx(norm)
    for name, x in gradient.items():
        expected = (
            (1 - optimizer.beta1) * x * optimizer.clip_norm / norm
            if np.isfinite(weight)
            else np.zeros_like(x)
        )
        np.testing.assert_allclose(moments[name], expected, rtol=1e-5)
        assert np.isfinite(weight) != np.array_equal(after[name], before[name])


def test_frozen_parameters_have_neither_moments_nor_gradients():
    """Only attention is trained: its gradients equal those of training everything, and no other
    gradient is computed or sent."""
    batch = packed_batch(tiny(), ROWS, LENGTH)
    all_trained, partly_trained = built("fsdp 8"), built("fsdp 8", r"layers\.self_attn\..*")
    _, after, state, metrics = one_step(*partly_trained, batch)
    names = {name for name in partly_trained[0].parameters if "self_attn" in name}
    assert after.keys() == names == first_moments(state).keys()
    shapes = {x.shape for x in jax.tree.leaves(state)}
    assert shapes == {(), *(partly_trained[0].parameters[name].shape for name in names)}
    expected = first_moments(one_step(*all_trained, batch)[2])
    for name, x in first_moments(state).items():
        assert np.abs(x - expected[name]).max() <= 1e-5 * np.abs(x).max(), name
    norm = np.sqrt(sum((np.float64(10 * expected[name]) ** 2).sum() for name in names))
    assert abs(float(metrics.grad_norm) / norm - 1) <= 1e-5
    sent = [
        collectives(step.as_text())["reduce-scatter"]
        for _, _, step in (all_trained, partly_trained)
    ]
    assert sent == [len(partly_trained[0].parameters), len(names)] == [12, 4], (
        "one per gradient, the layers' in a scan"
    )


def saved_and_restored(folder, builder, params, state):
    """The contents of a checkpoint with these, as it is read again."""
    (folder / "assets").mkdir()
    with CheckpointStore(folder / "run", keep=1) as store:
        data = {"step": 1, "fingerprint": ""}
        store.save(1, model=params, optimizer=state, data=data, assets=folder / "assets")
        store.wait()
        return store.restore(1, builder.abstract_params, builder.abstract_optimizer)


def test_moments_and_weights_with_fewer_bits(tmp_path):
    """Both are stored in the chosen dtypes, training hardly differs, and it resumes bitwise from a
    checkpoint."""
    batch = packed_batch(tiny(), ROWS, LENGTH)
    final, kinds = {}, [("float32", "float32"), ("bfloat16", "float32"), ("8bit", "bfloat16")]
    for moments, weights in kinds:
        model, builder, step = built(
            optimizer=dataclasses.replace(OPTIMIZER, moment_dtype=moments, weight_dtype=weights)
        )
        params = builder.stored(model.init(0))
        state, placed = builder.init_optimizer(params), place_batch(batch, model.mesh)

        def run(params, state, numbers, step=step, placed=placed):
            losses = []
            for number in numbers:
                params, state, metrics = step(params, {}, state, placed, np.int32(number))
                losses.append(float(metrics.loss))
            return params, state, losses

        params, state, losses = run(params, state, range(10))
        stored = {x.dtype.name for x in jax.tree.leaves(state) if x.ndim}
        assert stored == ({"uint8", "float32"} if moments == "8bit" else {moments})
        assert {x.dtype.name for x in params.values()} == {weights}
        if moments == "8bit":
            restored = saved_and_restored(tmp_path, builder, params, state)
        params, state, more = run(params, state, range(10, 20))
        final[moments] = [*losses, *more]
        if moments == "8bit":
            again = run(restored.model, restored.optimizer, range(10, 20))
            for x, y in zip(
                jax.tree.leaves((params, state)), jax.tree.leaves(again[:2]), strict=True
            ):
                assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    learned = final["float32"][0] - final["float32"][-1]
    assert learned > 0.5
    for moments, share in (("bfloat16", 0.01), ("8bit", 0.03)):
        assert abs(final[moments][-1] - final["float32"][-1]) <= share * learned
        assert final[moments] != final["float32"]


@pytest.mark.slow  # bitwise equal only with the compiler's default flags, which soak uses
@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(moments_on_host=True),
        MemoryConfig(moments_on_host=True, parameters_on_host=True),
    ],
    ids=["moments", "parameters too"],
)
def test_state_on_the_host_trains_as_on_the_devices(tmp_path, memory):
    """State on the host returns to pinned host memory, equals (up to rounding) what it is on the
    devices, and is restored there from a checkpoint.

    The two compiled programs agree bitwise with jax 0.10; with 0.12 some numbers differ in the last
    bit. Clipping, which needs the global norm, takes effect.
    """
    batch = packed_batch(tiny(), ROWS, LENGTH)
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=0.5, weight_decay=0.1)
    model, builder, step = built("fsdp 8", optimizer=optimizer, memory=memory)
    _, on_device, state, metrics = one_step(*built("fsdp 8", optimizer=optimizer), batch)
    _, on_host, host_state, host_metrics = one_step(model, builder, step, batch)
    assert float(metrics.grad_norm) > 0.5
    for tree, other in ((on_device, on_host), (state, host_state), (metrics, host_metrics)):
        for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
            atol = 0 if jax.__version_info__ < (0, 11) else 1e-6 * np.abs(np.asarray(x)).max()
            np.testing.assert_allclose(np.asarray(y), np.asarray(x), rtol=0, atol=atol)

    def kinds(tree):
        return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}

    assert kinds((on_device, state)) == {"device"} and kinds(host_state) == {"pinned_host"}
    assert kinds(on_host) == {"pinned_host" if memory.parameters_on_host else "device"}
    restored = saved_and_restored(tmp_path, builder, on_host, host_state)
    for x, y in zip(
        jax.tree.leaves((restored.model, restored.optimizer)),
        jax.tree.leaves((on_host, host_state)),
        strict=True,
    ):
        assert x.sharding == y.sharding
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


GEMMA = tiny(
    family="gemma3_text",
    num_hidden_layers=3,
    sliding_window=9,
    **FAMILIES["gemma3_text"].computes,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
)
SMOLLM = tiny(family="smollm3", num_hidden_layers=4, no_rope_layers=(1, 0, 1, 0))
GLM = tiny(
    family="glm4_moe",
    num_hidden_layers=4,
    mlp_only_layers=(0,),
    num_experts=4,
    num_experts_per_tok=2,
    **FAMILIES["glm4_moe"].computes,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "memory"),
    [
        (GEMMA, {}),
        (GEMMA, {"remat": "offload_attention"}),
        (GEMMA, {"attention_groups": 2}),
        (GEMMA, {"query_chunks": 2, "remat": "nothing"}),
        (SMOLLM, {"remat": "offload_every_k", "every_k": 2}),
        (GLM, {"remat": "offload_every_k", "every_k": 2}),
    ],
    ids=[
        "a remaining layer",
        "activations too",
        "groups of heads",
        "query chunks",
        "groups of layers",
        "a mixture with a dense layer",
    ],
)
def test_two_kinds_of_layers_on_the_host(config, memory):
    """Gradients equal those of the model kept on the devices, whose layers also have a period of
    2."""
    batch = packed_batch(config, ROWS, LENGTH)
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=0.5)
    on_host = MemoryConfig(**memory, moments_on_host=True, parameters_on_host=True)
    expected = one_step(*built("fsdp 8", optimizer=optimizer, config=config), batch)
    _, trained, state, metrics = one_step(
        *built("fsdp 8", optimizer=optimizer, memory=on_host, config=config), batch
    )
    assert {x.sharding.memory_kind for x in trained.values()} == {"pinned_host"}
    assert float(metrics.loss) == pytest.approx(float(expected[-1].loss), rel=1e-6)
    for name, moment in first_moments(expected[2]).items():
        assert np.abs(first_moments(state)[name] - moment).max() <= 1e-5 * np.abs(moment).max(), (
            name
        )


@pytest.mark.parametrize(
    ("skip", "on_host"),
    [
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_a_non_finite_step(skip, on_host):
    """A skipped step leaves parameters and moments bitwise unchanged; otherwise the step ruins
    them."""
    run = built(
        non_finite="skip" if skip else "stop",
        memory=MemoryConfig(moments_on_host=on_host, parameters_on_host=on_host),
    )
    batch = packed_batch(tiny(), ROWS, LENGTH)
    broken = {
        **batch,
        "loss_weights": np.where(batch["loss_weights"] > 0, np.inf, 0).astype(np.float32),
    }
    before, after, state, metrics = one_step(*run, broken)
    assert not np.isfinite(float(metrics.loss))
    unchanged = [
        np.array_equal(np.asarray(after[name]), np.asarray(x)) for name, x in before.items()
    ]
    moments = [np.asarray(x) for x in jax.tree.leaves(state) if x.ndim]
    if skip:
        assert all(unchanged) and not any(x.any() for x in moments)
        assert {int(x) for x in jax.tree.leaves(state) if not x.ndim} == {1}, (
            "the counters and the learning rate advance"
        )
        _, after, _, _ = one_step(*run, batch)
        assert not any(
            np.array_equal(np.asarray(after[name]), np.asarray(x)) for name, x in before.items()
        )
    else:
        assert not any(unchanged) and not all(np.isfinite(x).all() for x in moments)
