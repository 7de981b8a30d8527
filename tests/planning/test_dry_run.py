"""`train.py --dry-run`: what it counts is what the data and a run's checkpoints are, and nothing is
trained."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import pytest
import yaml

import train
from data.errors import UserError
from planning.costs.measured import TimeRange
from planning.dry_run import _local_lines, _preemption_lines, dry_run
from scripts import inspect_data
from tests.data.trajectories.made import folder_of
from tests.trainer.test_trajectories import run_config
from trainer.config.load import load
from trainer.config.schema import CheckpointConfig
from trainer.mesh import make_mesh
from trainer.text import TextObjective


@pytest.fixture(scope="module")
def recipe(small_recipe):
    return str(small_recipe)


def said_by(capsys, *argv) -> tuple[int, str]:
    status = train.main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_rows_epochs_and_padding_are_those_of_the_data(recipe, tmp_path, capsys):
    status, said = said_by(
        capsys, "--config", recipe, "--run_dir", str(tmp_path / "run"), "--dry-run"
    )
    documents, tokens = (
        int(count.replace(",", ""))
        for count in re.search(r"data: ([\d,]+) documents of ([\d,]+) tokens", said).groups()
    )
    rows, padding = re.search(
        r"rows: ([\d,]+) of 128 tokens in an epoch, ([\d.]+)% padding", said
    ).groups()
    assert status == 0 and documents > 100
    assert 1 - tokens / (int(rows) * 128) == pytest.approx(float(padding) / 100, abs=0.001)
    assert f"40 of 4 rows: 160 rows, {160 / int(rows):.2f} epochs, 20,480 tokens" in said
    assert "name the machine" in said and not (tmp_path / "run").exists()


def test_the_disk_is_that_of_the_run(recipe, whole_run, capsys):
    """Checkpoints after 7, 14, ... 35 and 40 steps, two of which are kept and a third is being
    written."""
    _, said = said_by(capsys, "--config", recipe, "--dry-run")
    count, size, most, total = re.search(
        r"disk: (\d+) checkpoints of ([\d.]+) MiB .* at most (\d+) at a time: ([\d.]+) MiB", said
    ).groups()
    assert (count, most) == ("6", "3") and float(total) == pytest.approx(3 * float(size), abs=0.2)
    # The best one, by the loss of the held-out data, also stays.
    best = said_by(
        capsys,
        "--config",
        recipe,
        "--checkpoint.best",
        "held_out_loss_nats_per_target",
        "--dry-run",
    )[1]
    assert "at most 4 at a time" in best
    newest = max((whole_run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    files = [
        file
        for part in ("model", "optimizer")
        for file in (newest / part).rglob("*")
        if file.is_file()
    ]
    stored = sum(file.stat().st_size for file in files)
    assert stored / 2**20 == pytest.approx(float(size), rel=0.35), (
        "Orbax adds indices and compresses"
    )


def test_a_machine_adds_time_and_says_what_fits(recipe, capsys):
    status, said = said_by(capsys, "--config", recipe, "--dry-run", "8xH100")
    assert status == 0 and "fits, by the estimate" in said and "seconds of a step" in said
    status, said = said_by(capsys, "--config", recipe, "--dry-run", "8xH10")
    assert status == 2 and "did you mean H100?" in said
    status, said = said_by(capsys, "--config", recipe, "--dry-run=2x8xH100")
    assert status == 2 and "has 16 devices, the mesh has" in said


def test_a_gpu_of_which_only_the_memory_is_known(recipe, capsys):
    """--gpu-memory, as scripts.plan takes it; without it, whether the run fits is not known."""
    mesh = [
        "--mesh.fsdp",
        "1",
        "--mesh.tensor",
        "1",
        "--mesh.sequence",
        "1",
        "--mesh.simulate",
        "1",
    ]
    status, said = said_by(
        capsys, "--config", recipe, *mesh, "--dry-run", "gpu", "--gpu-memory", "24"
    )
    assert (
        status == 0 and "fits, by the estimate" in said and "a program may use        22.80" in said
    )
    status, said = said_by(
        capsys, "--config", recipe, *mesh, "--dry-run", "gpu", "--gpu-memory=0.001"
    )
    assert status == 1 and "does not fit, by the estimate" in said
    status, said = said_by(capsys, "--config", recipe, *mesh, "--dry-run", "gpu")
    assert status == 0 and "--gpu-memory GIB gives it" in said
    status, said = said_by(
        capsys, "--config", recipe, *mesh, "--dry-run", "gpu", "--gpu-memory", "much"
    )
    assert status == 2 and "--gpu-memory: found 'much'" in said


def test_what_does_not_fit_ends_with_1(small_recipe, tmp_path, capsys):
    fields = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    fields["model"]["overrides"] |= {
        "hidden_size": 16384,
        "intermediate_size": 65536,
        "num_hidden_layers": 80,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    }
    large = tmp_path / "large.yaml"
    large.write_text(yaml.safe_dump(fields), encoding="utf-8")
    status, said = said_by(capsys, "--config", str(large), "--dry-run", "8xA100-40GB")
    assert status == 1 and "does not fit, by the estimate" in said


def test_every_stage_is_counted(small_recipe, tmp_path, capsys):
    fields = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    fields["stages"] = [{"context_length": 64, "steps": 3}, {"context_length": 128, "steps": 2}]
    staged = tmp_path / "staged.yaml"
    staged.write_text(yaml.safe_dump(fields), encoding="utf-8")
    assert dry_run(load(["--config", str(staged), "--run_dir", str(tmp_path / "run")]))
    said = capsys.readouterr().out
    assert (
        "stage 1 of 2" in said
        and "steps: 3 of 4 rows: 12 rows" in said
        and "steps: 2 of 4 rows: 8 rows" in said
    )


def lines_of(said: str, beginning: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(beginning)]


@pytest.fixture(scope="module")
def pretrained(small_recipe, hf_model, tmp_path_factory):
    """Returns the words of a command that trains the very small LLaMA, and a PEFT adapter's folder of rank 2 for it."""
    folder = tmp_path_factory.mktemp("pretrained")
    written = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    written["model"] = {"path": str(hf_model), "compute_dtype": "float32"}
    recipe, adapter = folder / "recipe.yaml", folder / "adapter"
    recipe.write_text(yaml.safe_dump(written), encoding="utf-8")
    adapter.mkdir()
    fields = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(hf_model),
        "task_type": "CAUSAL_LM",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    return ["--config", str(recipe), "--run_dir", str(folder / "run")], str(adapter)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--adapter.path", "ADAPTER", "--adapter.rank", "4"],
            "adapter.rank: found 4; the adapter",
        ),
        (["--adapter.rank", "64"], "adapter.rank: found 64, needs at most 32"),
        (["--adapter.rank", "2", "--adapter.train", "[nothing]"], "adapter.train: found 'nothing'"),
        (["--memory.attention_groups", "3"], "memory.attention_groups: 3 does not divide the 1"),
        (
            ["--attention.global_tokens", "4"],
            "attention.global_tokens is 4; the model has no window",
        ),
        (["--attention.schedule", "{name: attention2d, columns: 3}"], "attention2d.columns: 3"),
        (["--model.trainable", "nothing"], "model.trainable"),
        (["--logging.wandb", "project"], "logging.wandb"),
        (["--data.sources", '[{"path": "/nowhere.json"}]'], "/nowhere.json"),
    ],
    ids=lambda flags: " ".join(flags) if isinstance(flags, list) else "",
)
def test_what_training_refuses_is_refused_with_its_words(pretrained, flags, said, capsys):
    command, adapter = pretrained
    flags = [adapter if flag == "ADAPTER" else flag for flag in flags]
    status, dry = said_by(capsys, *command, *flags, "--dry-run")
    (error,) = lines_of(dry, "error: ")
    assert status == 2 and said in error
    status, trained = said_by(capsys, *command, *flags)
    assert status == 2 and lines_of(trained, "error: ") == [error]


