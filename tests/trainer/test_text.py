"""A text objective's messages about its data: the report is printed once, and an empty held-out set
is a warning."""

import json
import pathlib
import shutil

import pytest

from data.errors import UserError
from trainer.config.load import load
from trainer.mesh import make_mesh
from trainer.text import TextObjective


@pytest.fixture
def opened(small_recipe, tmp_path):
    """Returns a function that opens the small recipe's objective with extra flags."""

    def opened(*flags):
        config = load(["--config", str(small_recipe), "--run_dir", str(tmp_path / "run"), *flags])
        return TextObjective(config, make_mesh(config.mesh))

    return opened


def test_the_report_is_printed_at_the_first_start_only(opened, tmp_path, capsys):
    opened()
    assert "records, " in capsys.readouterr().out
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("config_version: 2\n", encoding="utf-8")
    opened()
    captured = capsys.readouterr()
    assert "records, " not in captured.out and "warning" not in captured.err


def test_a_held_out_set_is_never_silently_empty(opened, small_recipe, tmp_path, capsys):
    source = json.dumps([{"path": str(small_recipe.parent / "conversations.json")}])
    flags = ("--data.sources", source, "--data.held_out_path", "null")
    assert not opened(*flags, "--data.held_out_fraction", "1.0e-9").has_held_out
    assert "warning: no held-out loss: a share of 1e-09 picks none of " in capsys.readouterr().err
    assert not opened(*flags, "--data.held_out_fraction", "0").has_held_out, "as requested"
    assert "warning" not in capsys.readouterr().err
    assert opened().has_held_out
    assert "warning" not in capsys.readouterr().err


@pytest.fixture
def pretrained(hf_model, tmp_path):
    """Returns a function that makes a pretrained model's folder with a maximum length and a chat
    template."""

    def pretrained(length, template):
        folder = pathlib.Path(shutil.copytree(hf_model, tmp_path / "model", dirs_exist_ok=True))
        for name, change in (
            ("config.json", {"max_position_embeddings": length}),
            ("tokenizer_config.json", {"chat_template": template}),
        ):
            written = json.loads((folder / name).read_text(encoding="utf-8"))
            (folder / name).write_text(json.dumps({**written, **change}), encoding="utf-8")
        for path in folder.glob("chat_template*"):
            path.unlink()
        return str(folder)

    return pretrained


OWN = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


def test_a_model_is_trained_and_written_with_its_own_template(opened, pretrained, tmp_path):
    objective = opened("--model.path", pretrained(512, OWN))
    document = objective.prepared.train[0]
    assert objective.tokenizer.decode(document.tokens).startswith("[user] ")
    objective.write_assets(tmp_path / "assets")
    assert (tmp_path / "assets" / "chat_template.jinja").read_text(encoding="utf-8") == OWN


def test_a_model_without_a_template_asks_for_a_choice(opened, pretrained):
    with pytest.raises(
        UserError,
        match=r"data\.template.*the model's own.*choose one, such as --data\.template vicuna_v1\.1",
    ):
        opened("--model.path", pretrained(512, None))


def test_documents_beyond_the_trained_length_are_reported(opened, pretrained, tmp_path, capsys):
    model = pretrained(32, OWN)
    objective = opened(
        "--model.path", model, "--data.context_length", "256", "--mesh.simulate", "8"
    )
    longest = max(
        len(objective.prepared.train[index].tokens)
        for index in range(len(objective.prepared.train))
    )
    assert 32 < longest < 256
    stderr = capsys.readouterr().err
    assert (
        f"warning: documents up to {longest} tokens, trained for 32: set rope_scaling, such as "
        "--model.overrides" in stderr
    )
    objective.write_assets(tmp_path / "assets")
    config = json.loads((tmp_path / "assets" / "config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] == longest
    # The suggested setting is accepted and ends the warning.
    proposed = stderr.split("--model.overrides '")[1].split("'")[0]
    opened("--model.path", model, "--data.context_length", "256", "--model.overrides", proposed)
    assert "trained for" not in capsys.readouterr().err
    opened(
        "--model.path",
        model,
        "--data.context_length",
        "256",
        "--model.overrides",
        '{"rope_theta": 50000.0}',
    )
    assert "trained for" not in capsys.readouterr().err, (
        "a recipe that sets the RoPE base has chosen the length"
    )
