"""`train.py --dry-run`: its counts match the data and a run's checkpoints, and nothing is
trained."""

import dataclasses
import json
import os
import re
import shutil
from types import SimpleNamespace

import jax
import pytest
import yaml
from safetensors.numpy import load_file, save_file

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


def run_train(capsys, *argv) -> tuple[int, str]:
    status = train.main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_rows_epochs_and_padding_match_the_data(recipe, tmp_path, capsys):
    words = ["--config", recipe, "--run_dir", str(tmp_path / "run"), "--dry-run"]
    status, output = run_train(capsys, *words)
    documents, tokens = (
        int(count.replace(",", ""))
        for count in re.search(r"data: ([\d,]+) documents of ([\d,]+) tokens", output).groups()
    )
    rows, padding = re.search(
        r"rows: ([\d,]+) of 128 tokens in an epoch, ([\d.]+)% padding", output
    ).groups()
    assert status == 0 and documents > 100
    assert 1 - tokens / (int(rows) * 128) == pytest.approx(float(padding) / 100, abs=0.001)
    assert f"40 of 4 rows: 160 rows, {160 / int(rows):.2f} epochs, 20,480 tokens" in output
    assert "name the machine" in output and not (tmp_path / "run").exists()


def test_disk_usage_matches_the_run(recipe, whole_run, capsys):
    """Checkpoints after 7, 14, ... 35 and 40 steps; two are kept while a third is being written."""
    _, output = run_train(capsys, "--config", recipe, "--dry-run")
    count, size, most, total = re.search(
        r"disk: (\d+) checkpoints of ([\d.]+) MiB .* at most (\d+) at a time: ([\d.]+) MiB", output
    ).groups()
    assert (count, most) == ("6", "3") and float(total) == pytest.approx(3 * float(size), abs=0.2)
    # The best one by held-out loss is kept too.
    best = ("--checkpoint.best", "held_out_loss_nats_per_target", "--dry-run")
    assert "at most 4 at a time" in run_train(capsys, "--config", recipe, *best)[1]
    newest = max((whole_run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    files = [
        file
        for part in ("model", "optimizer")
        for file in (newest / part).rglob("*")
        if file.is_file()
    ]
    stored = sum(file.stat().st_size for file in files)
    assert stored / 2**20 == pytest.approx(float(size), rel=0.35), (
        "Orbax adds indices and compresses arrays"
    )


def test_a_named_machine_adds_step_time_and_whether_the_run_fits(recipe, capsys):
    command = ("--config", recipe, "--dry-run", "8xH100")
    status, output = run_train(capsys, *command, "--model.compute_dtype", "bfloat16")
    assert status == 0 and "fits, by the estimate" in output and "seconds of a step" in output
    status, output = run_train(capsys, *command)  # in float32
    assert status == 0 and "fits, by the estimate" in output and "time: not estimated; " in output
    status, output = run_train(capsys, "--config", recipe, "--dry-run", "8xH10")
    assert status == 2 and "did you mean H100?" in output
    status, output = run_train(capsys, "--config", recipe, "--dry-run=2x8xH100")
    assert status == 2 and "has 16 devices, the mesh has" in output


def test_a_generic_gpu_needs_its_memory_to_tell_whether_the_run_fits(recipe, capsys):
    """--gpu-memory works as in scripts.plan; without it, whether the run fits is unknown."""
    mesh = "--mesh.fsdp 1 --mesh.tensor 1 --mesh.sequence 1 --mesh.simulate 1"
    words = ["--config", recipe, *mesh.split(), "--dry-run", "gpu"]
    for flags, expected, *shown in (
        (["--gpu-memory", "24"], 0, "a program may use        22.80", "\nfits, by the estimate"),
        (["--gpu-memory=0.001"], 1, "does not fit, by the estimate"),
        ([], 0, "--gpu-memory GIB gives it"),
        (["--gpu-memory", "much"], 2, "--gpu-memory: found 'much'"),
    ):
        status, output = run_train(capsys, *words, *flags)
        assert status == expected and all(text in output for text in shown)


def test_the_advised_options_are_those_of_training(recipe, capsys):
    """With them the run fits."""
    options = {"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.sequence": 1, "mesh.simulate": 1}
    options |= {"memory.remat": "everything", "data.context_length": "64K"}
    options |= {"attention.kernel": "auto"}  # the recipe's holds scores of whole rows
    words = [f"--{name}={value}" for name, value in options.items()]
    words += ["--config", recipe, "--dry-run", "gpu", "--gpu-memory", "0.15"]
    status, output = run_train(capsys, *words)
    flags = re.search(r"rows of 16,384 tokens fit here, with .*?: (--.*)$", output, re.MULTILINE)[1]
    advised = "--data.context_length 16384 --train.accumulation 4 --memory.remat save_attention"
    assert status == 1 and flags == advised
    replaced = [word for word in words if word.partition("=")[0] not in advised.split()]
    status, output = run_train(capsys, *replaced, *flags.split())
    assert status == 0 and "\nfits, by the estimate" in output


def test_a_run_that_does_not_fit_exits_with_1(small_recipe, tmp_path, capsys):
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
    status, output = run_train(capsys, "--config", str(large), "--dry-run", "8xA100-40GB")
    assert status == 1 and "does not fit, by the estimate" in output
    auto = ["--config", str(large), "--mesh", "auto", "--memory", "auto", "--mesh.simulate", "0"]
    status, output = run_train(capsys, *auto, "--dry-run", "2xA100-40GB")
    assert status == 1 and "tokens do not fit on a100-40gb:2: at least" in output
    assert "error" not in output and "traceback" not in output.lower()


def test_every_stage_is_planned_by_itself(small_recipe, tmp_path, capsys):
    fields = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    fields["stages"] = [
        {"context_length": 64, "steps": 3, "batch_size": 8},
        {"context_length": 128, "steps": 2, "batch_size": 2},
    ]
    fields["auto"] = ["mesh", "memory"]
    del fields["mesh"]
    staged = tmp_path / "staged.yaml"
    staged.write_text(yaml.safe_dump(fields), encoding="utf-8")
    config = load(["--config", str(staged), "--run_dir", str(tmp_path / "run")])
    assert dry_run(config, "8xH100")
    answers = re.findall(r"planned for h100:8: mesh fsdp (\d+)", capsys.readouterr().out)
    assert [int(fsdp) > 2 for fsdp in answers] == [True, False]  # of two rows, two have work


def test_every_stage_is_reported(small_recipe, tmp_path, capsys):
    fields = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    fields["stages"] = [{"context_length": 64, "steps": 3}, {"context_length": 128, "steps": 2}]
    staged = tmp_path / "staged.yaml"
    staged.write_text(yaml.safe_dump(fields), encoding="utf-8")
    assert dry_run(load(["--config", str(staged), "--run_dir", str(tmp_path / "run")]))
    output = capsys.readouterr().out
    assert (
        "stage 1 of 2" in output
        and "steps: 3 of 4 rows: 12 rows" in output
        and "steps: 2 of 4 rows: 8 rows" in output
    )


def lines_starting(output: str, prefix: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(prefix)]


@pytest.fixture(scope="module")
def pretrained(small_recipe, hf_model, tmp_path_factory):
    """Returns the arguments of a command that trains the tiny LLaMA, and the folder of a PEFT
    adapter of rank 2 for it."""
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
    ("flags", "message"),
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
def test_dry_run_prints_the_error_that_training_would(pretrained, flags, message, capsys):
    command, adapter = pretrained
    flags = [adapter if flag == "ADAPTER" else flag for flag in flags]
    status, dry = run_train(capsys, *command, *flags, "--dry-run")
    (error,) = lines_starting(dry, "error: ")
    assert status == 2 and message in error
    status, trained = run_train(capsys, *command, *flags)
    assert status == 2 and lines_starting(trained, "error: ") == [error]


def cut_off(folder):
    os.truncate(folder / "model.safetensors", 2_000)


def misshapen(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].copy()
    save_file(tensors, folder / "model.safetensors")


def without_a_shard(folder):
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": tensors["lm_head.weight"]}
    save_file(head, folder / "model-00002-of-00002.safetensors")
    without_shards(folder)


def without_shards(folder):
    """Leaves only small files, as a download of those would."""
    names = load_file(folder / "model.safetensors")
    (folder / "training_args.bin").touch()  # of transformers' Trainer
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "model.safetensors").unlink()


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_off, "not a complete safetensors file"),
        (misshapen, "tensor lm_head.weight has shape"),
        (without_a_shard, "missing, but model.safetensors.index.json names it"),
        (pickled, "only pickled weights here"),
    ],
)
def test_weights_that_cannot_be_read_are_refused_as_in_training(
    pretrained, hf_model, tmp_path, capsys, spoil, message
):
    """On any machine; of good files only the headers are read."""
    folder = shutil.copytree(hf_model, tmp_path / "model")
    spoil(folder)
    words = [*pretrained[0], "--model.path", str(folder)]
    for machine in ([], ["8xH100"]):
        status, dry = run_train(capsys, *words, "--dry-run", *machine)
        (error,) = lines_starting(dry, "error: ")
        assert status == 2 and message in error and str(folder) in error
    assert run_train(capsys, *words) == (2, error + "\n")


