"""A curriculum in one run: each stage continues the previous one, and the same command resumes in
any stage, bitwise."""

import dataclasses
import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
import yaml

import train
from data.errors import UserError
from eval import line_cases
from model.language_model import LanguageModel
from tests import small_preference, small_run
from tests.model.build import mesh_of
from trainer.config.data import DataConfig
from trainer.config.load import dump, load
from trainer.config.preference import PreferenceConfig
from trainer.config.schema import AdapterConfig, ModelConfig, RunConfig
from trainer.config.stage import StageConfig
from trainer.evaluation import HeldOutLoss
from trainer.model_source import open_model
from trainer.run.opening import check_run
from trainer.stages import stages_of, stages_to_train
from trainer.text import TextObjective

STAGES = [
    {"context_length": 128, "steps": 9, "batch_size": 8, "learning_rate": 3e-3},
    {"context_length": 256, "steps": 8, "mesh": {"fsdp": 1, "sequence": 4}},
    {
        "context_length": 512,
        "steps": 7,
        "batch_size": 2,
        "warmup_steps": 2,
        "rope": {"rope_theta": 50000.0},
    },
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, repository):
    folder = tmp_path_factory.mktemp("stages")
    path = small_run.recipe(folder, repository, conversations=60)
    written = yaml.safe_load(path.read_text())
    short = line_cases.Wording("Learn:\n", "* {key} = {number}\n", "What is {key}?")
    line_cases.write(line_cases.generate(5, 1, wording=short), folder / "like.jsonl")
    written["data"]["sources"].append(
        {"path": f"synthetic:lines?count=30&like={folder}/like.jsonl", "weight": 0.5}
    )
    written["checkpoint"] = {"every": 3, "keep": 2}
    path.write_text(yaml.safe_dump(written | {"stages": STAGES}))
    return path


@pytest.fixture
def config(recipe, tmp_path):
    return load(small_run.command(recipe, tmp_path / "run"))


def test_each_stage_is_a_run_that_begins_with_the_previous_one(recipe):
    config = load(["--config", str(recipe), "--run_dir", "runs/x"])
    in_bucket = stages_of(dataclasses.replace(config, run_dir="gs://bucket/x"))
    locations = ["gs://bucket/x/stages/1", "gs://bucket/x/stages/2", "gs://bucket/x"]
    assert [stage.location for stage in in_bucket] == locations
    assert [stage.model.path for stage in in_bucket[1:]] == locations[:2]
    first, second, third = stages_of(config)
    assert [str(stage.folder) for stage in (first, second, third)] == [
        "runs/x/stages/1",
        "runs/x/stages/2",
        "runs/x",
    ]
    assert (
        first.model == config.model
        and second.model.path == "runs/x/stages/1"
        and third.model.path == "runs/x/stages/2"
    )
    assert (
        third.model.overrides == {"rope_theta": 50000.0}
        and not second.model.overrides
        and second.model.tokenizer is None
    )
    assert [stage.data.context_length for stage in (first, second, third)] == [128, 256, 512]
    assert [stage.train.batch_size for stage in (first, second, third)] == [8, 4, 2]
    assert [stage.train.steps for stage in (first, second, third)] == [9, 8, 7]
    assert [stage.optimizer.learning_rate for stage in (first, second, third)] == [3e-3, 2e-3, 2e-3]
    assert [stage.optimizer.warmup_steps for stage in (first, second, third)] == [5, 5, 2]
    assert [(stage.mesh.fsdp, stage.mesh.sequence) for stage in (first, second, third)] == [
        (2, 2),
        (1, 4),
        (2, 2),
    ]
    assert len({stage.data.seed for stage in (first, second, third)}) == 3 and not any(
        s.stages for s in (first, second, third)
    )
    plain = dataclasses.replace(config, stages=())
    assert stages_of(plain) == [plain]


