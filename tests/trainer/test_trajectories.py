"""The objective for trajectories on made-up episodes: its batches, what it refuses, and a
resumed run."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from data.errors import UserError
from data.trajectories.options import TrajectoryConfig
from tests.data.trajectories.made import folder_of
from trainer.checkpoint.readers import restore_model
from trainer.config import load as configuration
from trainer.config.checks import check
from trainer.config.data import DataConfig
from trainer.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    LoggingConfig,
    MeshConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from trainer.config.stage import StageConfig
from trainer.evaluation import HeldOutLoss
from trainer.loop import train
from trainer.mesh import make_mesh
from trainer.stages import stages_of
from trainer.trajectories import ASSET, Contexts, TrajectoryObjective, stored_shape

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """Twelve episodes of 20 steps, whose returns are 2, 4, ..., 24."""
    return folder_of(tmp_path_factory.mktemp("episodes"), count=12)


def run_config(episodes, folder, mesh=None, train_config=None, **options):
    options = {"in_context": 2, "action_repeat": 2, **options}
    tokens = (
        options["in_context"]
        * (options.get("decisions") or 10)
        * (4 if options.get("conditioning") != "none" else 2)
    )
    return RunConfig(
        name="made",
        run_dir=str(folder / "run"),
        model=ModelConfig(overrides=SHAPE, compute_dtype="float32"),
        data=DataConfig(
            context_length=tokens, prepared=str(folder / "prepared"), held_out_fraction=0.25
        ),
        trajectories=TrajectoryConfig(path=str(episodes), task="cartpole_swingup", **options),
        mesh=MeshConfig(**(mesh or {})),
        # The kernel that compiles fastest.
        attention=AttentionConfig(layout="striped" if mesh else "contiguous", kernel="reference"),
        train=TrainConfig(**{"steps": 3, "batch_size": 4, **(train_config or {})}),
        logging=LoggingConfig(tensorboard=False, console=False),
    )


def objective_of(config):
    return TrajectoryObjective(config, make_mesh(config.mesh, jax.devices()[: config.mesh.devices]))


def test_rows_are_different_episodes_by_ascending_return(episodes, tmp_path):
    objective = objective_of(run_config(episodes, tmp_path, in_context=3))
    batch = next(objective.batches(0))
    returns = np.where(batch["kinds"] == 3, batch["values"][..., 0], 0).reshape(4, 3, -1).sum(2)
    assert (np.diff(returns) > 0).all()
    targets = batch["values"][:, ::40, 0] * objective.scales.return_scale
    np.testing.assert_allclose(targets, np.repeat(returns.max(1, keepdims=True), 3, 1), rtol=1e-4)


def test_batches_depend_on_the_step_alone(episodes, tmp_path):
    objective = objective_of(run_config(episodes, tmp_path))
    batches = objective.batches(0)
    third = [next(batches) for _ in range(3)][2]
    for name, array in next(objective.batches(2)).items():
        np.testing.assert_array_equal(array, third[name])
    assert any((next(objective.batches(1))[name] != third[name]).any() for name in third)


def test_held_out_episodes_are_never_trained_on(episodes, tmp_path):
    objective = objective_of(run_config(episodes, tmp_path))
    trained = {
        tuple(state)
        for step in range(20)
        for batch in [next(objective.batches(step))]
        for state in batch["values"][batch["kinds"] == 1]
    }
    held_out = {
        tuple(state)
        for batch in objective.held_out()
        for state in batch["values"][batch["kinds"] == 1]
    }
    assert held_out and not trained & held_out


@given(count=st.integers(1, 40), in_context=st.integers(1, 6), seed=st.integers(0, 3))
def test_held_out_rows_divide_the_episodes_among_them(count, in_context, seed):
    assume(count >= in_context)
    config = TrajectoryConfig(path="x", task="cartpole_swingup", in_context=in_context)
    contexts = Contexts(None, np.arange(count), config, seed, None, 0, divide=True)
    for first in (0, contexts.rows):  # and again
        drawn = [contexts.numbers(first + row) for row in range(contexts.rows)]
        assert all(len(set(row)) == in_context for row in drawn)
        dealt = [episode for row in drawn for episode in row]
        assert set(dealt) == set(range(count)) and len(dealt) - count < in_context


def test_every_held_out_episode_is_evaluated(episodes, tmp_path):
    config = run_config(episodes, tmp_path, in_context=1, train_config={"batch_size": 2})
    data = dataclasses.replace(config.data, held_out_fraction=0.6)
    objective = objective_of(dataclasses.replace(config, data=data))
    returns = [
        np.where(batch["kinds"] == 3, batch["values"][..., 0], 0).sum(1)
        for batch in objective.held_out()
    ]
    assert len(returns) == 4, "seven episodes in rows of one"
    assert len(np.unique(np.round(np.concatenate(returns), 3))) == 7


def test_cloning_keeps_the_best_episodes(episodes, tmp_path):
    objective = objective_of(
        run_config(episodes, tmp_path, in_context=1, conditioning="none", best=0.25)
    )
    assert sorted(objective.prepared.returns[objective.contexts.episodes])[0] >= 20 - 1e-3
    assert set(np.unique(next(objective.batches(0))["kinds"])) == {1, 2}


def test_flops_count_the_tokens_that_attend_to_each_other(episodes, tmp_path):
    assert (
        objective_of(run_config(episodes, tmp_path, decisions=4)).lengths(0).tolist()
        == [2 * 4 * 4] * 4
    )


def test_a_mesh_changes_no_token(episodes, tmp_path):
    """The tokens of all devices together are those of one device, in the layout's order."""
    single, on_mesh = (
        objective_of(run_config(episodes, tmp_path, mesh))
        for mesh in ({}, {"fsdp": 2, "sequence": 4})
    )
    whole, sharded = next(single.batches(5)), on_mesh.to_device(next(on_mesh.batches(5)))
    for name, array in sharded.items():
        assert array.sharding == on_mesh.abstract_batch()[name].sharding
        np.testing.assert_array_equal(np.asarray(array), whole[name][:, on_mesh.layout_order])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"in_context": 13},
            "trajectories.in_context: found 13, but .* has 12 episodes to train on",
        ),
        (
            {"action_repeat": 21},
            "trajectories.action_repeat: found 21, but the shortest episode of .* has 20 steps; "
            "at most 20",
        ),
        (
            {"action_repeat": 1, "in_context": 2},
            "data.context_length: found 80, needs at least 160 for 2 episodes of 20 decisions",
        ),
    ],
)
def test_incompatible_options_are_named(episodes, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        objective_of(run_config(episodes, tmp_path, **changes))


def test_the_suggested_row_length_fits_the_selected_decisions(episodes, tmp_path):
    config = run_config(episodes, tmp_path, decisions=5)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, context_length=24))
    with pytest.raises(
        UserError, match=r"found 24, needs at least 40 for 2 episodes of 5 decisions"
    ):
        objective_of(config)


