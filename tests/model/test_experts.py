"""Mixtures of experts: against each token's experts one by one, the router losses, and metrics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from model.adapter import AdapterConfig
from model.config import TransformerConfig
from model.dropout import TokenInfo
from model.experts import MixtureOfExperts, RouterTotals, route, router_measures, router_sums
from model.families import FAMILIES
from model.sharding import TensorParallel
from tests.errors import within
from tests.model.build import abstract, initial, llama, packed_batch, permuted, tiny
from trainer.config.schema import OptimizerConfig, TrainConfig
from trainer.mesh import place_batch
from trainer.step import StepBuilder
from trainer.text import text_batch

LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.02}


def mixture(**changes):
    """Returns the config of a small mixture."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    return tiny(**{"family": "qwen3_moe", "qk_norm": "head", **sizes, **changes})


def choices(config, weights, x):
    """Returns the indices of each token's experts."""
    logits = np.asarray(x.reshape(-1, 64) @ weights["gate"])
    return np.argsort(-logits, kind="stable")[:, : config.num_experts_per_tok]


def token_by_token(config, experts, weights, x):
    """Computes each token with copies of its own experts' matrices."""
    probabilities = jnp.take_along_axis(jax.nn.softmax(x @ weights["gate"], -1), experts, -1)
    if config.norm_topk_prob:
        probabilities /= probabilities.sum(-1, keepdims=True)
    gate, up, down = (weights[f"{name}_proj"][experts] for name in ("gate", "up", "down"))
    inner = jax.nn.silu(jnp.einsum("th,tkhf->tkf", x, gate)) * jnp.einsum("th,tkhf->tkf", x, up)
    return jnp.einsum("tk,tkf,tkfh->th", probabilities, inner, down)


def skewed(kind, gate):
    """Returns router weights for which inputs whose first feature is one choose as `kind` says."""
    if kind == "all choose the same, none choose another":
        return gate.at[0].set(jnp.array([9.0, 9, 9, 0, 0, 0, 0, -9]))
    if kind == "ties":
        return jnp.zeros_like(gate)
    return gate


KINDS = ("as drawn", "all choose the same, none choose another", "ties")
NAMES = {"gate.weight": "gate"} | {
    f"experts.{name}.weight": name for name in ("gate_proj", "up_proj", "down_proj")
}


@functools.cache
def layer_of(config):
    """Returns a mixture's weights by short names, and a function of weights and inputs that gives
    its output."""
    graph, state = nnx.split(MixtureOfExperts(config, rngs=nnx.Rngs(0)))

    def output(weights, x):
        leaves = [
            (path, leaf.replace(weights[NAMES[".".join(path)]]))
            for path, leaf in nnx.to_flat_state(state)
        ]
        layer = nnx.merge(graph, nnx.from_flat_state(leaves))
        return layer(x, TensorParallel.of(config, 1), TokenInfo(None))[0]

    return {NAMES[".".join(path)]: leaf[...] for path, leaf in nnx.to_flat_state(state)}, output


def check_routing(config, kind, run, x, dy):
    """Checks outputs and gradients of `run` against each token's own experts.

    Args:
      run: from weights, inputs and the output's gradient to the output and both gradients.
    """
    initial, _ = layer_of(config)
    weights = {**initial, "gate": skewed(kind, initial["gate"])}
    plain = functools.partial(token_by_token, config, choices(config, weights, x))
    expected, pull = jax.vjp(lambda w, x: plain(w, x.reshape(-1, 64)).reshape(x.shape), weights, x)
    y, dw, dx = run(weights, x, dy)
    dw_expected, dx_expected = pull(jnp.asarray(dy))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5, err_msg=kind)
    np.testing.assert_allclose(dx, dx_expected, rtol=1e-4, atol=1e-4, err_msg=kind)
    for name, gradient in dw_expected.items():
        bound = 1e-5 * np.abs(gradient).max() + 1e-6
        np.testing.assert_allclose(dw[name], gradient, rtol=1e-4, atol=bound, err_msg=name)


