"""Grouped products against a product per row, and their FLOPs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention.kernels import get_kernel
from model.config import TransformerConfig
from model.frozen import Plain
from model.grouped import _over_blocks, block_rows, grouped_product
from tests.compiled_text import product_flops
from tests.errors import within
from tests.model.build import llama
from trainer.flops import flops_per_step
from trainer.step import StepBuilder
from trainer.text import text_batch

ROWS, INPUTS, OUTPUTS = 200, 24, 40
SIZES = {
    "even": [50, 50, 50, 50],
    "all in one": [0, 0, 200, 0],
    "some after the last group": [31, 0, 1, 90],
    "none": [0, 0, 0, 0],
}


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (ROWS, INPUTS), (4, INPUTS, OUTPUTS), (ROWS, OUTPUTS)
    return [jnp.asarray(rng.normal(size=shape), dtype).astype(jnp.float32) for shape in shapes]


@pytest.mark.parametrize("frozen", [False, True])
def test_products_and_gradients_match_each_row_alone(frozen):
    """All group sizes in one compiled program."""
    x, w, dy = arrays()

    @jax.jit
    def run(x, w, sizes):
        def product(x, w):
            return grouped_product(x, Plain(w) if frozen else w, sizes)

        y, pullback = jax.vjp(product, x, w)
        return y, *pullback(dy)

    for name, sizes in SIZES.items():
        group = np.repeat(np.arange(4), sizes)
        matrices = np.asarray(w, np.float64)[group]
        expected, d_expected = np.zeros((ROWS, OUTPUTS)), np.zeros((ROWS, INPUTS))
        dw_expected, rows = np.zeros(w.shape), len(group)
        expected[:rows] = np.einsum("mk,mkn->mn", np.asarray(x, np.float64)[:rows], matrices)
        d_expected[:rows] = np.einsum("mn,mkn->mk", np.asarray(dy, np.float64)[:rows], matrices)
        for row, g in enumerate(group):
            dw_expected[g] += np.outer(x[row], dy[row])
        y, dx, dw = run(x, w, jnp.array(sizes, jnp.int32))
        np.testing.assert_allclose(y, expected, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(dx, d_expected, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(dw, dw_expected * (not frozen), atol=1e-4, err_msg=name)
    assert run._cache_size() == 1


def test_gradients_of_weights_are_summed_in_float32():
    """Summing 200 outer products in bfloat16 would be off by a percent."""
    x, w, dy = arrays(jnp.bfloat16)
    sizes = jnp.array([200, 0, 0, 0])

    def product(w):
        return grouped_product(x.astype(jnp.bfloat16), w, sizes)

    y, pullback = jax.vjp(product, w)
    assert y.dtype == jnp.bfloat16
    expected = np.einsum("mk,mn->kn", x, dy)
    np.testing.assert_allclose(
        pullback(dy.astype(jnp.bfloat16))[0][0], expected, rtol=1e-5, atol=1e-4
    )


def test_rows_are_not_multiplied_with_every_matrix():
    """The multiplied rows, padding included, exceed the rows by at most an eighth, plus a block per
    group. The compiler's FLOPs of a step are those of a block."""
    rows, groups = 64 * 512, 64
    block = block_rows(rows, groups)
    count = jax.jit(
        lambda sizes: _over_blocks(sizes, block, lambda count, *_: count + 1, jnp.int32(0))
    )
    assert block == 64
    for sizes in ([512] * 64, [0] * 63 + [rows], [1] * 63 + [rows - 63]):
        assert int(count(jnp.array(sizes))) * block <= 1.125 * rows, sizes
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((rows, 64), (groups, 64, 32), (rows, 32))
    ]
    size_shape = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def step(x, w, dy, sizes):
        y, pullback = jax.vjp(functools.partial(grouped_product, sizes=sizes), x, w)
        return y, *pullback(dy)

    compiled = jax.jit(step).lower(*shapes, size_shape).compile()
    # The compiler counts a loop of unknown length once. The rest are masks, and sums over the
    # arrays' elements.
    one_step = 3 * 2 * block * 64 * 32
    assert compiled.cost_analysis()["flops"] <= one_step + 4 * rows * 64
    dense = 3 * 2 * rows * 64 * 32
    assert compiled.cost_analysis()["flops"] < dense / 10


def test_a_tpu_uses_its_compilers_ragged_product():
    x, w, dy = arrays()
    sizes = jnp.array([50, 50, 50, 50])

    def step(x, w):
        y, pullback = jax.vjp(functools.partial(grouped_product, sizes=sizes), x, w)
        return y, *pullback(dy)

    traced = jax.jit(step).trace(x, w)
    for platform, products in (("tpu", 3), ("cpu", 0), ("cuda", 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count('"chlo.ragged_dot"(') == products, platform


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "olmoe-1b-7b"])
def test_padding_of_blocks_adds_less_than_five_percent_to_a_step(preset):
    """Relative to the FLOPs of the active parameters, for 8K tokens in chunks routed evenly."""
    config, chunk, length = TransformerConfig.preset(preset), 2048, 8192
    experts, rows = config.num_experts, chunk * config.num_experts_per_tok
    block = block_rows(rows, experts)
    rng = np.random.default_rng(0)
    count = jax.jit(
        lambda sizes: _over_blocks(sizes, block, lambda count, *_: count + 1, jnp.int32(0))
    )
    loads = rng.multinomial(rows, np.full(experts, 1 / experts), size=length // chunk)
    computed_rows = sum(int(count(jnp.array(sizes))) * block for sizes in loads)
    padding = computed_rows - length * config.num_experts_per_tok
    assert padding > 0
    weights = 3 * config.hidden_size * config.expert_width * config.num_hidden_layers
    needed = flops_per_step(config, length, length * (length + 1) / 2)
    assert 6 * weights * padding <= 0.05 * needed


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "olmoe-1b-7b"])
def test_a_compiled_steps_flops_are_those_of_the_active_parameters(preset):
    """Within 5% of the formula for rows of 32K tokens if the products are kept; attention's
    products of queries and keys are taken from the formula. A small vocabulary gives the experts
    at least the share of a deep model.
    """
    length = 2048
    config = dataclasses.replace(TransformerConfig.preset(preset), vocab_size=1024)
    kinds = len(config.layer_kinds)
    config = dataclasses.replace(
        config,
        num_hidden_layers=kinds,
        layer_types=config.layer_types and config.layer_types[:kinds],
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=None,
    )
    model = llama(
        config, remat="everything", kernel=get_kernel("xla"), loss_chunk=0, projection_chunk=0
    )
    step = StepBuilder(model, model.loss, text_batch(1, length, model.mesh))
    experts, rows = config.num_experts, length * config.num_experts_per_tok
    loads = np.random.default_rng(0).multinomial(rows, np.full(experts, 1 / experts))
    blocks = np.sum(-(-loads // block_rows(rows, experts)))
    compiled_flops = product_flops(step.lower_train().compile().as_text(), "feed_forward", blocks)
    needed = flops_per_step(config, length, pairs=length * 32768 / 2)
    attention = needed - flops_per_step(config, length, pairs=0)
    within(abs((compiled_flops + attention) / needed - 1), 0.05, "FLOPs of a mixture", preset)