def test_stages_of_adapters_keep_the_base_and_its_positions(recipe):
    adapter = ("--model.path", "hf", "--adapter.rank", 8)
    config = load(small_run.command(recipe, "runs/x", *adapter))
    expected = dataclasses.replace(
        config.stages[0], rope={"rope_theta": 7.0, "max_position_embeddings": 256}
    )
    config = dataclasses.replace(config, stages=(expected, *config.stages[1:]))
    assert [stage.model.path for stage in stages_of(config)] == ["hf"] * 3
    assert [stage.adapter.path for stage in stages_of(config)] == [
        None,
        "runs/x/stages/1",
        "runs/x/stages/2",
    ]
    assert [stage.model.overrides for stage in stages_of(config)] == [
        expected.rope,
        expected.rope,
        expected.rope | {"rope_theta": 50000.0},
    ]


def preference_stages(folder, **changes):
    """The stages of a run that learns from preferences, with other sections replaced."""
    config = small_preference.make_config(folder, "hf", loss="sigmoid")
    stages = (StageConfig(128), StageConfig(256, rope={"rope_theta": 7.0}), StageConfig(512))
    model = dataclasses.replace(config.model, overrides={"max_position_embeddings": 512})
    return stages_of(dataclasses.replace(config, **{"stages": stages, "model": model, **changes}))


def test_all_stages_have_the_reference_of_the_first(tmp_path):
    first, *later = preference_stages(tmp_path)
    assert first.preference.ref_model is None and not first.preference.ref_overrides
    assert [stage.preference.ref_model for stage in later] == ["hf", "hf"]
    assert [stage.preference.ref_overrides for stage in later] == [
        {"max_position_embeddings": 512, "rope_theta": 7.0}
    ] * 2
    first, *later = preference_stages(tmp_path, adapter=AdapterConfig(rank=4))
    assert not first.preference.ref_without_adapter
    assert [stage.preference.ref_without_adapter for stage in later] == [True, True]
    assert not any(stage.preference.ref_model for stage in later)
    for kept in ({"loss": "sigmoid", "ref_model": "other"}, {"loss": "orpo"}):
        preference = PreferenceConfig(**kept)
        stages = preference_stages(tmp_path, preference=preference)
        assert [stage.preference for stage in stages] == [preference] * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ModelConfig(preset="tiny", tokenizer="t")}, "model.preset: found tiny with"),
        (
            {"adapter": AdapterConfig(rank=4, path="sft")},
            "adapter.path: found sft with stages and preference.loss sigmoid, needs "
            "preference.ref_model or ref_without_adapter to set the reference of all stages",
        ),
    ],
)
def test_a_first_model_that_later_stages_cannot_open_is_refused(tmp_path, changes, words):
    with pytest.raises(UserError, match=f"^{re.escape(words)}"):
        preference_stages(tmp_path, **changes)


def test_a_stage_begun_with_the_stage_before_it_as_its_reference_is_refused(tmp_path):
    """As in earlier versions."""
    begun = preference_stages(tmp_path)[1]
    pretend_trained(dataclasses.replace(begun, preference=PreferenceConfig("sigmoid")))
    expected = (
        r"preference\.ref_model is 'not given' there and 'given' now; with stages it is derived "
        "from them, by other rules in earlier versions: finish the run with the version that began "
        "it, or give another --run_dir"
    )
    with pytest.raises(UserError, match=expected):
        check_run(begun)


def test_a_later_stage_continues_after_the_first_model_has_moved(tmp_path):
    pretend_trained(preference_stages(tmp_path, model=ModelConfig("hf"))[1])
    moved = preference_stages(tmp_path, model=ModelConfig("moved", tokenizer="also"))[1]
    assert (moved.preference.ref_model, moved.preference.ref_tokenizer) == ("moved", "also")
    assert check_run(moved).config.exists()


def test_finished_stages_are_not_trained_again(config, capsys):
    stages = list(stages_to_train(config))
    assert [follows for _, follows in stages] == [True, True, False]
    assert [stage.data.context_length for stage, _ in stages] == [128, 256, 512]
    assert "stage 2 of 3: 256 tokens, 8 steps" in capsys.readouterr().out
    for stage in stages_of(config)[:2]:
        pretend_trained(stage)
    assert lengths_to_train(config) == [256, 512]


