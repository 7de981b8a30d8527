"""The moving average of the weights matches numpy's and is counted by the planner.
test_adapter_run.py has a run with one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.config import TransformerConfig
from model.sharding import Parameter
from planning.parts import parts_gib
from scripts import export_hf
from trainer.config.load import load
from trainer.config.schema import OptimizerConfig, RunConfig
from trainer.optimizer import make_optimizer
from trainer.streaming import streamed_update

DECAY = 0.3
OTHER = "layers.3-4.mlp.up_proj.weight"  # of another stack of layers
SHAPES = {"norm.weight": (5,), "layers.mlp.up_proj.weight": (3, 3, 4), OTHER: (2, 3, 4)}
PARAMETERS = {
    "norm.weight": Parameter((5,), ("norm",)),
    "layers.mlp.up_proj.weight": Parameter((3, 3, 4), ("layers", "embed", "mlp"), inputs=1),
    OTHER: Parameter((2, 3, 4), ("layers", "embed", "mlp"), inputs=1),
}


@pytest.mark.parametrize("fields", [{}, {"moment_dtype": "bfloat16"}, {"name": "lion"}])
def test_it_matches_numpys_average_of_the_parameters_after_each_step(fields):
    config = OptimizerConfig(learning_rate=0.1, average_decay=DECAY, **fields)
    optimizer = make_optimizer(config, 20, PARAMETERS, SHAPES)
    plain = make_optimizer(OptimizerConfig(learning_rate=0.1, **fields), 20, PARAMETERS, SHAPES)
    random = np.random.default_rng(0)
    params = {
        "norm.weight": jnp.ones(5),
        "layers.mlp.up_proj.weight": jnp.asarray(random.normal(size=(3, 3, 4)), jnp.float32),
    }
    expected = {name: np.asarray(x, np.float64) for name, x in params.items()}
    state, plain_state = optimizer.init(params), plain.init(params)
    for step in range(1, 15):
        gradient = {
            name: jnp.asarray(random.normal(size=x.shape), jnp.float32)
            for name, x in params.items()
        }
        updates, state = optimizer.update(gradient, state, params)
        same, plain_state = plain.update(gradient, plain_state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, same)
        params = optax.apply_updates(params, updates)
        decay = min(DECAY, (1 + step) / (10 + step))
        expected = {
            name: decay * x + (1 - decay) * np.asarray(params[name]) for name, x in expected.items()
        }
    for name, x in expected.items():
        assert state[2].average[name].dtype == jnp.float32
        np.testing.assert_allclose(state[2].average[name], x, rtol=1e-5, atol=1e-6)
        assert np.abs(np.asarray(params[name]) - x).max() > 1e-3


@pytest.mark.parametrize("stacks", [1, 2])
def test_streaming_moments_from_the_host_per_layer_does_not_change_it(stacks):
    """The update of `memory.moments_on_host` against that of all parameters at once, up to
    rounding."""
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=0.1, average_decay=DECAY, clip_norm=0.0),
        20,
        PARAMETERS,
        SHAPES,
    )
    random = np.random.default_rng(1)
    params = {
        "norm.weight": jnp.ones(5),
        "layers.mlp.up_proj.weight": jnp.asarray(random.normal(size=(3, 3, 4)), jnp.float32),
    }
    if stacks == 2:
        params[OTHER] = jnp.asarray(random.normal(size=SHAPES[OTHER]), jnp.float32)
    state = streamed_state = optimizer.init(params)
    streamed_params = params
    update = jax.jit(functools.partial(streamed_update, optimizer))
    for _ in range(3):
        gradient = {
            name: jnp.asarray(random.normal(size=x.shape), jnp.float32)
            for name, x in params.items()
        }
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        streamed_params, streamed_state = update(gradient, streamed_state, streamed_params)
    assert int(streamed_state[2].steps) == int(state[2].steps) == 3
    for name, x in state[2].average.items():
        np.testing.assert_allclose(streamed_state[2].average[name], x, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_without_one_says_so(whole_run, tmp_path, capsys):
    assert export_hf.main([str(whole_run), str(tmp_path / "out"), "--average"]) == 2
    assert (
        "holds no average of the weights; training keeps one with optimizer.average_decay"
        in capsys.readouterr().err
    )


def test_the_planner_counts_its_memory_and_a_decay_of_one_is_refused(small_recipe):
    model = TransformerConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    sizes = [
        parts_gib(
            RunConfig(optimizer=OptimizerConfig(average_decay=decay, moment_dtype="bfloat16")),
            model,
        )
        for decay in (0.0, 0.9)
    ]
    assert (
        sizes[0]["moments"] == sizes[0]["parameters"]
        and sizes[1]["moments"] == 2 * sizes[0]["moments"]
    )
    with pytest.raises(
        Exception, match=r"optimizer\.average_decay: found 1\.0, needs a number from 0 to below 1"
    ):
        load(["--config", str(small_recipe), "--optimizer.average_decay", "1"])