@pytest.mark.parametrize("normalized", [False, True])
def test_every_token_gets_all_of_its_experts(normalized):
    """For any routing, in one compiled program: outputs and gradients."""
    config = mixture(norm_topk_prob=normalized)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 20, 64)), jnp.float32).at[..., 0].set(1.0)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    @jax.jit
    def run(weights, x, dy):
        y, pull = jax.vjp(layer_of(config)[1], weights, x)
        return y, *pull(dy)

    for kind in KINDS:
        check_routing(config, kind, run, x, dy)
    assert run._cache_size() == 1


def test_ties_go_to_the_first_experts():
    assert route(jnp.zeros((1, 8)), mixture()).experts.tolist() == [[0, 1, 2]]


def test_router_sums_ignore_padding():
    config = mixture()
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
    routes, real = route(logits, config), jnp.array([1, 1, 0, 1, 0, 0], bool)
    sums = router_sums(logits, routes, real)
    own = router_sums(logits[real], route(logits[real], config), jnp.ones(3, bool))
    for name, value in own.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)
    assert sums["tokens"].sum() == 9  # three tokens, three experts each
    probabilities = np.asarray(jax.nn.softmax(logits[real]), np.float64)
    assert float(sums["entropy"]) == pytest.approx(-(probabilities * np.log(probabilities)).sum())


def test_router_losses_and_loads_match_transformers():
    import torch

    config = mixture(num_hidden_layers=3, **LOSSES)
    batch = packed_batch(config, rows=4, length=32)
    model = llama(config)
    params = initial(model)
    real = batch["segment_ids"].reshape(-1) > 0
    logits, plain = [], MixtureOfExperts.__call__

    def recording(self, x, parallel, info):
        jax.debug.callback(
            lambda x: logits.append(np.asarray(x)), self.gate(x.reshape(-1, 64)), ordered=True
        )
        return plain(self, x, parallel, info)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixtureOfExperts, "__call__", recording)
        sums = llama(config, feed_forward_chunk=0).loss(params, batch)
        jax.effects_barrier()
    assert len(logits) == 3
    gates = tuple(torch.tensor(layer[real]) for layer in logits)
    expected = load_balancing_loss_func(gates, 8, 3).item()
    weight = batch["loss_weights"].sum()
    assert float(sums.auxiliary["router_balance"] / weight) == pytest.approx(0.3 * expected, 1e-5)
    squares = np.mean([np.square(torch.logsumexp(gate, -1).numpy()) for gate in gates])
    assert float(sums.auxiliary["router_z"] / weight) == pytest.approx(0.02 * squares, 1e-5)
    counts = np.stack([np.bincount(_best(gate), minlength=8) for gate in gates])
    loads = counts / (real.sum() * 3 / 8)
    measures = {name: float(value / weight) for name, value in sums.measures.items()}
    assert [measures[f"router/load/{e}"] for e in range(8)] == pytest.approx(loads.mean(0), 1e-5)
    assert measures["router/load_max"] == pytest.approx(loads.max(), 1e-5)
    assert measures["router/load_min"] == pytest.approx(loads.min(), 1e-5)
    assert 0 < measures["router/entropy"] < np.log(8)
    assert measures["router/dropped"] == 0


def test_dropped_tokens_are_counted():
    config = mixture(num_hidden_layers=2)
    tokens = jnp.full((2, 8), 3.0).at[1, 5].set(0.0)  # 8 tokens with three experts each
    totals = RouterTotals(tokens, jnp.float32(8), jnp.float32(5))
    measures = router_measures(totals, totals, jnp.float32(0), config)
    assert float(measures["router/dropped"]) == pytest.approx(5 * 3 / (2 * 8 * 3))


def test_a_router_without_tokens_has_no_loss():
    """All tokens are padding: no loss, no gradient, no NaN in the metrics."""
    config = mixture(**LOSSES)
    batch = packed_batch(config, rows=2, length=32)
    batch = {name: np.zeros_like(x) if name != "index" else x for name, x in batch.items()}
    model = llama(config)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(params):
        sums = model.loss(params, batch)
        return sums.trained, sums.measures

    (loss, measures), gradients = run(initial(model))
    assert float(loss) == 0 and all(not np.any(x) for x in jax.tree.leaves(gradients))
    assert all(np.isfinite(float(value)) for value in measures.values())