def test_too_few_held_out_episodes_are_a_warning(episodes, tmp_path, capfd):
    assert (
        objective_of(run_config(episodes, tmp_path)).has_held_out
        and "no held-out loss" not in capfd.readouterr().err
    )
    assert not objective_of(run_config(episodes, tmp_path, in_context=4)).has_held_out
    assert (
        "no held-out loss: data.held_out_fraction 0.25 of 12 episodes is 3, and a "
        "context takes 4" in (capfd.readouterr().err)
    )


def test_actions_and_steps_that_no_decision_has_are_a_warning(episodes, tmp_path, capfd):
    """As of ExoRL's episodes, whose actions change at every step, under a recipe with
    action_repeat 5."""
    objective_of(run_config(episodes, tmp_path))
    assert capfd.readouterr().err == (
        "warning: trajectories.action_repeat: found 2, but the actions of 9 of 9 episodes change "
        "within 2 steps, and only the first of each 2 is learned; action_repeat 1 would learn all\n"
    )
    objective_of(run_config(episodes, tmp_path, action_repeat=3))
    assert (
        "found 3, which does not divide the steps of 12 of 12 episodes; their last 2 steps or fewer"
        in capfd.readouterr().err
    )
    objective_of(run_config(episodes, tmp_path, action_repeat=1, in_context=1, decisions=10))
    assert "warning" not in capfd.readouterr().err