def lengths_to_train(config):
    return [stage.data.context_length for stage, _ in stages_to_train(config)]


def pretend_trained(stage):
    """Makes a stage's folder look as if it had ended."""
    (stage.folder / "checkpoints" / str(stage.train.steps)).mkdir(parents=True)
    (stage.folder / "config.yaml").write_text(dump(stage))


def test_a_run_whose_positions_were_chosen_continues_in_a_later_stage(tmp_path):
    config = dataclasses.replace(
        small_preference.make_config(tmp_path, "hf", loss="sigmoid"),
        stages=(StageConfig(128), StageConfig(256), StageConfig(512)),
        auto=("positions",),
    )
    chosen = {"max_position_embeddings": 300, "rope_scaling": {"rope_type": "yarn", "factor": 3.0}}
    for stage in stages_of(config)[:2]:
        preference = dataclasses.replace(
            stage.preference, ref_overrides=chosen if stage.preference.ref_model else {}
        )
        model = dataclasses.replace(stage.model, overrides=chosen)
        pretend_trained(dataclasses.replace(stage, preference=preference, model=model))
    third = stages_of(config)[2]
    third.folder.joinpath("config.yaml").write_text(dump(third))
    assert lengths_to_train(config) == [512]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("steps", [8, 10])
def test_a_stage_cannot_change_its_length_once_the_next_has_begun(config, schedule, steps):
    """With a constant learning rate its run could be longer, but the next stage began without."""
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, schedule=schedule)
    )
    for stage in stages_of(config)[:2]:
        pretend_trained(stage)
    changed = dataclasses.replace(config.stages[0], steps=steps)
    expected = (
        rf"^stages\[0\].steps: found {steps}, but stage 1 has ended after 9 steps, and stage 2 has "
        "begun from it; 9 would work, or another --run_dir$"
    )
    with pytest.raises(UserError, match=expected):
        lengths_to_train(dataclasses.replace(config, stages=(changed, *config.stages[1:])))


def test_a_changed_stage_is_refused_once_the_next_has_begun(config):
    for stage in stages_of(config)[:2]:
        pretend_trained(stage)
    changed = dataclasses.replace(config.stages[0], learning_rate=1e-4, steps=10)
    with pytest.raises(
        UserError, match=r"stages/1: another run .*optimizer.learning_rate is 0.003"
    ):
        lengths_to_train(dataclasses.replace(config, stages=(changed, *config.stages[1:])))


def test_a_finished_curriculum_needs_none_of_its_earlier_stages(config, tmp_path, capsys):
    for stage in stages_of(config):
        pretend_trained(stage)
    shutil.rmtree(tmp_path / "run/stages")
    assert lengths_to_train(config) == []
    last = tmp_path / "run/checkpoints/7"
    assert f"stage 3 of 3 is finished: {last}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("begun", "removed", "expected"),
    [
        (2, "stages/1", "stage 2 needs the checkpoint in {run}/stages/1, which is gone; restore"),
        (3, "stages/2", "stage 3 needs the checkpoint in {run}/stages/2, which is gone; restore"),
        (3, "stages", "stage 3 needs the checkpoint in {run}/stages/2, which is gone; restore"),
        (3, "stages/2/checkpoints", "stage 3 needs the checkpoint in {run}/stages/2, which"),
    ],
)
def test_an_unfinished_stage_needs_the_one_before_it(recipe, tmp_path, begun, removed, expected):
    """Otherwise earlier stages would be trained again, or a missing model's folder be named."""
    run = tmp_path / "run"
    config = load(["--config", str(recipe), "--run_dir", str(run)])
    for stage in stages_of(config)[:begun]:
        pretend_trained(stage)
    newest = stages_of(config)[begun - 1].folder / "checkpoints"
    next(newest.iterdir()).rename(newest / "1")
    shutil.rmtree(run / removed)
    with pytest.raises(UserError, match=expected.format(run=run)):
        lengths_to_train(config)


