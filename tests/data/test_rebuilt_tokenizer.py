"""Ids are those of transformers' AutoTokenizer, also if its class builds another tokenizer than the
folder's tokenizer.json describes, and also after an export."""

import functools
import json

import pytest

from data import rebuilt_tokenizer
from data.templates import render
from data.tokenizer import Tokenizer
from model.families import FAMILIES
from tests.data.test_templates import MODEL, TINY, _ids, _messages

_TEXTS = ("The fox", " leading", "  two  spaces\n x ", "é 東京 🙂\t", "ﬁ１２ [INST] 12345", "it's")
_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": _TEMPLATE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_BOTH = "normalizer and pre_tokenizer"
_PREPEND = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, _REPLACE],
    },
    "pre_tokenizer": None,
}


def _metaspace(scheme):
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": step}


def _byte_level(prefix):
    step = {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {"pre_tokenizer": step}


# As Qwen publishes it; transformers' class builds it with trim_offsets, which changes no id.
_QWEN = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {
                    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
                    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                },
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
        ],
    },
}


@functools.cache
def _sentencepiece():
    return Tokenizer.load(MODEL)._files["tokenizer.json"]


def _folder(path, pipeline, model_type, config):
    path.mkdir()
    is_bytes = pipeline is _QWEN or "normalizer" not in pipeline
    spec = json.loads((TINY / "tokenizer.json").read_bytes() if is_bytes else _sentencepiece())
    (path / "tokenizer.json").write_text(json.dumps({**spec, **pipeline}))
    unknown = {"unk_token": "<pad>"} if is_bytes else {}
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({**_NAMES, **unknown, **config}))
    if model_type is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def _class(name, **fields):
    return {"tokenizer_class": name, **fields}


@pytest.mark.parametrize(
    ("pipeline", "model_type", "config", "parts"),
    [
        (_PREPEND, "llama", _class("LlamaTokenizer"), _BOTH),
        (_PREPEND, "llama", _class("LlamaTokenizer", legacy=True), _BOTH),
        (_PREPEND, "llama", _class("LlamaTokenizerFast"), _BOTH),
        (
            _PREPEND,
            "llama",
            _class("LlamaTokenizer", add_prefix_space=False, add_bos_token=True),
            _BOTH,
        ),
        (_PREPEND, None, _class("LlamaTokenizer"), _BOTH),
        (_PREPEND, "llama", None, None),
        (_PREPEND, "llama", _class("PreTrainedTokenizerFast"), None),
        (_PREPEND, "mistral", _class("LlamaTokenizer"), None),
        (_PREPEND, "phi3", _class("LlamaTokenizer", legacy=False), None),
        (_metaspace("first"), "llama", _class("LlamaTokenizer", legacy=False), None),
        (_metaspace("always"), "llama", _class("LlamaTokenizer"), "pre_tokenizer"),
        (_byte_level(False), "llama", _class("LlamaTokenizerFast"), None),
        (_byte_level(False), "llama", _class("PreTrainedTokenizerFast"), None),
        (_byte_level(False), "qwen2", _class("PreTrainedTokenizerFast"), _BOTH),
        (_byte_level(False), "qwen2", _class("LlamaTokenizerFast"), _BOTH),
        (_QWEN, "qwen2", _class("Qwen2Tokenizer"), None),
        (_QWEN, "qwen3", _class("Qwen2Tokenizer"), None),
        (_byte_level(False), None, _class("GPT2Tokenizer", add_prefix_space=True), "pre_tokenizer"),
        (_byte_level(True), None, _class("GPT2Tokenizer"), "pre_tokenizer"),
        (_byte_level(True), None, _class("GPT2Tokenizer", add_prefix_space=True), None),
        (_byte_level(True), None, _class("PreTrainedTokenizerFast"), None),
    ],
)
def test_ids_are_those_of_transformers(tmp_path, recwarn, pipeline, model_type, config, parts):
    from transformers import AutoTokenizer

    folder = _folder(tmp_path / "in", pipeline, model_type, config)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    warned = [text for each in recwarn if "builds its own" in (text := str(each.message))]
    assert len(warned) == (parts is not None), warned
    assert all(f"builds its own {parts} instead" in text for text in warned), warned
    recwarn.clear()
    saved = tmp_path / "saved"
    ours.save(saved)
    if model_type is not None:
        (saved / "config.json").write_bytes((folder / "config.json").read_bytes())
    again, loaded = AutoTokenizer.from_pretrained(saved), Tokenizer.load(saved)
    assert not any("builds its own" in str(each.message) for each in recwarn)
    assert loaded.fingerprint == ours.fingerprint
    assert Tokenizer.load(saved, as_saved=True).fingerprint == ours.fingerprint
    for text in _TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == loaded.encode(text) == expected
        assert again(text, add_special_tokens=False)["input_ids"] == expected
    assert ours.adds_bos == (theirs("a")["input_ids"][0] == theirs.bos_token_id)
    if config is not None:
        turns = [{"role": role, "content": f"{role} x"} for role in ("user", "assistant") * 2]
        messages = _messages([(turn["role"], turn["content"]) for turn in turns])
        ids = _ids(render(messages, "tokenizer", ours))
        assert theirs.apply_chat_template(turns, return_dict=False) == ids
        assert again.apply_chat_template(turns, return_dict=False) == ids


def test_a_saved_tokenizer_keeps_the_ids_that_were_trained(tmp_path):
    """As in checkpoints from before transformers was followed."""
    folder = _folder(tmp_path / "in", _PREPEND, "llama", _class("LlamaTokenizer"))
    with pytest.warns(UserWarning) as warned:
        saved, followed = Tokenizer.load(folder, as_saved=True), Tokenizer.load(folder)
    assert len(warned) == 1
    assert saved.encode(" leading") != followed.encode(" leading")


def test_what_transformers_cannot_read_is_said(tmp_path):
    config = _class("Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    folder = _folder(tmp_path / "in", _PREPEND, None, config)
    with pytest.warns(UserWarning, match=f"^{folder}: transformers cannot read"):
        ours = Tokenizer.load(folder)
    assert ours.encode("The fox") == Tokenizer.load(MODEL).encode("The fox")


def test_models_with_their_own_class_are_known():
    """Those of our families for which transformers ignores the class that a tokenizer names."""
    from transformers.models.auto import tokenization_auto as auto

    own = {
        name
        for name in FAMILIES
        if name in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        and auto.TOKENIZER_MAPPING_NAMES[name] != "TokenizersBackend"
    }
    assert own == {*rebuilt_tokenizer.OWN_CLASS}