def test_a_model_that_has_learned_other_returns_is_a_warning(episodes, tmp_path, monkeypatch):
    """A return to go of 1 is the best of the data, and so means more or less of a reward there."""
    objective_of(run_config(episodes, tmp_path)).write_assets(tmp_path / "assets")
    monkeypatch.setattr("trainer.trajectories.assets_dir", lambda path: tmp_path / "assets")

    def warnings_of(folder):
        config = run_config(folder, tmp_path)
        model = dataclasses.replace(config.model, path="run", overrides={})
        return objective_of(dataclasses.replace(config, model=model)).warnings

    assert not any("model.path" in warning for warning in warnings_of(episodes))
    assert (
        "model.path: run has learned cartpole_swingup, with returns divided by 24.0; here those of "
        "cartpole_swingup are divided by 10.0, and states normalized by these episodes"
    ) in warnings_of(folder_of(tmp_path / "worse", count=5))


def test_a_recipe_with_missing_fields_is_refused(episodes, tmp_path):
    config = run_config(episodes, tmp_path)
    assert check(config) is config
    with pytest.raises(UserError, match=r"model.preset: found None, needs a shape"):
        check(dataclasses.replace(config, model=ModelConfig()))
    with pytest.raises(ValueError, match=r"trajectories.task: missing"):
        TrajectoryConfig(path="x")


@pytest.mark.slow
def test_a_later_stage_begins_with_the_earlier_parameters_and_the_same_held_out_episodes(
    episodes, tmp_path
):
    config = run_config(
        episodes, tmp_path, mesh={"sequence": 8}, in_context=1
    )  # as `train` takes all devices
    stages = StageConfig(40, steps=2, in_context=1), StageConfig(80, steps=2, in_context=2)
    config = dataclasses.replace(config, stages=stages)
    first, second = stages_of(config)
    assert (first.trajectories.in_context, second.trajectories.in_context) == (
        1,
        2,
    ) and first.data.seed != second.data.seed
    folder = train(first, TrajectoryObjective, [])
    objective = objective_of(second)
    stored = restore_model(folder)
    for name, array in objective.read_params().items():
        np.testing.assert_array_equal(np.asarray(array), stored[name])
    assert objective.origin and not objective_of(first).origin
    held_out = [
        {
            tuple(state)
            for batch in stage.held_out()
            for state in batch["values"][batch["kinds"] == 1]
        }
        for stage in (objective_of(first), objective)
    ]
    assert held_out[0] & held_out[1]
    trained = {
        tuple(state)
        for step in range(9)
        for batch in [next(objective.batches(step))]
        for state in batch["values"][batch["kinds"] == 1]
    }
    assert not trained & (held_out[0] | held_out[1])


def test_a_text_model_cannot_be_the_initial_model(episodes, tmp_path):
    checkpoint = tmp_path / "text" / "assets"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match="not a trajectory model"):
        stored_shape(checkpoint)


def test_stopping_and_resuming_gives_the_same_run(episodes, tmp_path):
    """Trained in one go, and resumed from the checkpoint of the second step."""

    def run(folder):
        config = run_config(episodes, tmp_path, {"fsdp": 4, "sequence": 2})
        config = dataclasses.replace(
            config, run_dir=str(folder), checkpoint=CheckpointConfig(every=1, keep=3)
        )
        newest = train(config, TrajectoryObjective, [HeldOutLoss()])
        return newest, [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]

    whole, rows = run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/3")
    again, rows_again = run(tmp_path / "again")
    for name, array in restore_model(whole).items():
        np.testing.assert_array_equal(restore_model(again)[name], array)
    losses = [
        [row["squared_error_per_action"] for row in run_rows] for run_rows in (rows, rows_again)
    ]
    assert losses[0] == losses[1] and [row["actions"] for row in rows] == [4 * 2 * 10] * 3
    inputs = json.loads((whole / "assets" / ASSET).read_text())
    assert inputs["task"] == "cartpole_swingup" and inputs["target_return"] == pytest.approx(24)
    assert (
        configuration.load(["--config", str(whole / "assets/run.yaml")]).trajectories.in_context
        == 2
    )
    assert "held_out_squared_error_per_action" in (tmp_path / "whole/held_out.jsonl").read_text()
