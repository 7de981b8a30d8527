"""A run that trains adapters on a pretrained base: its checkpoints, how it resumes, what is
exported and what is refused."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import train
from model.config import TransformerConfig
from scripts import export_hf
from tests import small_run
from tests.model.build import llama, one_document
from trainer.checkpoint.readers import restore_model, stored_arrays, stored_average
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.load import load
from trainer.config.schema import MeshConfig, ModelConfig
from trainer.huggingface import adapter_config
from trainer.inference import open_for_inference
from trainer.mesh import make_mesh
from trainer.model_source import choose_model, for_templates, open_adapter, open_model
from trainer.stages import stages_of
from trainer.text import TextObjective

STEPS = 4
DECAY = 0.3  # of the weights' moving average
ADAPTER = {
    "rank": 2,
    "alpha": 4.0,
    "targets": ["q_proj", "down_proj"],
    "train": ["norm"],
    "dropout": 0.25,
}


@pytest.fixture(scope="module")
def command(small_recipe, hf_model, tmp_path_factory):
    """Returns the command line of a short run on the model."""
    return small_run.adapter_run(
        small_recipe,
        tmp_path_factory.mktemp("adapters"),
        hf_model,
        adapter=ADAPTER,
        train={"steps": STEPS},
        optimizer={"average_decay": DECAY},
        checkpoint={"every": 1, "keep": STEPS},
    )


@pytest.fixture(scope="module")
def run(command):
    """The folder of a run that was stopped after two steps, as if killed, and resumed."""
    arguments = command("run")
    assert train.main(arguments) == 0
    folder = pathlib.Path(arguments[3])
    uninterrupted = average(folder / "checkpoints" / str(STEPS))
    for step in range(3, STEPS + 1):
        shutil.rmtree(folder / "checkpoints" / str(step))
    before = small_run.losses(folder)
    assert train.main(arguments) == 0
    assert small_run.losses(folder) == before and before[-1] < before[0] - 0.05
    for name, x in average(folder / "checkpoints" / str(STEPS)).items():
        assert x.tobytes() == uninterrupted[name].tobytes(), name
    return folder


def average(checkpoint):
    """The moving average of the weights in a checkpoint, by name, on the host."""
    return {name: np.asarray(x) for name, x in stored_average(checkpoint).items()}


def parameters(source, adapter=True):
    config = (
        dataclasses.replace(source.config, adapter=source.adapter.config)
        if adapter
        else source.config
    )
    return source.read(llama(config))


def test_checkpoints_hold_only_adapters_and_their_moments(run):
    """By name, for the model and the optimizer; PEFT's configuration file is among the assets."""
    checkpoint = run / "checkpoints" / str(STEPS)
    names = set(stored_arrays(checkpoint, "model"))
    parts = {
        f"layers.{module}.lora_{part}"
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for part in "AB"
    }
    norms = {
        "norm.weight",
        "layers.input_layernorm.weight",
        "layers.post_attention_layernorm.weight",
    }
    assert names == parts | norms
    moments = {name for name in stored_arrays(checkpoint, "optimizer") if ".mu." in name}
    assert {name.partition(".mu.")[2] for name in moments} == names
    adapter, _ = adapter_config.read_config(checkpoint / "assets")
    assert (adapter.rank, adapter.projections, adapter.train) == (
        2,
        ("q_proj", "down_proj"),
        ("norm",),
    )
    assert adapter.dropout == 0.25


def test_the_average_matches_the_saved_parameters_and_is_exported(run, tmp_path):
    """Recomputed in float64 from the parameters of each step's checkpoint, across a restart in the
    middle of the run."""
    saved = [restore_model(run / "checkpoints" / str(step)) for step in range(1, STEPS + 1)]
    expected = {
        name: np.asarray(x, np.float64) for name, x in average(run / "checkpoints" / "1").items()
    }
    for step, params in enumerate(saved[1:], start=2):
        decay = min(DECAY, (1 + step) / (10 + step))
        expected = {
            name: decay * x + (1 - decay) * np.asarray(params[name], np.float64)
            for name, x in expected.items()
        }
    averaged = average(run / "checkpoints" / str(STEPS))
    assert averaged.keys() == expected.keys() == saved[-1].keys()
    for name, x in expected.items():
        np.testing.assert_allclose(averaged[name], x, rtol=1e-6, atol=1e-8, err_msg=name)
        assert np.abs(averaged[name] - np.asarray(saved[-1][name])).max() > 1e-4, name
    assert export_hf.main([str(run), str(tmp_path / "averaged"), "--average"]) == 0
    tensors = load_file(tmp_path / "averaged" / "adapter_model.safetensors")
    (norm,) = [x for name, x in tensors.items() if name.endswith("model.norm.weight")]
    np.testing.assert_array_equal(norm, averaged["norm.weight"])


