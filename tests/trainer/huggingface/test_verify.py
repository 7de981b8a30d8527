"""An export is verified by opening it with transformers: a difference is a one-line error and a
nonzero exit code."""

import json
import shutil

import pytest
import transformers

from data.errors import UserError
from scripts import export_hf, import_hf
from trainer.huggingface import verify


@pytest.fixture(scope="module")
def checkpoint(hf_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / "checkpoint"
    assert import_hf.main([str(hf_model), str(folder)]) == 0
    return folder


def export(checkpoint, out, *flags):
    return export_hf.main([str(checkpoint), str(out), *flags])


def test_logits_match_transformers(checkpoint, tmp_path, capsys):
    assert export(checkpoint, tmp_path / "hf", "--verify") == 0
    assert "logits differ from transformers' by at most" in capsys.readouterr().out


def test_different_logits_are_refused(checkpoint, tmp_path, capsys, monkeypatch):
    true = verify.our_logits
    monkeypatch.setattr(verify, "our_logits", lambda folder: 1.01 * true(folder))
    assert export(checkpoint, tmp_path / "hf", "--verify") == 2
    assert "transformers' logits differ from ours by 1.0e-02" in capsys.readouterr().err


def test_a_size_that_transformers_reads_differently_is_refused(
    checkpoint, tmp_path, capsys, monkeypatch
):
    read = transformers.AutoConfig.from_pretrained

    def other(*args, **options):
        config = read(*args, **options)
        config.num_key_value_heads += 1
        return config

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", other)
    assert export(checkpoint, tmp_path / "hf") == 2
    assert "config.json: num_key_value_heads: transformers reads" in capsys.readouterr().err


def test_different_ids_are_refused(checkpoint, tmp_path, capsys, monkeypatch):
    assert export(checkpoint, tmp_path / "hf") == 0
    path = tmp_path / "hf" / "tokenizer.json"
    verify.check_tokenizer(path.parent)
    encode = verify.Tokenizer.encode
    monkeypatch.setattr(verify.Tokenizer, "encode", lambda *args: [*encode(*args), 0])
    assert export(checkpoint, tmp_path / "again") == 2
    assert "transformers' tokenizer gives the text" in capsys.readouterr().err
    monkeypatch.undo()
    path.write_text(json.dumps({"model": {"type": "none"}}))
    with pytest.raises(verify.UserError, match=r"cannot open the tokenizer|cannot be read"):
        verify.check_tokenizer(path.parent)


def test_ids_are_shown_where_they_begin_to_differ(checkpoint, tmp_path, capsys, monkeypatch):
    encode = verify.Tokenizer.encode
    monkeypatch.setattr(verify.Tokenizer, "encode", lambda *args: [*encode(*args), 7])
    assert export(checkpoint, tmp_path / "hf") == 2
    count = len(
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(verify.TEXTS[0]).input_ids
    )
    assert f"from number {count + 1} on: [], and ours [7]" in capsys.readouterr().err


def test_an_untrained_tokenizer_is_read_as_transformers_reads_it(hf_model, tmp_path, capsys):
    """A class that builds a pre_tokenizer of its own; training would use these ids too."""
    source = shutil.copytree(hf_model, tmp_path / "source")
    path = source / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"})
    )
    saved = verify.Tokenizer.load(source, as_saved=True)
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    assert any(theirs(text).input_ids != saved.encode(text) for text in verify.TEXTS)
    assert import_hf.main([str(source), str(tmp_path / "checkpoint")]) == 0
    assert export(tmp_path / "checkpoint", tmp_path / "hf") == 0
    assert "Qwen2Tokenizer" in capsys.readouterr().err


def test_code_that_a_tokenizer_names_is_not_run(checkpoint, tmp_path, monkeypatch):
    """Even if somebody would agree; tokenizer_config.json is exported as it was given."""
    assert export(checkpoint, tmp_path / "hf") == 0
    path = tmp_path / "hf/tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "hf/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UserError, match="transformers cannot open the tokenizer"):
        verify.check_tokenizer(tmp_path / "hf")
    assert not (tmp_path / "ran").exists()