def test_a_folder_without_weights_is_planned_for_a_named_machine_only(
    pretrained, hf_model, tmp_path, capsys
):
    """On which they may be; here, training would need them."""
    folder = shutil.copytree(hf_model, tmp_path / "model")
    without_shards(folder)
    words = [*pretrained[0], "--model.path", str(folder)]
    status, dry = run_train(capsys, *words, "--dry-run", "8xH100")
    assert status == 0
    assert lines_starting(dry, "weights: ") == [
        f"weights: none in {folder}; training needs them there"
    ]
    status, dry = run_train(capsys, *words, "--dry-run")
    (error,) = lines_starting(dry, "error: ")
    assert status == 2 and "missing, but model.safetensors.index.json names it" in error
    status, trained = run_train(capsys, *words)
    assert status == 2 and lines_starting(trained, "error: ") == [error]


def test_an_adapter_that_cannot_be_read_is_refused_as_in_training(pretrained, capsys):
    command, adapter = pretrained
    words = [*command, "--adapter.path", adapter, "--adapter.rank", "2"]
    words += ["--adapter.alpha", "4", "--adapter.targets", "[q_proj]"]
    status, dry = run_train(capsys, *words, "--dry-run")
    (error,) = lines_starting(dry, "error: ")
    assert status == 2 and "adapter_model.safetensors: not a complete safetensors file" in error
    assert run_train(capsys, *words) == (2, error + "\n")


