"""Cells of in-context reinforcement learning on exploration: the order of trainings, what is
skipped, and what half a table shows."""

import json

import numpy as np
import pytest

from scripts.benchmarks import results
from scripts.benchmarks.exploration import __main__ as exploration
from scripts.benchmarks.exploration.cells import TASKS, TRAININGS, Cell, cells
from scripts.benchmarks.exploration.figure import curves, draw
from scripts.benchmarks.exploration.table import (
    CELLS,
    NAME,
    SCORES,
    Answer,
    nested_bootstrap,
    save_result,
)
from trainer.config.load import load


def episode_returns(last, seeds=20, episodes=32):
    returns = np.linspace(0, 2 * last, seeds)[:, None] * np.ones(episodes)
    scores = {name: {"by_seed": returns[:, -1].tolist()} for name in ("last", "best", "mean")}
    more = {"data_best": 100.0, "data_mean": 50.0}
    return {"returns": returns.tolist(), "scores": scores, **more}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Results are stored in a folder of the test, and read from it."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return lambda: results.load(NAME)


@pytest.fixture
def commands_run(tmp_path, monkeypatch):
    """Commands are recorded instead of run; evaluations find 10, or fail once."""
    commands = []

    def python(text, **values):
        words = [word.format(**values) for word in text.split()]
        commands.append(words)
        if "eval.in_context" in words:
            folder = values["output"]
            folder.mkdir(parents=True)
            (folder / "results.json").write_text(json.dumps(episode_returns(10.0)))
        else:
            values["run"].mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(exploration, "python", python)
    monkeypatch.setattr(exploration, "EPISODES", 1)
    for body, repeat in (("cartpole", 5), ("jaco", 2)):
        buffer = tmp_path / f"data/{body}/rnd/buffer"
        buffer.mkdir(parents=True)
        (buffer / "collected_0_1000.npz").touch()
        (buffer.parent / "collected.json").write_text(json.dumps({"action_repeat": repeat}))
    return commands


def trained(commands):
    """Returns the trainings' run folders and options."""
    return {
        words[words.index("--run_dir") + 1].partition("runs/")[2]: words[1:]
        for words in commands
        if words[0] == "train.py"
    }