def test_a_folder_of_another_run_is_refused_with_trainings_words(whole_run, recipe, capsys):
    words = ["--config", recipe, "--run_dir", str(whole_run), "--optimizer.learning_rate", "0.5"]
    status, dry = said_by(capsys, *words, "--dry-run")
    assert status == 2 and "optimizer.learning_rate" in dry
    assert said_by(capsys, *words) == (2, dry.partition("\n")[0] + "\n")
    assert said_by(capsys, *words[:4], "--dry-run")[0] == 0


def test_few_data_are_warned_of_with_trainings_words(recipe, tmp_path, capsys):
    """Rows that are mostly padding, a batch larger than an epoch, hundreds of epochs: each by its own numbers."""
    command = [
        "--config",
        recipe,
        "--run_dir",
        str(tmp_path / "run"),
        "--data.context_length",
        "64K",
    ]

    def warned(*flags):
        status, said = said_by(capsys, *command, *flags, "--dry-run")
        assert status == 0
        config = load([*command, *flags])
        TextObjective(config, make_mesh(config.mesh, jax.devices()[: config.mesh.devices]))
        warnings = lines_of(said, "warning: ")
        assert lines_of(capsys.readouterr().err, "warning: ") == warnings
        tokens, rows = (
            int(re.search(pattern, said)[1].replace(",", ""))
            for pattern in (r"documents of ([\d,]+) tokens", r"rows: ([\d,]+) of")
        )
        assert rows == -(-tokens // 65536), "what the numbers below are made of"
        return warnings, tokens, rows

    (padding, larger), tokens, rows = warned("--train.batch_size", "4", "--train.steps", "2")
    assert rows < 4 and f"warning: {1 - tokens / rows / 65536:.1%} of the tokens" in padding
    assert f"4 rows per step, but an epoch has {rows}" in larger and "same rows" in larger
    flags = "--train.batch_size", "1", "--mesh.fsdp", "1", "--mesh.simulate", "4"
    (_, epochs), _, rows = warned(*flags, "--train.steps", str(256 * rows))
    assert (
        f"are 256 epochs of {rows} row" in epochs
        and f"3 epochs would be {3 * rows} steps" in epochs
    )
    assert len(warned(*flags, "--train.epochs", "2")[0]) == 1


def test_heads_that_tensor_pads_are_said(recipe, tmp_path, capsys):
    shape = '{"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}'
    _, said = said_by(
        capsys,
        "--config",
        recipe,
        "--run_dir",
        str(tmp_path),
        "--model.overrides",
        shape,
        "--dry-run",
    )
    (line,) = lines_of(said, "mesh.tensor")
    assert (
        "padded 3 -> 4" in line and "9 -> 12, exported as 3 and 9" in line and "1.33 times" in line
    )


def test_documents_beyond_the_trained_length_are_said_in_dry_run_and_inspector(
    pretrained, hf_model, tmp_path, capsys
):
    """The model is trained for 128 tokens; the warning is training's, and rope_theta ends it."""
    command, _ = pretrained
    words = [*command, "--data.context_length", "256"]
    status, dry = said_by(capsys, *words, "--dry-run")
    (warning,) = lines_of(dry, "warning: ")
    assert status == 0 and re.search(
        r"documents up to 2\d\d tokens, trained for 128: set rope_s", warning
    )
    assert inspect_data.main([words[1], *words[2:]]) == 0
    assert lines_of(capsys.readouterr().out, "warning: ") == [warning]
    _, dry = said_by(capsys, *words, "--model.overrides", '{"rope_theta": 5.0e4}', "--dry-run")
    assert not lines_of(dry, "warning: ")


def test_episodes_that_training_refuses_are_refused(tmp_path):
    config = run_config(folder_of(tmp_path / "episodes", count=12), tmp_path)
    assert dry_run(config)
    few = dataclasses.replace(config.trajectories, in_context=13)
    with pytest.raises(
        UserError, match=r"trajectories.in_context: found 13, but .* has 12 episodes"
    ):
        dry_run(dataclasses.replace(config, trajectories=few))


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        # Steps of 200 to 400 s, by hand: 100 of them; 30 minutes and one step; 10 minutes and one.
        (
            {"every": 100},
            [
                "preemption: costs at most 333 to 667 minutes of steps (checkpoint.every 100), "
                "and the start",
                "preemption: with --checkpoint.minutes 30 33 to 37 minutes",
            ],
        ),
        (
            {"every": 100, "minutes": 10},
            [
                "preemption: costs at most 13 to 17 minutes of steps (checkpoint.every 100, "
                "checkpoint.minutes 10), and the start"
            ],
        ),
        (
            {"every": 3, "minutes": 60},
            [
                "preemption: costs at most 10 to 20 minutes of steps (checkpoint.every 3, "
                "checkpoint.minutes 60), and the start"
            ],
        ),
        (
            {"every": 3, "local": "/x", "local_every": 2},
            [
                "preemption: with local checkpoints at most 6.7 to 13.3 minutes of steps "
                "(checkpoint.local_every 2) if at most one host is lost; otherwise",
                "preemption: costs at most 10 to 20 minutes of steps (checkpoint.every 3), and "
                "the start",
            ],
        ),
    ],
)
def test_what_a_preemption_costs(flags, lines):
    job = SimpleNamespace(
        time_range=lambda: TimeRange(200.0, 400.0),
        run=SimpleNamespace(checkpoint=CheckpointConfig(**flags)),
    )
    assert list(_preemption_lines(job)) == lines


