"""Bad input as a user sees it: exit code 2 and one line on standard error that names the culprit;
no traceback."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from safetensors.numpy import load_file, save_file

import train
from scripts import export_hf, import_hf
from tests import small_run


@pytest.fixture
def refused(small_recipe, tmp_path, capfd):
    """Returns a function from flags to the one line that train.py prints when it refuses the
    recipe."""

    def call(
        *flags: str, recipe: pathlib.Path = small_recipe, run: pathlib.Path | None = None
    ) -> str:
        capfd.readouterr()
        assert train.main(small_run.command(recipe, run or tmp_path / "run", *flags)) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        return lines[0]

    return call


@pytest.fixture
def model_copy(hf_model, tmp_path):
    """A copy of the small model's folder to damage."""
    return pathlib.Path(shutil.copytree(hf_model, tmp_path / "hf"))


@pytest.fixture
def run_copy(whole_run, tmp_path):
    """A copy of a finished run to damage."""
    return pathlib.Path(shutil.copytree(whole_run, tmp_path / "whole"))


def test_a_non_finite_loss_names_step_and_records(refused, small_recipe, tmp_path, capfd):
    """A learning rate of 1e38 ruins the parameters at step 1; step 2 reports it, and nothing of it
    is saved or logged. The command that the message proposes continues in the same folder, but the
    loss of every later step is not finite either."""
    flags = (
        *("--optimizer.learning_rate", "1e38", "--logging.console", "false"),
        *small_run.DATA_PARALLEL,
    )
    message = refused(*flags)
    assert "step 2: loss_nats_per_target is nan" in message and "--train.non_finite skip" in message
    records = message.split("its records are ")[1].split(";")[0].split(", ")
    known = {
        record["id"]
        for record in json.loads((small_recipe.parent / "conversations.json").read_text())
    }
    assert records and set(records) <= known
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert len(metrics.read_text().splitlines()) == 1
    skipping = (*flags, "--train.non_finite", "skip")
    assert train.main(small_run.command(small_recipe, tmp_path / "run", *skipping)) == 2
    *_, last = lines = capfd.readouterr().err.splitlines()
    assert "held_out_loss_nats_per_target is nan, so nothing is saved" in last
    warnings = [line for line in lines if line.startswith("warning: step ")]
    assert (
        len(warnings) == len(metrics.read_text().splitlines()) - 1
        and "step 2: loss_nats_per_target is nan" in warnings[0]
    )
    assert all("skipped" in line for line in warnings)


def write(path: pathlib.Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# Data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no such file"]),
        ("", ["the file is empty"]),
        ("[]", ["holds no records"]),
        ("hello", ["not JSON"]),
        (
            '[{"conversations": []}, {"text": "a"}]',
            ["none of its 2 records is a usable conversation", "1 x empty record"],
        ),
        ('[{"conversations": [{"from": "human"', ["its only record is not a usable", "cut off"]),
    ],
)
def test_no_usable_data(refused, tmp_path, content, words):
    path = tmp_path / "conversations-of-mine.json"
    if content is not None:
        write(path, content)
    message = refused("--data.path", str(path))
    assert all(word in message for word in [str(path), *words]), message
    assert not (tmp_path / "run").exists(), "a run that could not begin leaves its folder usable"


