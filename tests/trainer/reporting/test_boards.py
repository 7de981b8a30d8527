"""A small run on two sources reports to W&B (a stand-in that records its calls), stops and
continues; another run is profiled."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import train
from data.errors import UserError
from tests import small_run
from trainer.reporting.boards import WeightsAndBiases

PROMPTS = ["Who are you?", "What is a ring?"]


class Wandb(SimpleNamespace):
    """The part of the module wandb that is called; `runs` maps ids to the arguments of each start
    and what it logged."""

    class Error(Exception):
        """Mirrors wandb's own error."""

    def __init__(self):
        super().__init__(runs=[])

    def init(self, **arguments):
        run = SimpleNamespace(told=arguments, rows=[], metrics=[], finished=False)
        run.log = run.rows.append
        run.define_metric = lambda name, step_metric: run.metrics.append((name, step_metric))
        run.finish = lambda: setattr(run, "finished", True)
        self.runs.append(run)
        return run


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory, small_recipe):
    """(folder, stand-in) of a run of 3 steps on two sources that was started twice."""
    folder, wandb = tmp_path_factory.mktemp("watched"), Wandb()
    records = json.loads((small_recipe.parent / "conversations.json").read_text())
    for name, part in (("chats", records[:60]), ("more", records[60:])):
        (folder / f"{name}.json").write_text(json.dumps(part))
    sources = [{"path": str(folder / "chats.json")}, {"path": str(folder / "more.json")}]
    flags = small_run.command(
        small_recipe,
        folder / "run",
        *("--data.sources", json.dumps(sources), "--data.prepared", folder / "prepared"),
        *("--train.steps", 3, "--logging.wandb", "project", "--logging.console", "false"),
        *("--samples.prompts", json.dumps(PROMPTS), "--samples.every", 2),
        *("--samples.new_tokens", 3, *small_run.DATA_PARALLEL),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", wandb)
        assert train.main(flags) == 0 and train.main(flags) == 0
    return folder / "run", wandb


@pytest.mark.slow
def test_the_profile_holds_the_chosen_steps(tmp_path, small_recipe):
    """In a separate process: JAX's profiler does not start where the TPU compiler has been loaded
    without a TPU."""
    flags = ("--train.steps", 3, "--profile_steps", "2:3", "--data.prepared", tmp_path / "prepared")
    words = small_run.command(small_recipe, tmp_path / "run", *flags)
    subprocess.run([sys.executable, "train.py", *words], check=True, capture_output=True)
    [file] = (tmp_path / "run/profile/plugins/profile/steps_2_3").glob("*.xplane.pb")
    events = [
        event
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert {dict(event.stats)["step_num"] for event in events} == {2, 3}


def test_every_source_is_logged_and_their_losses_bracket_the_total(watched_run):
    folder, _ = watched_run
    rows = small_run.rows(folder / "metrics.jsonl")
    held_out = small_run.rows(folder / "held_out.jsonl")
    for row in rows:
        parts = [row[f"loss_by_source/{name}"] for name in ("chats", "more")]
        assert min(parts) <= row["loss_nats_per_target"] <= max(parts) and parts[0] != parts[1]
        assert all(
            row[name] > 0
            for name in ("compile_seconds", "step_seconds", "peak_host_gib", "target_tokens")
        )
        assert row["data_wait_seconds"] >= 0 and {"mfu", "peak_device_gib"} <= row.keys()
    assert len(rows) == 3 and rows[0].keys() == rows[2].keys()
    for row in held_out:  # all from one file, the third
        assert row["held_out_loss_by_source/conversations_held_out"] == pytest.approx(
            row["held_out_loss_nats_per_target"]
        )
        assert "held_out_loss_by_source/chats" not in row


def test_the_prompts_are_answered_at_the_configured_steps(watched_run):
    """Before the first step, every two steps and after the last one; each prompt gets one answer,
    and training changes it."""
    rows = small_run.rows(watched_run[0] / "samples.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert all(
        list(row) == ["step", *PROMPTS] and all(isinstance(row[prompt], str) for prompt in PROMPTS)
        for row in rows
    )


def test_wandb_receives_what_the_files_hold(watched_run, monkeypatch):
    folder, wandb = watched_run
    [first] = wandb.runs  # the second start had nothing left to do
    again = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", again)
    WeightsAndBiases(folder, "project", "name", {})
    assert (
        first.told["id"] == again.runs[0].told["id"] and again.runs[0].told["resume"] == "allow"
    ), "one run on W&B too"
    assert first.told["project"] == "project" and first.told["config"]["train"]["steps"] == 3
    assert first.told["dir"] == str(folder) and first.metrics == [("*", "step")]
    assert first.finished
    for kind, file in (("train", "metrics"), ("held_out", "held_out"), ("samples", "samples")):
        sent = [row for row in first.rows if any(name.startswith(f"{kind}/") for name in row)]
        expected = [
            {
                name if name == "step" else f"{kind}/{name}": x
                for name, x in row.items()
                if x is not None
            }
            for row in small_run.rows(folder / f"{file}.jsonl")
        ]
        assert sent == expected and len(sent) == {"train": 3, "held_out": 2, "samples": 3}[kind]


def test_missing_wandb_or_login_is_a_one_line_error(tmp_path, small_recipe, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    command = small_run.command(small_recipe, tmp_path / "run", "--logging.wandb", "p")
    assert train.main(command) == 2
    stderr = capsys.readouterr().err.strip()
    assert "logging.wandb" in stderr and "pip install wandb" in stderr and "\n" not in stderr
    assert not (tmp_path / "run").exists()
    broken = Wandb()

    def refuse(**_):
        raise broken.Error("api_key not configured (no-tty)\nmore")

    broken.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", broken)
    with pytest.raises(
        UserError, match=r"^logging\.wandb: api_key not configured \(no-tty\); WANDB_MODE=offline"
    ):
        WeightsAndBiases(tmp_path, "p", "n", {})