def test_what_local_checkpoints_take_of_a_host(monkeypatch):
    """Of 8 GiB in all, by hand: a quarter on each of four hosts, with a neighbour's, of two steps;
    with two replicas twice that; alone no copy."""
    monkeypatch.setattr(
        "planning.parts.checkpoint_bytes", lambda run, model: (2 * 2**30, 6 * 2**30)
    )
    checkpoint = CheckpointConfig(local="/x", local_every=2)

    def lines(data, count):
        mesh = SimpleNamespace(data=data)
        job = SimpleNamespace(run=SimpleNamespace(mesh=mesh, checkpoint=checkpoint), model=None)
        return list(_local_lines(job, count))

    said = (
        "local checkpoints: {} GiB per host, {}, two steps: {} GiB in /x on each of {}, and {} GiB"
    )
    both, memory = "its part and another host's", " of memory during a save"
    assert lines(1, 4) == [said.format("2.0", both, "8.0", "4 hosts", "2.0") + memory]
    assert lines(2, 4) == [said.format("4.0", both, "16.0", "4 hosts", "4.0") + memory]
    alone = "its part, without a copy"
    assert lines(1, 1) == [said.format("8.0", alone, "16.0", "1 host", "8.0") + memory]
    checkpoint = CheckpointConfig()
    assert lines(1, 4) == []


