"""Tokens that only the files beside a tokenizer name have the same ids as in transformers."""

import hashlib
import json
import shutil

import pytest

from data.errors import UserError
from data.tokenizer import Tokenizer
from tests.data.test_templates import MODEL, TINY

_FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
_TEXT = "a  <|tool|>  b <image> zzHello <mask>"


def listed(**tokens):
    """Returns `added_tokens_decoder` of tokens' texts by id, written i0, i1, ..."""
    return {
        "added_tokens_decoder": {
            number[1:]: {"content": token, "special": True, **_FLAGS}
            for number, token in tokens.items()
        }
    }


def folder_of(path, config=(), older=None, ids=None, model=TINY / "tokenizer.json"):
    """Writes a tokenizer's folder; the arguments are the contents of the files beside it."""
    path.mkdir()
    shutil.copy(model, path / model.name.replace("tiny.model", "tokenizer.model"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    kind = "LlamaTokenizer" if model == MODEL else "PreTrainedTokenizerFast"
    files = {
        "tokenizer_config.json": {"tokenizer_class": kind, **names, **dict(config)},
        "special_tokens_map.json": older,
        "added_tokens.json": ids,
    }
    for name, content in files.items():
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "files",
    [
        {"config": listed(i1024="<|tool|>")},
        {"config": listed(i1025="<|tool|>", i1024="<image>")},
        {"config": listed(i5="<|tool|>")},  # taken
        {"config": listed(i2000="<|tool|>", i1500="<image>")},  # a gap
        {"config": listed(i2="</s>")},
        {"config": listed(i1024="<image>"), "ids": {"<|tool|>": 1025}},  # not read
        {"config": listed(i1024="<image>"), "older": {"additional_special_tokens": ["<|tool|>"]}},
        {"ids": {"<|tool|>": 1024, "zz": 1025}},
        {"ids": {"<|tool|>": 1}},  # that of another added token
        {"older": {"additional_special_tokens": ["<|tool|>"], "sep_token": "<image>"}},
        {"older": {"pad_token": {"content": "<image>", **_FLAGS, "lstrip": True}}},
        {"older": {"extra_special_tokens": {"image_token": "<image>"}}},
        {
            "config": {"extra_special_tokens": ["<|tool|>"]},
            "older": {"extra_special_tokens": ["zz"]},
        },
        {"config": {"additional_special_tokens": ["<|tool|>", "<image>"]}},
        {"config": {"additional_special_tokens": ["<|tool|>"], "extra_special_tokens": ["zz"]}},
        {
            "config": {
                "additional_special_tokens": ["<|tool|>"],
                "extra_special_tokens": {"image_token": "<image>"},
            }
        },
        {
            "config": {
                "additional_special_tokens": [
                    {"__type": "AddedToken", "content": "<|tool|>", **_FLAGS, "rstrip": True}
                ]
            }
        },
        {"config": {"pad_token": "<image>", "unk_token": "<|tool|>", "own_token": "zz"}},
        {"config": {"pad_token": None, "extra_special_tokens": {}, "mask_token": ""}},
        {
            "config": {
                **listed(i1030="zz", i1026="<|tool|>"),
                "mask_token": "<mask>",
                "own_token": "<image>",
                "additional_special_tokens": ["<|last|>"],
            }
        },
    ],
)
def test_tokens_named_beside_a_tokenizer_have_transformers_ids(tmp_path, files):
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path / "in", **files)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs) and ours.pad_id == theirs.pad_token_id
    added = {token.content: number for number, token in theirs.added_tokens_decoder.items()}
    for number, token in theirs.added_tokens_decoder.items():
        if token.content != "zz":  # letters alone may be text
            control = ours.controls[token.content]
            assert (control.id, control.strips) == (number, (token.lstrip, token.rstrip))
    typed = ours.controls.keys() - {"<s>", "</s>", ours.pad_token}
    text = _TEXT.replace(ours.pad_token or "<pad>", " ")
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.with_text_tokens(typed).encode(text) == expected
    extended = ours.with_controls(["<|new|>"])
    assert extended.controls["<|new|>"].id == len(theirs)
    extended.save(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.convert_tokens_to_ids([*added, "<|new|>"]) == [*added.values(), len(theirs)]


def test_added_tokens_of_punctuation_alone_are_text(tmp_path):
    """As in Yi 1.5, whose full stop otherwise becomes a byte."""
    from transformers import AutoTokenizer

    tokens = listed(i1024="..", i1025="```", i1026="---", i1027="<b>")
    for token in tokens["added_tokens_decoder"].values():
        token["special"] = False
    folder = folder_of(tmp_path / "in", tokens)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    text = "a. b...\n```c```\n--- -----x"
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert {1024, 1025, 1026} <= {*ours.encode(text)} and ours.typed(text) == set()
    assert ours.controls["<b>"].id == 1027 and 1027 not in ours.encode("<b>")


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"additional_special_tokens": ["<|a|>", "<|b|>"]}},
        {"config": {"extra_special_tokens": {"image_token": "<image>"}, "pad_token": "<pad>"}},
        {
            "config": {
                **listed(i1000="<|x|>"),
                "additional_special_tokens": ["<|x|>", "<|y|>"],
                "pad_token": "[PAD]",
            }
        },
    ],
)
def test_tokens_named_beside_a_sentencepiece_model_have_transformers_ids(tmp_path, files):
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path / "in", model=MODEL, **files)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for number, token in theirs.added_tokens_decoder.items():
        assert token.content == "<unk>" or ours.controls[token.content].id == number