def test_the_run_its_export_and_the_merged_model_agree(run, hf_model, tmp_path):
    """The checkpoint and PEFT's format hold the same parameters; the merged model's logits are
    within 1e-5."""
    assert export_hf.main([str(run), str(tmp_path / "peft")]) == 0
    # an export must not reveal a folder of this machine
    for file in (tmp_path / "peft").glob("*.*s*n"):
        assert str(hf_model).encode() not in file.read_bytes(), file.name
    assert export_hf.main([str(run), str(tmp_path / "named"), "--base", "org/base@v1"]) == 0
    named = json.loads((tmp_path / "named/adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["revision"]) == ("org/base", "v1")
    assert "base_model: org/base\n" in (tmp_path / "named/README.md").read_text()
    assert export_hf.main([str(run), str(tmp_path / "whole"), "--merge"]) == 0
    ours = parameters(open_model(str(run)))
    through_peft = parameters(open_adapter(str(tmp_path / "peft"), str(hf_model)))
    assert ours.keys() == through_peft.keys()
    for name, x in ours.items():
        assert np.array_equal(x, through_peft[name]), name
    whole = open_model(str(tmp_path / "whole"))
    tokens = np.random.default_rng(0).integers(0, 1024, (1, 32), np.int32)
    batch = one_document(tokens)
    adapted = llama(dataclasses.replace(whole.config, adapter=open_model(str(run)).adapter.config))
    logits = [
        np.asarray(jax.jit(model.logits)(params, batch))
        for model, params in (
            (adapted, ours),
            (llama(whole.config), parameters(whole, adapter=False)),
        )
    ]
    assert np.abs(logits[0] - logits[1]).max() <= 1e-5 * np.abs(logits[0]).max()


def test_another_base_is_refused(run, command, hf_model, tmp_path, capfd):
    """Both a run that resumes and a reader of the adapter refuse it, naming both fingerprints."""
    other = pathlib.Path(shutil.copytree(hf_model, tmp_path / "other"))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[len(weights) * 63 // 64] ^= 1  # in a block that the fingerprint covers
    (other / "model.safetensors").write_bytes(weights)
    capfd.readouterr()
    assert train.main(command("run", "--checkpoint.every", "2", model=other)) == 2
    assert "began with another model (fingerprint" in capfd.readouterr().err
    with pytest.raises(ValueError, match=r"an adapter of another base \(fingerprint "):
        open_adapter(str(run), str(other))


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--model.trainable", ".*norm.*"], ["model.trainable", "adapter.train"]),
        (["--adapter.targets", "[qkv]"], ["adapter.targets", "'qkv'", "q_proj"]),
        (["--adapter.path", "/nowhere"], ["/nowhere", "no adapter_config.json here"]),
    ],
    ids=str,
)
def test_bad_input_is_a_one_line_error(command, capfd, flags, facts):
    """The message names the field, its value and what would work."""
    capfd.readouterr()
    assert train.main(command("refused", *flags)) == 2
    error = capfd.readouterr().err.splitlines()
    assert len(error) == 1 and all(fact in error[0] for fact in facts), error


def test_a_run_starts_from_a_peft_adapter(run, command, tmp_path, capfd):
    """It begins with the adapter's loss and takes over its dropout. Another rank, and an adapter as
    base, are refused."""
    assert export_hf.main([str(run), str(tmp_path / "peft")]) == 0
    first, *_, last = small_run.losses(run)
    continued = ("--adapter.path", tmp_path / "peft")
    arguments = command("again", *continued, "--train.steps", 1, "--adapter.dropout", "null")
    assert train.main(arguments) == 0
    assert (
        adapter_config.read_config(pathlib.Path(arguments[3]) / "checkpoints/1/assets")[0].dropout
        == 0.25
    )
    (initial,) = small_run.losses(pathlib.Path(arguments[3]))
    assert abs(initial - last) < abs(initial - first)
    capfd.readouterr()
    assert train.main(command("more", *continued, "--adapter.rank", "4")) == 2
    assert "adapter.rank: found 4; the adapter in" in capfd.readouterr().err
    assert train.main(command("more", model=run)) == 2
    assert "is an adapter; --adapter.path continues it" in capfd.readouterr().err


def test_the_recipes_model_section_applies_with_a_runs_adapter_too(run, hf_model):
    """Positions, and where answers end; whatever the recipe leaves out is as the run was
    trained."""
    plain = choose_model(ModelConfig(path=str(hf_model)), str(run))
    trained = TransformerConfig.from_hf(run / f"checkpoints/{STEPS}/assets")
    assert plain.config == trained and plain.adapter.folder.parent.parent == run
    assert (
        plain.tokenizer().fingerprint
        == choose_model(ModelConfig(path=str(hf_model))).tokenizer().fingerprint
    )
    data = DataConfig(template="vicuna_v1.1", sources=(SourceConfig("a.json"),))
    section = ModelConfig(path=str(hf_model), overrides={"rope_theta": 5e4})
    source, _ = for_templates(choose_model(section, str(run)).ending_at([7]), data)
    assert source.config.rope.theta == 5e4 and 7 in source.config.eos_token_id
    for name in ("lora_A", "lora_B"):
        module = f"layers.mlp.down_proj.{name}"
        assert np.array_equal(parameters(source)[module], parameters(plain)[module])


@pytest.mark.parametrize(
    ("exported", "words"),
    [
        (False, ["that the run of", "; python -m scripts.export_hf --merge makes a whole model"]),
        (True, ["that the adapter in", ", or peft's merge_and_unload, makes a whole model of it"]),
    ],
)
def test_tokens_that_a_continued_adapter_lacks_are_refused(
    run, command, tmp_path, capfd, exported, words
):
    """Embedding rows, trained or newly initialized, would not match the larger vocabulary."""
    if exported:
        assert export_hf.main([str(run), str(tmp_path / "peft")]) == 0
    capfd.readouterr()
    flags = ["--adapter.path", tmp_path / "peft" if exported else run]
    flags += ["--data.template", "chatml", "--data.add_control_tokens", "true"]
    assert train.main(command("larger", *flags)) == 2
    error = capfd.readouterr().err
    assert "data.add_control_tokens: the templates need 2 tokens" in error
    assert all(text in error for text in words) and "adapter.train" not in error, error


def test_a_run_that_trained_and_adapted_a_module_still_opens(command, tmp_path, monkeypatch, capfd):
    """As earlier versions allowed: it answers and is merged, but does not begin or become PEFT's
    file."""
    flags = ["--adapter.train", "[down_proj]", "--train.steps", "1"]
    assert train.main(command("both", *flags)) == 2
    assert "down_proj has an adapter" in capfd.readouterr().err
    with monkeypatch.context() as earlier:
        earlier.setattr("trainer.build.check_train", lambda config: None)
        assert train.main(command("both", *flags)) == 0
    folder = command("both")[3]
    opened = open_for_inference(folder, MeshConfig(fsdp=8), schedule="ring")
    assert {"weight", "lora_A", "lora_B"} == {
        name.rpartition(".")[2] for name in opened.read() if ".down_proj." in name
    }
    assert export_hf.main([folder, str(tmp_path / "whole"), "--merge"]) == 0
    assert (tmp_path / "whole" / "model.safetensors").exists()
    capfd.readouterr()
    assert export_hf.main([folder, str(tmp_path / "peft")]) == 2
    assert "; --merge writes this run as a whole model" in capfd.readouterr().err


def test_new_tokens_need_their_rows_trained(command, capfd):
    """Otherwise no checkpoint would hold their rows."""
    capfd.readouterr()
    flags = ["--data.template", "chatml", "--data.add_control_tokens", "true"]
    assert train.main(command("added", *flags)) == 2
    assert (
        "data.add_control_tokens: the templates need 2 tokens that the base lacks, and with "
        "adapters only modules in adapter.train are saved; --adapter.train "
        "'[norm, embed_tokens, lm_head]' would" in capfd.readouterr().err
    )


@pytest.mark.slow
def test_stages_continue_training_the_same_adapters(command, hf_model):
    """The second stage begins with the adapters of the first, at its positions and on the same
    base."""
    stages = [
        {"context_length": 128, "steps": 2, "rope": {"rope_theta": 5e4}},
        {"context_length": 128, "steps": 1},
    ]
    arguments = command("staged", "--stages", json.dumps(stages))
    assert train.main(arguments) == 0
    first, second = stages_of(load(arguments))
    initial = TextObjective(second, make_mesh(second.mesh)).read_params()
    for name, x in restore_model(first.folder / "checkpoints/2").items():
        assert np.array_equal(x, initial[name]), name
    ended = open_model(str(second.folder))
    assert ended.base.folder == hf_model and ended.config.rope.theta == 5e4
    assert train.main(arguments) == 0  # finds both finished