def test_evaluations_are_prepared_as_in_training(recipe, tmp_path, capsys):
    """What is too long for --tokens is skipped by name; what they measure may be the best's metric."""
    tests = '[{"test": "lines", "tokens": [16, 512], "count": 1}]'
    words = ["--config", recipe, "--run_dir", str(tmp_path), "--evaluations", tests]
    best = ["--checkpoint.best", "lines/lines/512", "--checkpoint.best_is", "highest"]
    status, said = said_by(capsys, *words, *best, "--dry-run")
    assert status == 0 and "warning: skipped: lines: its shortest case takes" in said, said
    status, said = said_by(capsys, *words, "--checkpoint.best", "lines/lines/16", "--dry-run")
    assert status == 2 and "held_out_loss_nats_per_target, held_out_target_tokens" in said
    assert "lines/lines/512" in said


PAIRS = [
    {"prompt": f"Say it {n} times, please:", "chosen": "It." * (n + 1), "rejected": "No!" * (n + 1)}
    for n in range(6)
]


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", "kto"])
def test_pairs_are_counted(hf_model, tmp_path, capsys, loss):
    records = [
        *PAIRS,
        PAIRS[0] | {"rejected": PAIRS[0]["chosen"]},
        PAIRS[1] | {"prompt": "a " * 300},
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(records), encoding="utf-8")
    recipe = {
        "config_version": 2,
        "name": "pairs",
        "model": {"path": str(hf_model)},
        "data": {
            "sources": [{"path": str(tmp_path / "pairs.json"), "format": "preference"}],
            "template": "plain",
            "context_length": 256,
            "prepared": str(tmp_path / "prepared"),
            "held_out_fraction": 0.0,
        },
        "preference": {"loss": loss},
        "train": {"epochs": 1, "batch_size": 2},
    }
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    status, said = said_by(capsys, "--config", str(tmp_path / "pairs.yaml"), "--dry-run")
    assert status == 0, said
    kinds = "12 labelled completions, 6 desirable" if loss == "kto" else "6 pairs, of"
    assert f"pairs: {kinds}" in said
    assert "the chosen completion equals the rejected one" in said and "longer than" in said
    assert re.search(
        r"prompts: once for both completions, which saves [\d,]+ of [\d,]+ tokens", said
    )
    reference = "reference: none with preference.loss orpo" if loss == "orpo" else "no second model"
    assert reference in said