def test_another_runs_folder_is_refused_as_in_training(whole_run, recipe, capsys):
    words = ["--config", recipe, "--run_dir", str(whole_run), "--optimizer.learning_rate", "0.5"]
    status, dry = run_train(capsys, *words, "--dry-run")
    assert status == 2 and "optimizer.learning_rate" in dry
    assert run_train(capsys, *words) == (2, dry.partition("\n")[0] + "\n")
    assert run_train(capsys, *words[:4], "--dry-run")[0] == 0


def test_small_data_gives_the_warnings_of_training(recipe, tmp_path, capsys):
    """Rows that are mostly padding, a batch larger than an epoch, hundreds of epochs: each warning
    has its own numbers."""
    command = ["--config", recipe, "--run_dir", str(tmp_path / "run")]
    command += ["--data.context_length", "64K", "--optimizer.warmup_steps", "0"]

    def warnings_for(*flags):
        status, output = run_train(capsys, *command, *flags, "--dry-run")
        assert status == 0
        config = load([*command, *flags])
        TextObjective(config, make_mesh(config.mesh, jax.devices()[: config.mesh.devices]))
        warnings = lines_starting(output, "warning: ")
        assert lines_starting(capsys.readouterr().err, "warning: ") == warnings
        tokens, rows = (
            int(re.search(pattern, output)[1].replace(",", ""))
            for pattern in (r"documents of ([\d,]+) tokens", r"rows: ([\d,]+) of")
        )
        assert rows == -(-tokens // 65536), "the numbers below follow from these"
        return warnings, tokens, rows

    (padding, larger), tokens, rows = warnings_for("--train.batch_size", "4", "--train.steps", "2")
    assert rows < 4 and f"warning: {1 - tokens / rows / 65536:.1%} of the tokens" in padding
    assert f"the batch has 4 rows, but an epoch has only {rows}, so each step repeats" in larger
    flags = "--train.batch_size", "1", "--mesh.fsdp", "1", "--mesh.simulate", "4"
    (_, epochs), _, rows = warnings_for(*flags, "--train.steps", str(256 * rows))
    assert (
        f"are 256 epochs of {rows} row" in epochs
        and f"3 epochs would be {3 * rows} steps" in epochs
    )
    assert len(warnings_for(*flags, "--train.epochs", "2")[0]) == 1


def test_a_warm_up_longer_than_the_run_is_a_warning(recipe, tmp_path, capsys):
    flags = ["--config", recipe, "--run_dir", str(tmp_path / "run"), "--train.steps", "2"]
    _, output = run_train(capsys, *flags, "--dry-run")
    (warning,) = lines_starting(output, "warning: ")
    assert warning.startswith(
        "warning: optimizer.warmup_steps: found 5, a warm-up of 5 steps, but the run has 2: the "
        "learning rate rises to only 40.0% of its peak; optimizer.warmup_steps 2 or less"
    )


def test_heads_padded_for_tensor_parallelism_are_reported(recipe, tmp_path, capsys):
    shape = '{"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}'
    words = ["--config", recipe, "--run_dir", str(tmp_path), "--model.overrides", shape]
    _, output = run_train(capsys, *words, "--dry-run")
    (line,) = lines_starting(output, "mesh.tensor")
    assert (
        "padded 3 -> 4" in line and "9 -> 12, exported as 3 and 9" in line and "1.33 times" in line
    )


def test_dry_run_and_inspector_warn_of_documents_beyond_the_trained_length(
    pretrained, hf_model, tmp_path, capsys
):
    """The model is trained for 128 tokens; training prints the same warning, and setting rope_theta
    silences it."""
    command, _ = pretrained
    words = [*command, "--data.context_length", "256"]
    status, dry = run_train(capsys, *words, "--dry-run")
    (warning,) = lines_starting(dry, "warning: ")
    assert status == 0 and re.search(
        r"documents up to 2\d\d tokens, trained for 128: set rope_s", warning
    )
    assert inspect_data.main([words[1], *words[2:]]) == 0
    assert lines_starting(capsys.readouterr().out, "warning: ") == [warning]
    _, dry = run_train(capsys, *words, "--model.overrides", '{"rope_theta": 5.0e4}', "--dry-run")
    assert not lines_starting(dry, "warning: ")


def test_too_few_episodes_are_refused_as_in_training(tmp_path):
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
        # By hand for steps of 200 to 400 s: 100 steps; 30 minutes plus a step; 10 minutes plus a step.
        (
            {"every": 100},
            [
                "a preemption loses at most 333 to 667 minutes of training (checkpoint.every 100), "
                "plus the restart",
                "with --checkpoint.minutes 30, it loses at most 33 to 37 minutes",
            ],
        ),
        (
            {"every": 100, "minutes": 10},
            [
                "a preemption loses at most 13 to 17 minutes of training (checkpoint.every 100, "
                "checkpoint.minutes 10), plus the restart"
            ],
        ),
        (
            {"every": 3, "minutes": 60},
            [
                "a preemption loses at most 10 to 20 minutes of training (checkpoint.every 3, "
                "checkpoint.minutes 60), plus the restart"
            ],
        ),
        (
            {"every": 3, "local": "/x", "local_every": 2},
            [
                "with local checkpoints, a preemption loses at most 7 to 13 minutes of training "
                "(checkpoint.local_every 2) if at most one host is lost; otherwise",
                "a preemption loses at most 10 to 20 minutes of training (checkpoint.every 3), "
                "plus the restart",
            ],
        ),
    ],
)
def test_the_cost_of_a_preemption_is_printed(flags, lines):
    job = SimpleNamespace(
        time_range=lambda: TimeRange(200.0, 400.0),
        run=SimpleNamespace(checkpoint=CheckpointConfig(**flags)),
    )
    assert list(_preemption_lines(job)) == lines