def test_another_run_in_the_folder_is_found_before_the_first_stage(config):
    pretend_trained(dataclasses.replace(config, stages=()))
    with pytest.raises(UserError, match=r"stages: found 3, but .* begun with one or none;"):
        lengths_to_train(config)


def test_a_single_stage_overrides_the_recipe(recipe, tmp_path):
    stages = json.dumps(STAGES[2:])
    config = load(small_run.command(recipe, tmp_path / "run", "--stages", stages))
    assert list(stages_to_train(config)) == [(stages_of(config)[0], False)]
    assert lengths_to_train(config) == [512]


@pytest.mark.parametrize("process", [0, 1])
def test_one_process_decides_for_all_which_stage_is_next(config, monkeypatch, process, capsys):
    """Process 1 relies on process 0's answer, although it does not see the first stage's folder
    yet, and does not ask for a lock. It does not repeat what process 0 prints."""
    for stage in stages_of(config)[:2] if process == 0 else []:
        pretend_trained(stage)
    monkeypatch.setattr(
        "trainer.stages.first_then_others",
        lambda work, encode: work(None) if process == 0 else work(encode(1)),
    )
    monkeypatch.setattr("trainer.stages._on_one_day", lambda config: config)
    monkeypatch.setattr("trainer.stages.process", lambda: process)
    assert lengths_to_train(config) == [256, 512]
    assert capsys.readouterr().out.count("of 3") == (2 if process == 0 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("during", ["its last step", "its last evaluation"])
def test_a_preemption_notice_at_the_end_of_a_stage_ends_the_run_before_the_next(
    recipe, tmp_path, monkeypatch, capfd, during
):
    lengths = TextObjective.lengths

    def notified(objective, step):
        if during == "its last step" and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return lengths(objective, step)

    def measure(evaluation, params, step):
        if during == "its last evaluation" and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    run = tmp_path / "run"
    stages = json.dumps([{"context_length": 128, "steps": 2}] * 2)
    words = small_run.command(recipe, run, "--stages", stages)
    with monkeypatch.context() as patched:
        patched.setattr(TextObjective, "lengths", notified)
        patched.setattr(HeldOutLoss, "run", measure)
        assert train.main(words) == 128 + signal.SIGTERM
    expected = (
        f"preempted (SIGTERM): saved {run / 'stages/1/checkpoints/2'}; the same command resumes "
        "the run"
    )
    assert expected in capfd.readouterr().err and not (run / "config.yaml").exists()
    assert train.main(words) == 0
    assert (run / "checkpoints/2").exists()


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"steps": 3}, "stages[0].context_length: missing"),
        (
            {"context_length": 64, "step": 3},
            "unknown field stages[0].step (did you mean stages[0].steps?)",
        ),
        (
            {"context_length": 63},
            "stages[0]: data.context_length: found 63, needs a multiple of mesh.sequence = 2",
        ),
        (
            {"context_length": 64, "batch_size": 3},
            "stages[0]: train.batch_size: found 3, needs a multiple",
        ),
        (
            {"context_length": 64, "mesh": {"sequence": 4}},
            "stages[0].mesh: found data 1 x fsdp 2 x tensor 2 x sequence 4 = 16 devices, needs 8",
        ),
        (
            {"context_length": 64, "mesh": {"rows": 4}},
            "stages[0].mesh: found 'rows'; the axes are data, fsdp, expert, tensor, sequence",
        ),
        (
            {"context_length": 64, "rope": {"theta": 4}},
            "stages.rope: found {'theta': 4}, needs only fields of",
        ),
        (
            {"context_length": 64, "in_context": 2},
            "stages[0].in_context: found 2, needs to be left out without trajectories.path",
        ),
    ],
)
def test_incompatible_stages_are_refused(recipe, tmp_path, capsys, monkeypatch, stage, words):
    monkeypatch.setattr("trainer.loop.train", lambda *_: pytest.fail("trained"))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"stages": [stage]}))
    assert train.main(["--config", str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "day"), [("today", "2025-12-31"), ("2026-01-05", "2026-01-05")]
)
def test_today_is_the_first_processs_day_in_all(monkeypatch, written, day):
    """Another process may be in another time zone, or start after midnight."""
    answers = iter(["2025-12-31", "0"])  # the day, and the first stage to train
    monkeypatch.setattr(
        "trainer.stages.first_then_others", lambda work, encode: work(next(answers))
    )
    monkeypatch.setattr("trainer.stages.start_devices", lambda config: None)
    config = RunConfig(data=DataConfig(template_date=written))
    assert [stage.data.template_date for stage, _ in stages_to_train(config)] == [day]


