"""A text objective's messages about its data: the report is printed once, and an empty held-out set
is a warning."""

import hashlib
import json
import pathlib
import re
import shutil

import pytest
import transformers

from data.errors import UserError
from data.templates.built_in import VICUNA
from trainer.config.load import load
from trainer.mesh import make_mesh
from trainer.run.identity import identity
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


def test_a_profile_of_steps_beyond_the_epochs_is_refused(opened):
    """As with train.steps; nothing would be profiled."""
    with pytest.raises(
        ValueError, match=r"profile_steps: found \(900, 901\), needs a last step of"
    ):
        opened("--train.epochs", "1", "--logging.profile_steps", "900:901")


def test_a_held_out_set_is_never_silently_empty(opened, small_recipe, capsys):
    source = json.dumps([{"path": str(small_recipe.parent / "conversations.json")}])
    flags = ("--data.sources", source, "--data.held_out_path", "null")
    assert not opened(*flags, "--data.held_out_fraction", "1.0e-9").has_held_out
    assert "warning: no held-out loss: a share of 1e-09 picks none of " in capsys.readouterr().err
    assert not opened(*flags, "--data.held_out_fraction", "0").has_held_out, "as requested"
    assert "warning" not in capsys.readouterr().err
    text = small_recipe.parent / "alone.txt"  # of many documents, which go together
    text.write_text("A sentence. " * 999)
    alone = json.dumps([{"path": str(text), "format": "text"}])
    flags = ("--data.sources", alone, "--data.held_out_path", "null")
    assert not opened(*flags, "--data.held_out_fraction", "1.0e-9").has_held_out
    assert "only one record, which is held out as a whole or not at" in capsys.readouterr().err
    assert opened().has_held_out
    assert "warning" not in capsys.readouterr().err


def test_a_source_that_is_held_out_as_a_whole_is_named(opened, small_recipe, tmp_path, capsys):
    """By hand: a record is held out if the hash of its id, as a share of 2^64, is below the
    fraction."""
    digest = hashlib.sha256(b"held-out\0alone").digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    tiny, many = tmp_path / "tiny.json", small_recipe.parent / "conversations.json"
    turns = [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B."}]
    tiny.write_text(json.dumps([{"id": "alone", "conversations": turns}]), encoding="utf-8")
    sources = json.dumps([{"path": str(many)}, {"path": str(tiny), "weight": 5}])
    flags = ("--data.sources", sources, "--data.held_out_path", "null")
    opened(*flags, "--data.held_out_fraction", f"{share + 0.001}")
    assert (
        f"warning: {tiny}: its 1 document is held out, so the source is not trained on; a smaller "
        f"data.held_out_fraction than {share + 0.001:g}, or data.held_out_path, would"
    ) in capsys.readouterr().err
    opened(*flags, "--data.held_out_fraction", f"{share - 0.001}")
    assert "is held out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("weights", "epochs", "times"),
    [((1, 0.1), 15, 15), ((0.1, 0.1), 15, None), ((0.5, 0.1), 30, 15), ((1, 70), 1, 70)],
)
def test_repetitions_are_those_of_the_source_with_the_largest_weight(
    opened, small_recipe, tmp_path, capsys, weights, epochs, times
):
    few, many = tmp_path / "few.json", small_recipe.parent / "conversations.json"
    few.write_text(json.dumps(json.loads(many.read_text())[:3]), encoding="utf-8")
    sources = [
        {"path": str(path), "weight": weight}
        for path, weight in zip((many, few), weights, strict=True)
    ]
    opened(
        *("--data.sources", json.dumps(sources), "--data.held_out_path", "null"),
        *("--data.held_out_fraction", "0", "--train.epochs", str(epochs)),
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if " rows are " in line]
    if times is None:
        assert not lines
        return
    (line,), weight = lines, max(weights)
    path, words = (many, few)[weights.index(weight)], re.escape(f"(weight {weight:g})")
    found = re.search(rf"every document of {path} {words} is trained on (\d+) times; (.*)", line)
    assert found and abs(int(found[1]) - times) <= 0.05 * times, line
    assert ("a smaller weight" in found[2]) == (weight > 1)
    assert ("3 epochs would be " in found[2]) == (weight <= 1)


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


def test_an_own_template_is_stored_with_the_run(opened, tmp_path):
    """The file's text is the model's template for training and export; its path may change."""
    file, moved = tmp_path / "own.jinja", tmp_path / "moved.jinja2"
    text = VICUNA.replace("ASSISTANT", "PIM")
    file.write_text(text, encoding="utf-8")
    first = opened("--data.template", str(file))
    assert " PIM: " in first.tokenizer.decode(first.prepared.train[0].tokens)
    first.write_assets(tmp_path / "assets")
    assert (tmp_path / "assets/chat_template.jinja").read_text(encoding="utf-8") == text
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "assets")
    assert exported.chat_template == text
    file.rename(moved)
    again = opened("--data.template", str(moved))
    assert again.prepared.folder == first.prepared.folder
    assert identity(again.config) == identity(first.config)
    moved.write_text(VICUNA, encoding="utf-8")
    assert opened("--data.template", str(moved)).prepared.folder != first.prepared.folder
    with pytest.raises(UserError, match=r"own\.jinja: cannot be read"):
        opened("--data.template", str(file))
    sources = json.dumps([{"path": "a.json", "template": "own.jinja"}])
    with pytest.raises(UserError, match=r"a name; a file would work as data\.template"):
        opened("--data.sources", sources)
    sources = json.dumps([{"path": "a.json", "template": "tokenizer"}])
    with pytest.raises(UserError, match=r"left out, since data\.template own\.jinja replaces"):
        opened("--data.sources", sources, "--data.template", "own.jinja")