def test_the_cost_of_a_preemption_in_short_steps_is_in_seconds():
    """By hand: 100 steps of 0.06 to 0.14 s."""
    job = SimpleNamespace(
        time_range=lambda: TimeRange(0.06, 0.14),
        run=SimpleNamespace(checkpoint=CheckpointConfig(every=100)),
    )
    assert list(_preemption_lines(job)) == [
        "a preemption loses at most 6 to 14 seconds of training (checkpoint.every 100), plus the "
        "restart"
    ]


def test_host_storage_and_memory_of_local_checkpoints(monkeypatch):
    """By hand for 8 GiB in total: each of four hosts stores a quarter and a neighbour's quarter,
    for two steps; with two replicas twice that; a single host has no copy."""
    monkeypatch.setattr(
        "planning.parts.checkpoint_bytes", lambda run, model: (2 * 2**30, 6 * 2**30)
    )
    checkpoint = CheckpointConfig(local="/x", local_every=2)

    def lines(data, count):
        mesh = SimpleNamespace(data=data)
        job = SimpleNamespace(run=SimpleNamespace(mesh=mesh, checkpoint=checkpoint), model=None)
        return list(_local_lines(job, count))

    template = (
        "local checkpoints: {} GiB per host, {}, two steps: {} GiB in /x on each of {}, and {} GiB"
    )
    both, memory = "its part and another host's", " of memory during a save"
    assert lines(1, 4) == [template.format("2.0", both, "8.0", "4 hosts", "2.0") + memory]
    assert lines(2, 4) == [template.format("4.0", both, "16.0", "4 hosts", "4.0") + memory]
    alone = "its part, without a copy"
    assert lines(1, 1) == [template.format("8.0", alone, "16.0", "1 host", "8.0") + memory]
    checkpoint = CheckpointConfig()
    assert lines(1, 4) == []


