"""A run that starts from a pretrained model: what it reads from the model's files and when, and how
it recognizes them later."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import transformers
import yaml
from safetensors.numpy import load_file, save_file

import train
from data.prepared import INDEX
from model.language_model import LanguageModel
from scripts import export_hf
from tests import small_run
from trainer.checkpoint.commit import Files
from trainer.config.schema import MeshConfig
from trainer.finite import FiniteSteps
from trainer.huggingface.folder import weights_fingerprint
from trainer.mesh import make_mesh
from trainer.model_source import open_model
from trainer.step import StepBuilder
from trainer.text import TextObjective

STEPS = 3
LENGTH = 128
OWN_LENGTH = 64
THETA = 50_000.0


@pytest.fixture(scope="module")
def recipe(small_recipe, tmp_path_factory):
    """Three steps that compile fast, one row per device; no held-out data."""
    folder = tmp_path_factory.mktemp("pretrained")
    written = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    written["model"] = {"compute_dtype": "float32", "overrides": {"rope_theta": THETA}}
    written["data"] |= {
        "held_out_path": None,
        "held_out_fraction": 0.0,
        "context_length": LENGTH,
        "prepared": str(folder / "prepared"),
    }
    written |= {"mesh": {"data": 8, "simulate": 8}, "attention": {"kernel": "reference"}}
    written["optimizer"]["warmup_steps"] = 0
    written["train"] = {"steps": STEPS, "batch_size": 8}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(written), encoding="utf-8")
    return path


def command(recipe: pathlib.Path, model: pathlib.Path, *flags: str) -> list[str]:
    return small_run.command(recipe, recipe.parent / "run", "--model.path", model, *flags)


@pytest.fixture(scope="module")
def order():
    """The run's actions in order: batches fetched, metrics of a step read."""
    return []


@pytest.fixture(scope="module")
def run(recipe, hf_model, order):
    """The run's folder. The model's max_position_embeddings is half the run's length, and its files
    vanish as soon as training begins. The evaluation step must not be compiled, since nothing is
    held out."""
    model = pathlib.Path(shutil.copytree(hf_model, recipe.parent / "model"))
    written = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(
        json.dumps({**written, "max_position_embeddings": OWN_LENGTH}), encoding="utf-8"
    )
    batches, check = TextObjective.batches, FiniteSteps._is_finite

    def vanishing(objective, step):
        shutil.rmtree(model)
        for number, batch in enumerate(batches(objective, step), 1):
            order.append(f"batch {number}")
            yield batch

    def counted(steps, step, metrics):
        order.append(f"metrics {step + 1}")
        return check(steps, step, metrics)

    def compiled_for_nothing(builder):
        pytest.fail("there are no held-out data")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextObjective, "batches", vanishing)
        patch.setattr(StepBuilder, "lower_evaluate", compiled_for_nothing)
        patch.setattr(FiniteSteps, "_is_finite", counted)
        assert (
            train.main(
                command(recipe, model, "--checkpoint.every", "1", "--checkpoint.keep", str(STEPS))
            )
            == 0
        )
    return recipe.parent / "run"


def test_the_next_batch_is_fetched_while_a_step_runs(run, order):
    """It is fetched before the running step's metrics are awaited; none is fetched beyond the last
    step."""
    assert order == ["batch 1", "batch 2", "metrics 1", "batch 3", "metrics 2", "metrics 3"]


def test_saves_read_nothing_from_a_model_that_has_vanished_since_the_start(run, hf_model):
    saved = sorted((run / "checkpoints").iterdir())
    assert [path.name for path in saved] == [str(step + 1) for step in range(STEPS)]
    for checkpoint in saved:
        assert (
            json.loads((checkpoint / "assets" / "source_dtype.json").read_text(encoding="utf-8"))[
                "dtype"
            ]
            == "float32"
        )
        assert (checkpoint / "assets" / "tokenizer.json").read_bytes() == (
            hf_model / "tokenizer.json"
        ).read_bytes()