def test_the_intact_records_of_truncated_json_are_used(tmp_path, small_recipe, model_copy, capfd):
    """The intact records are used and the rest is reported, where the user sees it, before anything
    else is done."""
    whole = (small_recipe.parent / "conversations.json").read_text(encoding="utf-8")
    path = write(tmp_path / "cut.json", whole[: len(whole) // 2])
    (model_copy / "model.safetensors").unlink()  # ends the call before it compiles
    flags = ("--data.path", path, "--model.path", model_copy)
    capfd.readouterr()
    assert train.main(small_run.command(small_recipe, tmp_path / "run", *flags)) == 2
    report, stderr = capfd.readouterr()
    assert "safetensors" in stderr
    used = next(line for line in report.splitlines() if line.startswith(path))
    records, kept = (int(word) for word in used.removeprefix(f"{path}: ").split() if word.isdigit())
    assert 10 < kept < records
    assert "cut off or malformed JSON" in report
    assert report.splitlines()[-1].startswith(
        f"warning: {path}: the file is cut off in record {records} "
    ), "printed last, so that it is seen"


@pytest.mark.slow
def test_a_run_does_not_resume_on_other_data(refused, small_recipe, run_copy, tmp_path):
    records = json.loads((small_recipe.parent / "conversations.json").read_text(encoding="utf-8"))
    message = refused(
        "--data.path",
        write(tmp_path / "conversations.json", json.dumps(records[:50])),
        run=run_copy,
    )
    assert "was trained on other data" in message and str(run_copy) in message


# Configuration


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--mesh.simulate", "0", "--mesh.tensor", "1"],
            ["fsdp 2 x tensor 1 x sequence 2 is 4 devices", "found 8"],
        ),
        (["--train.steps", "many"], ["train.steps", "many"]),
        (["--model.overrides", "{hiden_size: 32}"], ["hiden_size", "hidden_size"]),
    ],
)
def test_wrong_flag(refused, flags, words):
    """tests/trainer/config/test_load.py has more of those that are found before anything is
    opened."""
    message = refused(*flags)
    assert all(word in message for word in words), message


# Run directories and checkpoints


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--memory.remat", "every_k", "--memory.every_k", "3"],
            ["memory.every_k: 3 does not divide 2 layers; 1, 2 do"],
        ),
        (
            ["--memory.query_chunks", "2"],
            ["memory.remat: found 'save_attention'", "valid: nothing, offload"],
        ),
        (["--attention.schedule", "{name: ulysses, degree: 3}"], ["degree", "3"]),
    ],
)
def test_a_step_that_cannot_be_built_leaves_the_folder_usable(refused, tmp_path, flags, words):
    message = refused(*flags)
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()


def test_prepared_data_in_the_run_directory_are_accepted(refused, model_copy, tmp_path):
    """After a start that failed once the data were prepared, the next start accepts the folder."""
    (model_copy / "model.safetensors").unlink()
    for _ in range(2):
        flags = ["--model.path", model_copy, "--data.prepared", tmp_path / "run" / "prepared"]
        assert "no weights here" in refused(*flags) and os.listdir(tmp_path / "run") == ["prepared"]


def test_a_run_whose_checkpoints_are_all_damaged(refused, run_copy):
    name = small_run.spoil(run_copy / "checkpoints/40")
    small_run.spoil(run_copy / "checkpoints/35")
    message = refused(run=run_copy)
    assert (
        "every checkpoint is damaged" in message
        and "checkpoints/40: model/" in message
        and name in message
    )


def test_a_damaged_checkpoint_as_model(refused, run_copy, tmp_path, capfd):
    name = small_run.spoil(run_copy / "checkpoints/40")
    model = ["--model.path", str(run_copy / "checkpoints/40")]
    output = refused(*model)
    assert "is damaged" in output and name in output
    capfd.readouterr()
    assert export_hf.main([str(run_copy / "checkpoints/40"), str(tmp_path / "out")]) == 2
    output = capfd.readouterr().err.splitlines()
    assert len(output) == 1 and "is damaged" in output[0] and name in output[0]
    assert not (tmp_path / "out").exists()


def test_a_foreign_folder_as_checkpoint(refused, run_copy, tmp_path, capfd):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert (
        f"{foreign}: no manifest.json (a checkpoint), no checkpoints/ (a run), no config.json"
        in refused("--model.path", str(foreign))
    )
    (foreign / "checkpoint-5").mkdir()  # as transformers' Trainer writes
    write(foreign / "checkpoint-5/adapter_config.json", "{}")
    inside = f"; {foreign / 'checkpoint-5'} has one and may work"
    assert inside in refused("--model.path", str(foreign))
    assert inside in refused("--adapter.rank", "4", "--adapter.path", str(foreign))
    write(foreign / "manifest.json", '{"icons": []}')
    assert f"{foreign}: not a checkpoint of this project" in refused("--model.path", str(foreign))
    for step in ("35", "40"):
        shutil.rmtree(run_copy / "checkpoints" / step)
    shutil.copytree(foreign, run_copy / "checkpoints" / "40")
    assert "checkpoints/40: not a checkpoint of this project" in refused(run=run_copy)
    assert export_hf.main([str(foreign), str(tmp_path / "out")]) == 2
    assert "not a checkpoint of this project" in capfd.readouterr().err