def test_every_cell_is_trained_after_the_one_it_starts_from(commands_run, stored, tmp_path, capsys):
    options = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
    assert exploration.main(options) == 0
    runs = trained(commands_run)
    names = list(runs)
    assert len(names) == 2 * (5 + 1 + 2 * (3 + 1) + 5 + 1), (
        "including the runs with one episode per context"
    )
    assert "64 cells are left" in capsys.readouterr().out, "data for two of the four domains exist"
    start, long = (f"cartpole_swingup/ours_at__n___{n}_seed_0" for n in (4, 32))
    assert names.index(start) < names.index(long)
    config = load(runs[long])
    assert config.model.path.endswith(start) and config.mesh.sequence == 8
    assert config.data.context_length == 32 * 200 * 4 == 25_600
    assert config.trajectories.loss_on == "last" and not config.trajectories.see_actions
    cloning = load(runs["jaco_reach_top_left/the_paper_s_bc_10__seed_0"])
    assert cloning.data.context_length == 125 * 2 and cloning.trajectories.best == 0.1
    assert cloning.trajectories.see_actions and cloning.trajectories.loss_on == "all"
    seeds = {
        words[words.index("--model.seed") + 1] for name, words in runs.items() if "_n___4_" in name
    }
    assert seeds == {"0", "1", "2"}
    commands_run.clear()
    assert exploration.main(options) == 0 and not commands_run, "finished cells are skipped"
    lines = stored().tables[CELLS]["rows"]
    assert len(lines) == 2 * (5 + 2 * 3 + 5 + 1), (
        "the paper's N = 4 is evaluated at two target returns"
    )
    assert (tmp_path / "exploration.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_failed_evaluation_is_retried(commands_run, stored, tmp_path, monkeypatch):
    options = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
    good = exploration.python

    def bad(text, **values):
        if "eval.in_context" in text:
            raise exploration.UserError("killed")
        good(text, **values)

    monkeypatch.setattr(exploration, "python", bad)
    assert exploration.main([*options, "--tasks", "cartpole_swingup"]) == 2
    assert len(commands_run) == 1
    monkeypatch.setattr(exploration, "python", good)
    assert exploration.main([*options, "--tasks", "cartpole_swingup"]) == 0
    assert "eval.in_context" in commands_run[1], "the training was finished"


def test_cells_of_the_result_are_not_measured_again(commands_run, stored, tmp_path, capsys):
    """A training that another one starts from still runs if it is missing."""
    cell = Cell("cartpole_swingup", "ours", "AT, N = 4", 0)
    save_result({cell: [Answer("best in the data", episode_returns(10.0), 0.5)]}, "command")
    options = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
    assert exploration.main([*options, "--tasks", "cartpole_swingup"]) == 0
    played = [
        words[words.index("--output") + 1] for words in commands_run if "eval.in_context" in words
    ]
    assert len(played) == 16 and not any("ours_at__n___4_seed_0" in folder for folder in played)
    assert "cartpole_swingup/ours_at__n___4_seed_0" in trained(commands_run), (
        "N = 16 begins with it"
    )
    assert "0 cells are left" in capsys.readouterr().out


def test_half_a_table_is_completed_elsewhere(stored):
    """Cells measured on another machine stay; verdicts need both baselines and both lengths."""
    task = "walker_walk"
    first = {
        Cell(task, "ours", method, 0): [Answer("best in the data", episode_returns(last), 0.5)]
        for method, last in (("BC-10%", 1.0), ("DT", 2.0), ("AT, N = 4", 10.0))
    }
    save_result(first, "command")
    row = stored().rows[task]
    assert row["verdict"] == "not measured"
    assert row["found"].endswith("for AT, N = 32; so far BC-10% 1; DT 2; AT, N = 4 10")
    second = {
        Cell(task, "ours", "AT, N = 32", 0): [
            Answer("best in the data", episode_returns(12.0), 1.0)
        ]
    }
    second[Cell(task, "ours", "DT", 1)] = [Answer("best in the data", episode_returns(4.0), 0.5)]
    save_result(second, "command")
    row = stored().rows[task]
    assert row["verdict"] == "held" and row["found"] == (
        "BC-10% 1; DT 3; AT, N = 4 10; AT, N = 32 12"
    )
    scores = {line[2]: line for line in stored().tables[SCORES]["rows"]}
    assert list(scores) == ["BC-10%", "DT", "AT, N = 4", "AT, N = 32"]
    assert scores["DT"][4].startswith("3.0 (") and scores["DT"][-2:] == ["2", "1.00"]
    assert "5 evaluations are measured, in 3.0 CPU hours." in stored().facts


def test_intervals_are_over_training_seeds_too():
    """By a normal approximation: the variance of the mean over S seeds of E evaluations."""
    generator = np.random.default_rng(0)
    values = np.array([0.0, 10.0, 20.0])[:, None] + generator.normal(size=(3, 20))
    low, high = nested_bootstrap(values)
    between, within = values.mean(1).var() / 3, values.var(1).mean() / 60
    expected = 2 * 1.96 * np.sqrt(between + within)
    assert abs((high - low) / expected - 1) < 0.15
    alone = nested_bootstrap(values[:1])
    assert alone[1] - alone[0] < 0.15 * (high - low)


def test_cells_are_ordered_by_priority():
    order = list(cells())
    assert len(order) == len(set(order)) == 6 * (5 + 2 * 3 + 5)
    assert {cell.seed for cell in order[:30]} == {0} and order[0].task == next(iter(TASKS))
    assert all(TRAININGS[cell.method].in_context <= 4 for cell in order if cell.seed)


def test_the_figure_shows_each_episodes_mean_and_interval(saved_figures, tmp_path):
    """Two training seeds, in an episode 10 and 14 on average with deviations of 2 and 4."""
    columns = ["task", "protocol", "method", "episodes", "deviations of episodes", "best in data"]
    lines = [
        ["walker_run", "ours", "DT", "10.0 20.0", "2.0 0.0", "90.0"],
        ["walker_run", "ours", "DT", "14.0 20.0", "4.0 0.0", "90.0"],
        ["walker_run", "the paper's", "DT", "1.0 1.0", "1.0 1.0", "90.0"],
    ]
    found = curves(columns, lines)
    (curve,) = found["walker_run"].values()
    # Between the seeds 8 with one degree of freedom, within them (4 + 16) / 2 = 10.
    np.testing.assert_allclose(curve.mean, [12.0, 20.0])
    np.testing.assert_allclose(curve.margin, [1.96 * np.sqrt((8 + 10 / 20) / 2), 0.0])
    draw(found, tmp_path / "figure.png")
    panels = {axes.get_title(): axes for axes in saved_figures[0].axes}
    assert panels.keys() == TASKS.keys()
    assert [text.get_text() for text in panels["cheetah_run"].texts] == ["not measured"]
    assert list(panels["walker_run"].lines[0].get_ydata()) == [12.0, 20.0]
    (legend,) = saved_figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["DT", "best in the data"]


def test_attention_by_episode_is_stored(stored):
    cell = Cell("walker_walk", "ours", "AT, N = 4", 0)
    result = {**episode_returns(10.0), "attention": [[0.1, 0.2, 0.3, 0.4], [0.3, 0.2, 0.1, 0.4]]}
    save_result({cell: [Answer("best in the data", result, 0.5)]}, "command")
    table = stored().tables[CELLS]
    (line,) = table["rows"]
    assert line[table["columns"].index("attention by episode, %")] == "20.0 20.0 20.0 40.0"