def test_the_recipes_stages_are_compatible(repository):
    for recipe in sorted((repository / "configs/extension").glob("*.yaml")):
        config = load(["--config", str(recipe), "--model.path", "hf"])
        lengths = [stage.data.context_length for stage in stages_of(config)]
        assert len(lengths) >= 3 and lengths == sorted(lengths)


@pytest.mark.slow
def test_a_run_killed_in_each_stage_resumes_bitwise(recipe, repository, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    small_run.finish(small_run.start(repository, recipe, whole), whole)
    for folder, step in (("stages/1", 5), ("stages/2", 4), ("", 5)):
        process = small_run.start(repository, recipe, run)
        assert small_run.kill_when(
            process, run, lambda at=run / folder, step=step: small_run.steps_logged(at) >= step
        ), folder
    small_run.finish(small_run.start(repository, recipe, run), run)
    for folder, steps in (("stages/1", 9), ("stages/2", 8), ("", 7)):
        params = []
        for root in (run, whole):
            source = open_model(str(root / folder))
            assert source.folder.name == str(steps)
            params.append(source.read(LanguageModel(source.config, mesh_of({}), "local")))
        for name, array in params[1].items():
            assert np.asarray(array).tobytes() == np.asarray(params[0][name]).tobytes(), (
                folder,
                name,
            )
        rows = [
            [row["loss_nats_per_target"] for row in small_run.rows(root / folder / "metrics.jsonl")]
            for root in (run, whole)
        ]
        assert rows[0] == rows[1] and len(rows[0]) == steps
    assert open_model(str(run)).config.rope.theta == 50000.0
    for folder in ("stages/1", "stages/2", ""):  # a batch without exercises does not name them
        rows = small_run.rows(run / folder / "metrics.jsonl")
        assert any(
            np.isfinite(row["loss_by_source/lines"])
            for row in rows
            if "loss_by_source/lines" in row
        ), folder


@pytest.mark.parametrize(
    ("then", "now", "begun"),
    [
        (2, 3, "3, but the run in {run} was begun with 2;"),
        (3, 2, "2, but the run in {run} was begun with 3 or more;"),
        (0, 2, "2, but the run in {run} was begun with one or none;"),
        (3, 0, "none, but the run in {run} was begun with 2 or more;"),
    ],
)
def test_more_or_fewer_stages_are_named(recipe, tmp_path, then, now, begun):
    """The error once named fields that nobody had given, such as model.overrides.vocab_size; and
    with fewer stages, an unfinished run was begun again beside the one there."""
    run = tmp_path / "run"
    config = load(["--config", str(recipe), "--run_dir", str(run)])
    for stage in stages_of(dataclasses.replace(config, stages=config.stages[:then])):
        pretend_trained(stage)
    expected = f"stages: found {begun.format(run=run)} give as many, or another --run_dir; "
    with pytest.raises(UserError, match=expected + f"--model.path {run} --run_dir NEW goes on"):
        lengths_to_train(dataclasses.replace(config, stages=config.stages[:now]))


def test_the_last_stage_alone_and_a_run_of_another_runs_stage_go_on(config, tmp_path):
    """Both are runs without stages, whose model is in a folder of stages."""
    stages = stages_of(config)
    for stage in stages:
        pretend_trained(stage)
    branch = dataclasses.replace(stages[-1], run_dir=str(tmp_path / "branch"))
    pretend_trained(branch)
    moved = dataclasses.replace(branch, model=dataclasses.replace(branch.model, path="moved"))
    for again in (stages[-1], branch, moved):
        assert [stage for stage, _ in stages_to_train(again)] == [again]
