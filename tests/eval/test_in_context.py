"""Acting in context: tokens and actions during play match those of training on the same
episodes."""

import itertools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.errors import UserError
from data.outputs import PICTURE
from data.trajectories.options import TrajectoryConfig
from data.trajectories.rows import STATE, Decisions, Scales, row
from eval import in_context
from eval.in_context import Agent, Inputs, main, parse, play, summary
from model.agentic import AgenticTransformer, TrajectorySizes
from model.attention import Mask
from model.config import TransformerConfig
from tests.model.build import mesh_of

SIZES = TrajectorySizes(observation=3, action=2)
DECISIONS, EPISODES, REPEAT, TARGET = 4, 2, 2, 5.0


class Environment:
    """A made-up simulator: states are drawn from a seed and moved by the actions; rewards depend on
    both."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.steps, self.state = 0, self.random.normal(size=3)
        return self._time_step(None)

    def step(self, action):
        self.steps += 1
        self.state = 0.9 * self.state + np.sum(action)
        return self._time_step(float(np.tanh(self.state[0])) + 0.1 * self.steps)

    def _time_step(self, reward):
        last = self.steps == DECISIONS * REPEAT
        return SimpleNamespace(observation={"state": self.state}, reward=reward, last=lambda: last)


def agent_of(axes, **options):
    config = TransformerConfig(
        vocab_size=1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model = AgenticTransformer(config, mesh_of(axes), dtype=jnp.float32, sizes=SIZES)
    inputs = Inputs(
        "made up",
        3,
        2,
        TrajectoryConfig(in_context=EPISODES, action_repeat=REPEAT, **options),
        Scales(np.full(3, 0.1), np.full(3, 1.5), 4.0),
        TARGET,
        TARGET,
        0.0,
    )
    return Agent(model, model.init(0), inputs, rows=2, decisions=DECISIONS)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({}, {"see_actions": False}),
        ({"fsdp": 2, "sequence": 4}, {}),
        ({}, {"conditioning": "none"}),
    ],
)
def test_actions_match_one_pass_over_the_whole_row(axes, options):
    """Two environments play two episodes in one context; then the row is built as for training, and
    run in one pass."""
    agent, environments = agent_of(axes, **options), [Environment(seed) for seed in range(2)]
    acted, rewarded, act, remember = [], [], agent.act, agent.remember

    def watched_act(observation, to_go):
        acted.append((observation.copy(), act(observation, to_go)))
        return acted[-1][1]

    def watched_remember(action, reward, reached):
        rewarded.append(reward.copy())
        remember(action, reward, reached)

    agent.act, agent.remember = watched_act, watched_remember
    returns = np.stack([play(agent, environments, TARGET, DECISIONS) for _ in range(EPISODES)], 1)
    model, options = agent.cached.model, agent.inputs.options
    for number in range(2):
        trajectories = []
        for episode in range(EPISODES):
            steps = slice(episode * DECISIONS, (episode + 1) * DECISIONS)
            reward = np.array([rewards[number] for rewards in rewarded[steps]], np.float32)
            assert reward.sum() == pytest.approx(returns[number, episode], rel=1e-5)
            trajectories.append(
                Decisions(
                    np.stack([state[number] for state, _ in acted[steps]]),
                    np.stack([action[number] for _, action in acted[steps]]),
                    reward,
                    TARGET,
                    bool(returns[number, episode] >= TARGET),
                )
            )
        whole = row(trajectories, agent.inputs.scales, 32, options)
        batch = {name: np.stack([array] * 2) for name, array in whole.items()}
        one_device = AgenticTransformer(model.config, mesh_of({}), dtype=jnp.float32, sizes=SIZES)
        predicted = np.asarray(
            jax.jit(one_device.actions)(jax.device_put(agent.params, one_device.shardings), batch)
        )[0]
        states = (whole["kinds"] == STATE) & (whole["segment_ids"] > 0)
        np.testing.assert_allclose(
            np.stack([action[number] for _, action in acted]), predicted[states], atol=1e-5
        )


def test_a_policy_replayed_from_its_seed_gives_the_same_return():
    agent = agent_of({})
    first = play(agent, [Environment(0), Environment(1)], TARGET, DECISIONS)
    agent.begin_context()
    np.testing.assert_array_equal(
        play(agent, [Environment(0), Environment(1)], TARGET, DECISIONS), first
    )


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "sequence": 4}])
def test_attention_by_episode_is_uniform_without_queries(axes, capsys):
    """With queries of 0, a state attends equally to all tokens up to its own. The first of the two
    episodes has 16 of them, and the states of the second come at the 18th, 22nd, ... token."""
    agent, environments = agent_of(axes), [Environment(seed) for seed in range(2)]
    agent.params["layers.self_attn.q_proj.weight"] *= 0
    for _ in range(EPISODES):
        play(agent, environments, TARGET, DECISIONS)
    shares = in_context.attention_by_episode(agent, 2, DECISIONS)
    first = np.mean([16 / tokens for tokens in (18, 22, 26, 30)])
    np.testing.assert_allclose(shares, [[first, 1 - first]] * 2, atol=1e-6)
    in_context.print_attention(shares)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", *["69.1"] * 3] in lines and ["2", *["30.9"] * 3] in lines


def test_every_episode_has_a_column_and_new_contexts_start_empty(tmp_path, monkeypatch):
    """The command with a player of made-up returns: seed s earns 10 e + s in episode e; a context
    holds two episodes."""
    contexts, episodes = [], itertools.count()
    inputs = Inputs(
        "walker_walk",
        24,
        6,
        TrajectoryConfig(in_context=2, action_repeat=5),
        Scales(np.zeros(24), np.ones(24), 4.0),
        TARGET,
        50.0,
        20.0,
    )
    agent = SimpleNamespace(begin_context=lambda: contexts.append(len(played)))
    played: list[int] = []

    def play_one(agent, environments, target, decisions, advance):
        played.append(next(episodes))
        assert (target, decisions, len(environments)) == (7.0, 200, 3)
        return 10.0 * played[-1] + np.arange(3)

    monkeypatch.setattr(in_context.Inputs, "read", lambda folder: inputs)
    monkeypatch.setattr(in_context, "Agent", lambda *arguments: agent)
    monkeypatch.setattr(in_context, "play", play_one)
    monkeypatch.setattr("data.trajectories.tasks.make_environment", lambda task, seed: seed)
    monkeypatch.setattr("trainer.checkpoint.readers.assets_dir", lambda path: tmp_path / "assets")
    monkeypatch.setattr(
        "trainer.checkpoint.readers.restore_model", lambda *arguments, **options: {}
    )
    monkeypatch.setattr("trainer.huggingface.assets.trained_mask", lambda assets: Mask())
    monkeypatch.setattr(
        "trainer.trajectories.stored_shape",
        lambda assets: TransformerConfig(
            vocab_size=1,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    )
    command = f"--checkpoint none --output {tmp_path / 'out'} --seeds 3 --episodes 5 --target 7"
    assert main([*command.split(), "--sequence", "8"]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["returns"] == [
        [10.0 * episode + seed for episode in range(5)] for seed in range(3)
    ]
    assert results["scores"]["last"]["mean"] == 41.0 and results["scores"]["best"]["by_seed"] == [
        40.0,
        41.0,
        42.0,
    ]
    assert (
        contexts == [0, 2, 4] and PICTURE in (tmp_path / "out/in_context.png").read_bytes()[:1000]
    )


def test_a_target_that_the_model_does_not_take_is_refused(tmp_path, monkeypatch, capsys):
    options = TrajectoryConfig(conditioning="none", action_repeat=5)
    scales = Scales(np.zeros(24), np.ones(24), 4.0)
    inputs = Inputs("walker_walk", 24, 6, options, scales, TARGET, 50.0, 20.0)
    monkeypatch.setattr(in_context.Inputs, "read", lambda folder: inputs)
    monkeypatch.setattr("trainer.checkpoint.readers.assets_dir", lambda path: tmp_path)
    assert main(["--checkpoint", "c", "--output", str(tmp_path / "out"), "--target", "7"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --target: found 7, and this model takes no return")


@pytest.mark.parametrize(
    ("options", "episodes", "words"),
    [
        # Rows of 2 x 50 x 4 tokens, and contexts of 2 x 200 x 4.
        ({"in_context": 2, "decisions": 50}, 8, "up to 1,600 tokens here, and 400 in training"),
        ({"in_context": 2, "decisions": 50, "conditioning": "none"}, 8, "800 tokens here, and 200"),
        ({"in_context": 4, "decisions": 50}, 1, ""),
        ({"in_context": 2, "decisions": 300}, 8, ""),
        ({"in_context": 2}, 8, ""),
    ],
)
def test_contexts_longer_than_trained_are_a_warning(capsys, options, episodes, words):
    in_context.warn_beyond_trained(TrajectoryConfig(**options), episodes, decisions=200)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == bool(words)


def test_last_best_and_mean_are_distinguished():
    scores = summary(np.array([[1.0, 9.0, 2.0], [1.0, 3.0, 8.0]]))
    assert [scores[name]["mean"] for name in ("last", "best", "mean")] == [5.0, 8.5, 4.0]
    assert scores["last"]["by_seed"] == [2.0, 8.0] and scores["last"]["interval"] == (2.0, 8.0)


def test_one_seed_has_no_interval(tmp_path, capsys):
    returns = np.array([[1.0, 9.0, 2.0]])
    results = {
        "task": "walker_walk",
        "in_context": 2,
        "data_best": 9.0,
        "data_mean": 2.0,
        "returns": returns.tolist(),
        "scores": summary(returns),
    }
    in_context.write(results, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["scores"]["last"]["interval"] is None
    assert re.search(r"last +2\.0 +none", capsys.readouterr().out)


@pytest.mark.parametrize("target", ["nan", "inf"])
def test_a_target_that_is_no_number_is_refused(tmp_path, capsys, target):
    with pytest.raises(SystemExit) as ended:
        main(["--checkpoint", "c", "--output", str(tmp_path), "--target", target])
    assert ended.value.code == 2
    assert f"--target: found {target}; a finite number is needed" in capsys.readouterr().err


def test_another_models_checkpoint_is_named(tmp_path):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="has no trajectory model"):
        Inputs.read(tmp_path / "assets")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seeds 5 --fsdp 2", "--seeds: 5 is not a multiple of --fsdp 2"),
        ("--seeds 4 --fsdp 2 --attention 1", "--attention: 1 is not a multiple of --fsdp 2"),
        ("--seeds 4 --attention 5", "--attention: found 5; 0 to --seeds, 4, works"),
        (
            "--seeds 2 --first-seed 4294967295",
            "--first-seed: found 4294967295; with --seeds 2, 0 to 4294967294 works",
        ),
    ],
)
def test_numbers_of_environments_that_cannot_be_split_are_named(options, message, capsys):
    with pytest.raises(SystemExit):
        parse(["--checkpoint", "x", "--output", "y", *options.split()])
    assert message in capsys.readouterr().err