@pytest.mark.parametrize(("remat", "forward"), [("everything", 3), ("save_attention", 6)])
def test_kept_expert_products_run_once(remat, forward):
    """A step has three expert products forward, again if they are not kept, and twice as many
    backward."""
    config = mixture()
    model = llama(config, remat=remat)
    batch = packed_batch(config, rows=2, length=32)
    step = jax.make_jaxpr(jax.grad(lambda params: model.loss(params, batch).trained))
    assert grouped_products(step(abstract(model)).jaxpr) == forward + 6


def grouped_products(jaxpr):
    """Returns the number of products in a jaxpr that are chosen by platform, a TPU's among them."""
    count = 0
    for equation in jaxpr.eqns:
        inner = jax.core.jaxprs_in_params(equation.params)
        if equation.primitive.name == "cond":
            count += any(
                e.primitive.name == "ragged_dot_general" for branch in inner for e in branch.eqns
            )
        count += sum(map(grouped_products, inner))
    return count


def corrected(**changes):
    """Returns the config of a small mixture with a shared expert and corrected router scores."""
    computes = FAMILIES["solar_open"].computes
    sizes = {"family": "solar_open", "qk_norm": "none", "shared_expert_intermediate_size": 40}
    return mixture(**{**sizes, **computes, **changes})


@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=4)])
def test_score_corrections_are_float32_and_never_trained(adapter):
    """Also in bfloat16 and with adapters; a full fine-tune's checkpoints include them."""
    model = llama(corrected(adapter=adapter), dtype=jnp.bfloat16)
    builder = StepBuilder(model, model.loss, text_batch(2, 32, model.mesh))
    name = "layers.mlp.gate.e_score_correction_bias"
    assert model.parameters[name].dtype == "float32"
    assert name not in builder.trainable
    assert (name in builder.abstract_saved) == (adapter is None)


def test_a_score_correction_affects_the_choice_but_not_the_weight():
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
    config = corrected(num_experts=4, num_experts_per_tok=2, routed_scaling_factor=2.5)
    routes = route(logits, config, jnp.array([-9.0, 0.0, 0.0, 9.0]))
    assert routes.experts.tolist() == [[3, 1]]
    chosen = 2.5 / (1 + np.exp([1.0, -1.0]))
    np.testing.assert_allclose(routes.weights[0], chosen, rtol=1e-6)
    normalized = route(logits, dataclasses.replace(config, norm_topk_prob=True), jnp.zeros(4))
    assert float(normalized.weights.sum()) == pytest.approx(2.5)


def test_scores_that_are_all_zero_give_finite_weights():
    """In float32 a sigmoid below -104 is 0, and the weights would be 0 / 0."""
    config = corrected(norm_topk_prob=True)
    routes = route(jnp.full((1, 8), -200.0), config, jnp.zeros(8))
    assert routes.weights.tolist() == [[0, 0, 0]]


def test_corrections_that_choose_improbable_experts_give_transformers_weights():
    """In ERNIE's routers the sum that normalizes probabilities is at least 1e-12."""
    sizes = {"hidden_size": 4, "num_attention_heads": 1, "moe_num_experts": 4, "moe_k": 2}
    router = Ernie4_5_MoeTopKRouter(transformers.Ernie4_5_MoeConfig(**sizes))
    correction, logits = [-9.0, 0.0, 0.0, 9.0], [[0.0, -40.0, -41.0, -90.0], [0.0, -9.0, 1.0, 1.0]]
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
        router.moe_statics.e_score_correction_bias.copy_(torch.tensor([correction]))
        _, weights, experts = router(torch.tensor(logits))
    config = mixture(
        family="ernie4_5_moe",
        qk_norm="none",
        router_correction=True,
        rope_interleaved=True,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
    )
    routes = route(jnp.array(logits), config, jnp.array(correction))
    assert routes.experts.tolist() == experts.tolist()
    np.testing.assert_allclose(routes.weights, weights, rtol=1e-5, atol=1e-20)


def test_tensor_splits_all_expert_widths_or_none():
    assert TensorParallel.of(corrected(), 8).mlp
    assert not TensorParallel.of(corrected(), 16).mlp  # 16 divides 48 but not 40