# Models


UP = "model.layers.1.mlp.up_proj.weight"


def without_a_tensor(folder: pathlib.Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[UP]
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: pathlib.Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8"
    )


def pickled(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_a_tensor, [f"tensor {UP} is missing", "[64, 32]"]),
        (pickled, ["only pickled weights", "pytorch_model.bin", "refused"]),
        (
            lambda folder: change_config(
                folder, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"]
            ),
            ["DeepseekV3ForCausalLM", "only the mixtures of experts", "LlamaForCausalLM"],
        ),
        (
            lambda folder: change_config(folder, model_type="gpt2", architectures=None),
            ["'gpt2'", "needs one of llama"],
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer"]),
        (
            lambda folder: change_config(folder, vocab_size=1000),
            ["model.tokenizer", "1000 rows of vocabulary"],
        ),
    ],
    ids=("missing tensor", "pickled", "architecture", "model type", "no tokenizer", "vocab"),
)
def test_model_that_cannot_be_used(refused, model_copy, tmp_path, spoil, words, capfd):
    spoil(model_copy)
    output = refused("--model.path", str(model_copy))
    assert all(word in output for word in words), output
    assert not (tmp_path / "run").exists()
    if words[0] in ("tokenizer", "model.tokenizer"):  # tensors that an import does not read
        return
    assert str(model_copy) in output
    assert import_hf.main([str(model_copy), str(tmp_path / "imported")]) == 2
    output = capfd.readouterr().err.splitlines()
    assert len(output) == 1 and all(word in output[0] for word in words)
    assert not (tmp_path / "imported").exists()


def test_a_folder_that_orbax_would_read_as_a_glob_pattern(refused, model_copy, tmp_path, capfd):
    run = tmp_path / "lr[0.1]" / "run"
    output = refused(run=run)
    assert (
        f"run_dir: {run} has [ in it" in output
        and "would work" in output
        and not run.parent.exists()
    )
    target = tmp_path / "a*b"
    assert import_hf.main([str(model_copy), str(target)]) == 2
    output = capfd.readouterr().err.splitlines()
    assert (
        len(output) == 1
        and output[0].startswith(f"error: CHECKPOINT: {target} has * in it")
        and not target.exists()
    )


def test_a_missing_model(refused, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "hf download nobody/nothing" in refused("--model.path", "nobody/nothing")
    assert "no such folder" in refused("--model.path", "./nowhere")


# Sends Ctrl-C to the process while this module is imported, in a garbage collector callback, or
# while the checkpoint is written.
INTERRUPTED = """
import gc, os, signal, sys, time
import trainer.entry
from scripts import import_hf

class Finder:
    def find_spec(self, name, *_):
        if name == "orbax.checkpoint":
            sys.meta_path.remove(self)
            at_{moment}()

def at_import(*_):
    os.kill(os.getpid(), signal.SIGINT)

def collecting(*_):
    gc.callbacks.remove(collecting)
    at_import()

def at_callback():
    gc.callbacks.append(collecting)
    gc.collect()

def at_writing():
    import trainer.checkpoint.saving
    trainer.checkpoint.saving.publish = lambda *_: (at_import(), time.sleep(100))

sys.meta_path.insert(0, Finder())
trainer.entry.leave(import_hf.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("moment", ["import", "callback", "writing"])
def test_ctrl_c_ends_an_import_in_one_line_and_the_next_import_is_complete(
    hf_model, tmp_path, repository, moment
):
    target = tmp_path / "imported"
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.replace("{moment}", moment), str(hf_model), str(target)],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (
        130,
        "stopped\n",
        "",
    ) and not target.exists()
    if moment == "writing":
        assert (tmp_path / "imported.tmp").is_dir()
        assert import_hf.main([str(hf_model), str(target)]) == 0
        assert (target / "manifest.json").exists() and not (tmp_path / "imported.tmp").exists()