def test_an_id_inside_a_sentencepiece_model_is_refused(tmp_path):
    folder = folder_of(tmp_path / "in", listed(i500="<|x|>"), model=MODEL)
    with pytest.raises(UserError, match=r"'<\|x\|>' has id 500, in transformers 1000; ids after"):
        Tokenizer.load(folder)


def test_only_changed_ids_are_prepared_anew(tmp_path):
    """A fingerprint from before these tokens were read is that of the files alone."""

    def of_files(folder):
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        return digest.hexdigest()

    same = (
        {"config": listed(i0="<pad>", i1="<s>", i2="</s>")},
        {"config": {"eos_token": "Ġthe"}},  # in the vocabulary, and always a control token
        {"older": {"pad_token": "<pad>"}, "ids": {"</s>": 2}},
    )
    mark = {"1024": {"content": "++", **_FLAGS, "special": False}}
    other = (
        {"config": listed(i1024="<|tool|>")},
        {"config": {"extra_special_tokens": ["Ġthe"]}},
        {"config": {"added_tokens_decoder": mark}},
    )
    for number, files in enumerate((*same, *other)):
        folder = folder_of(tmp_path / str(number), **files)
        assert (Tokenizer.load(folder).fingerprint == of_files(folder)) == (files in same)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"added_tokens_decoder": [1]}, "its added_tokens_decoder in CONFIG is of type list"),
        (
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            "an id of its added_tokens_decoder in CONFIG is 'x'; a whole number",
        ),
        (
            {"added_tokens_decoder": {"5": 3}},
            "token 5 of its added_tokens_decoder in CONFIG is 3, which is no text",
        ),
        (
            {"added_tokens_decoder": {"5": {"content": "a", "lstrip": 1}}},
            "token 5 of its added_tokens_decoder in CONFIG has lstrip 1",
        ),
        ({"extra_special_tokens": 3}, "its extra_special_tokens in CONFIG is 3; a list of tokens"),
        (
            {"extra_special_tokens": {"image_token": 3}},
            "image_token of its extra_special_tokens in CONFIG is 3, which is no text",
        ),
        (
            {"additional_special_tokens": [None]},
            "a token of its additional_special_tokens in CONFIG is None, which is no text",
        ),
        ({"pad_token": "\ud800"}, "its pad_token in CONFIG is '\\ud800', which is no text"),
    ],
)
@pytest.mark.parametrize("model", [TINY / "tokenizer.json", MODEL])
def test_what_is_no_token_is_refused_by_name(tmp_path, config, reason, model):
    folder = folder_of(tmp_path / "in", config, model=model)
    with pytest.raises(UserError) as caught:
        Tokenizer.load(folder)
    reason = reason.replace("CONFIG", "tokenizer_config.json")
    assert str(caught.value).startswith(f"{folder}: {reason}")


@pytest.mark.parametrize(
    ("config", "older", "ids", "reason"),
    [
        ({}, {"pad_token": 3}, None, "its pad_token in special_tokens_map.json is 3, which"),
        (
            {"extra_special_tokens": ["zz"]},
            {"extra_special_tokens": [3]},
            None,
            "a token of its extra_special_tokens in tokenizer_config.json or its "
            "extra_special_tokens in special_tokens_map.json is 3, which",
        ),
        ({}, None, {"zz": "x"}, "its id of 'zz' in added_tokens.json is 'x'; a whole number"),
    ],
)
def test_the_older_file_with_what_is_no_token_is_named(tmp_path, config, older, ids, reason):
    folder = folder_of(tmp_path / "in", config, older, ids)
    with pytest.raises(UserError) as caught:
        Tokenizer.load(folder)
    assert str(caught.value).startswith(f"{folder}: {reason}")