def test_an_axis_that_does_not_divide_the_experts_is_refused():
    with pytest.raises(ValueError, match=r"mesh\.expert: found 4, .* 6 experts; 1, 2, 3, 6 do"):
        llama(mixture(num_experts=6), {"expert": 4})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "8 experts"]),
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok", "0", "1"]),
        ({"num_experts_per_tok": None}, ["num_experts_per_tok", "None"]),
        ({"num_experts": -1}, ["num_experts", "-1"]),
        ({"router_aux_loss_coef": -0.1}, ["router_aux_loss_coef", "-0.1"]),
        ({"family": "llama", "qk_norm": "none"}, ["num_experts", "8", "llama"]),
        (
            {"adapter": AdapterConfig(rank=4, targets=("up_proj",))},
            ["gate_proj is missing", "up_proj"],
        ),
    ],
)
def test_an_invalid_mixture_is_refused(change, words):
    with pytest.raises(ValueError) as caught:
        mixture(**change)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "field",
    [
        {"capacity_factor": 1.25},
        {"expert_capacity": 64},
        {"drop_tokens": True},
        {"router_jitter_noise": 0.1},
        {"shared_expert_intermediate_size": 128},
        {"first_k_dense_replace": 1},
        {"n_group": 8},
    ],
)
def test_a_config_with_dropped_tokens_or_unsupported_layers_is_refused_by_name(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        TransformerConfig.from_hf_dict({**mixture().to_hf(), **field})


def _best(gate):
    return np.argsort(-gate.numpy(), -1)[:, :3].reshape(-1)


ROWS = 16


@functools.cache
def steps(mesh, parts, memory=(), count=20):
    """Returns losses and router losses of some steps, and the router metrics of the last."""
    config = mixture(**LOSSES)
    batch = packed_batch(config, rows=ROWS, length=32)
    model = llama(config, dict(mesh), **dict(memory))
    builder = StepBuilder(
        model,
        model.loss,
        text_batch(ROWS, 32, model.mesh),
        OptimizerConfig(learning_rate=1e-3, schedule="constant"),
        TrainConfig(steps=20, accumulation=parts),
        model.memory,
    )
    params = initial(model)
    state = builder.init_optimizer(params)
    placed = place_batch(permuted(batch, model)[0], model.mesh)
    step, losses = builder.lower_train().compile(), []
    for i in range(count):
        params, state, metrics = step(params, {}, state, placed, np.int32(i))
        losses.append(
            [float(metrics.loss), float(metrics.grad_norm), *map(float, metrics.auxiliary.values())]
        )
    return np.array(losses), {name: float(x) for name, x in metrics.measures.items()}


@pytest.mark.parametrize(
    ("mesh", "parts", "memory"),
    [
        ({"expert": 4, "tensor": 2}, 2, {"feed_forward_chunk": 8}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(({"expert": ranks}, parts, {}) for ranks in (2, 4, 8) for parts in (1, 2)),
                ({"sequence": 4}, 1, {"prefetch": True}),
                ({"fsdp": 2, "tensor": 2, "sequence": 2}, 2, {"remat": "everything"}),
                ({"fsdp": 2, "expert": 2, "sequence": 2}, 1, {"prefetch": True}),
                ({}, 2, {}),
                ({}, 4, {"feed_forward_chunk": 8}),
                ({"data": 2, "sequence": 2}, 2, {"query_chunks": 2, "remat": "nothing"}),
            )
        ),
    ],
)
def test_steps_do_not_depend_on_mesh_or_accumulation(mesh, parts, memory):
    expected, expected_measures = steps((), 1)
    losses, measures = steps(tuple(mesh.items()), parts, tuple(memory.items()))
    error = np.abs(np.divide(losses, expected) - 1).max()
    within(error, 1e-5, "steps of a mixture", (mesh, parts, memory))
    assert measures == pytest.approx(expected_measures, rel=1e-5)


def test_held_out_losses_do_not_depend_on_accumulation():
    config = mixture(**LOSSES)
    model, batch = llama(config), packed_batch(config, rows=4, length=32)
    abstract, parts = text_batch(4, 32, model.mesh), TrainConfig(steps=1, accumulation=2)
    builder = StepBuilder(model, model.loss, abstract, train_config=parts)
    params, placed = initial(model), place_batch(batch, model.mesh)
    sums = builder.lower_evaluate().compile()(params, placed)
    expected = jax.jit(model.loss)(params, placed)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(sums), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, err_msg=jax.tree_util.keystr(path))