def test_export_and_evaluation_see_the_trained_length_and_the_new_base(run, tmp_path):
    assert export_hf.main([str(run), str(tmp_path / "hf")]) == 0
    exported = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    longest = longest_document(run)
    assert LENGTH > exported.max_position_embeddings == longest > OWN_LENGTH, (
        "no length beyond the longest document"
    )
    assert (
        exported.rope_parameters["rope_theta"] == THETA
        and open_model(str(run)).config.max_position_embeddings == longest
    )


def longest_document(run):
    """The number of tokens in the run's longest document, read from the prepared data."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    (index,) = pathlib.Path(config["data"]["prepared"]).glob("*/" + INDEX)
    return int(np.load(index)["length"].max())


@pytest.mark.parametrize("name", ["", f"checkpoints/{STEPS}"], ids=["a run", "a checkpoint"])
def test_a_model_trained_here_is_compared_once(run, name, monkeypatch):
    """It is compared with its manifest once, on the way from its name to its arrays."""
    compared, record = [], Files.record

    def counted(files, file, *expected):
        compared.append(files.folder / file)
        return record(files, file, *expected)

    monkeypatch.setattr(Files, "record", counted)
    source = open_model(str(run / name))
    params = source.read(LanguageModel(source.config, make_mesh(MeshConfig(data=8))))
    parts = [path for path in compared if "model" in path.relative_to(run).parts]
    assert (
        parts
        and len(parts) == len(set(parts))
        and all(np.isfinite(x).all() for x in params.values())
    )


def test_a_moved_model_and_moved_data_are_recognized(
    run, recipe, hf_model, small_recipe, tmp_path, capfd
):
    data = shutil.copyfile(small_recipe.parent / "conversations.json", tmp_path / "moved.json")
    assert (
        train.main(command(recipe, hf_model, "--data.path", str(data), "--checkpoint.every", "1"))
        == 0
    )
    assert f"already trained to step {STEPS}" in capfd.readouterr().err


def spoil_weights(folder: pathlib.Path) -> None:
    """Inverts every bit of one tensor of many."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    start, end = (
        8 + size + offset for offset in header["model.layers.1.mlp.up_proj.weight"]["data_offsets"]
    )
    content[start:end] = bytes(byte ^ 255 for byte in content[start:end])
    path.write_bytes(content)


def test_another_model_of_the_same_shape_is_refused(run, recipe, hf_model, tmp_path, capfd):
    other = pathlib.Path(shutil.copytree(hf_model, tmp_path / "other"))
    assert weights_fingerprint(other) == weights_fingerprint(hf_model)
    spoil_weights(other)
    capfd.readouterr()
    assert train.main(command(recipe, other)) == 2
    stderr = capfd.readouterr().err
    assert (
        stderr.count("\n") == 1
        and f"checkpoints/{STEPS}: began with another model" in stderr
        and "--run_dir" in stderr
    )


def test_another_config_for_the_same_weights_is_refused(run, recipe, hf_model, tmp_path, capfd):
    other = pathlib.Path(shutil.copytree(hf_model, tmp_path / "other"))
    written = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(
        json.dumps({**written, "rms_norm_eps": 0.125}), encoding="utf-8"
    )
    assert weights_fingerprint(other) == weights_fingerprint(hf_model)
    capfd.readouterr()
    assert train.main(command(recipe, other)) == 2
    stderr = capfd.readouterr().err
    assert (
        stderr.count("\n") == 1 and f"checkpoints/{STEPS}: began with another config.json" in stderr
    )
    assert "(rms_norm_eps 1e-06, now 0.125); give the files that the run began with" in stderr


def test_the_index_that_chooses_between_two_files_is_in_the_fingerprint(hf_model, tmp_path):
    """Both files hold the same tensors with different numbers."""
    folders = []
    for chosen in ("a", "b"):
        folder = pathlib.Path(shutil.copytree(hf_model, tmp_path / chosen))
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        for name, factor in (("a", 1), ("b", 2)):
            changed = {key: factor * value for key, value in tensors.items()}
            save_file(changed, folder / f"{name}.safetensors")
        norm = next(key for key in tensors if "norm" in key)
        files = dict.fromkeys(tensors, "a.safetensors") | {norm: f"{chosen}.safetensors"}
        index = json.dumps({"weight_map": files})
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
        folders.append(folder)
    first, second = map(weights_fingerprint, folders)
    assert first != second