def test_evaluations_are_validated_as_in_training(recipe, tmp_path, capsys):
    """Cases too long for --tokens are skipped by name; checkpoint.best may name a metric of an
    evaluation."""
    tests = '[{"test": "lines", "tokens": [16, 512], "count": 1}]'
    words = ["--config", recipe, "--run_dir", str(tmp_path), "--evaluations", tests]
    best = ["--checkpoint.best", "lines/lines/512", "--checkpoint.best_is", "highest"]
    status, output = run_train(capsys, *words, *best, "--dry-run")
    assert status == 0 and "warning: skipped: lines: its shortest case takes" in output, output
    assert "warning: checkpoint.best: lines/lines/512 is measured only before the first" in output
    status, output = run_train(capsys, *words, "--checkpoint.best", "lines/lines/16", "--dry-run")
    assert status == 2 and "held_out_loss_nats_per_target, held_out_target_tokens" in output
    assert "lines/lines/512" in output


PAIRS = [
    {"prompt": f"Say it {n} times, please:", "chosen": "It." * (n + 1), "rejected": "No!" * (n + 1)}
    for n in range(6)
]


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", "kto"])
def test_preference_pairs_are_counted(hf_model, tmp_path, capsys, loss):
    records = [
        *PAIRS,
        PAIRS[0] | {"rejected": PAIRS[0]["chosen"]},
        PAIRS[1] | {"prompt": "a " * 300},
    ]
    recipe = pairs_recipe(tmp_path, hf_model, records, loss)
    status, output = run_train(capsys, "--config", recipe, "--dry-run")
    assert status == 0, output
    kinds = "12 labelled completions, 6 desirable" if loss == "kto" else "6 pairs, of"
    assert f"pairs: {kinds}" in output
    assert "the chosen completion equals the rejected one" in output and "longer than" in output
    assert re.search(
        r"prompts: once for both completions, which saves [\d,]+ of [\d,]+ tokens", output
    )
    reference = "reference: none with preference.loss orpo" if loss == "orpo" else "no second model"
    assert reference in output


@pytest.mark.parametrize("spoil", [pickled, shutil.rmtree])
def test_a_reference_that_cannot_be_read_is_refused_as_in_training(
    hf_model, tmp_path, capsys, spoil
):
    reference = shutil.copytree(hf_model, tmp_path / "reference")
    spoil(reference)
    recipe = pairs_recipe(tmp_path, hf_model, PAIRS, "sigmoid")
    words = ["--config", recipe, "--mesh.sequence", "8", "--mesh.simulate", "8"]
    words += ["--preference.ref_model", str(reference)]
    status, dry = run_train(capsys, *words, "--dry-run")
    (error,) = lines_starting(dry, "error: ")
    assert status == 2 and f"preference.ref_model: {reference}: " in error
    status, trained = run_train(capsys, *words, "--run_dir", str(tmp_path / "run"))
    assert status == 2 and lines_starting(trained, "error: ") == [error]


def pairs_recipe(folder, model, records, loss):
    """Writes preference pairs, and a recipe that trains on them; returns the recipe's path."""
    (folder / "pairs.json").write_text(json.dumps(records), encoding="utf-8")
    recipe = {
        "config_version": 2,
        "name": "pairs",
        "model": {"path": str(model)},
        "data": {
            "sources": [{"path": str(folder / "pairs.json"), "format": "preference"}],
            "template": "plain",
            "context_length": 256,
            "prepared": str(folder / "prepared"),
            "held_out_fraction": 0.0,
        },
        "preference": {"loss": loss},
        "train": {"epochs": 1, "batch_size": 2},
    }
    (folder / "pairs.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(folder / "pairs.yaml")
