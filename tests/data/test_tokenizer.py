"""Tokens added to a vocabulary have the same ids as in transformers, and text never becomes control
tokens."""

import base64
import json
import shutil

import pytest

from data.errors import UserError
from data.templates import missing_controls, render
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY
from tests.data.test_templates import MODEL, TINY, _ids, _messages


@pytest.mark.parametrize("written", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_added_to_a_sentencepiece_model_keep_their_ids(tmp_path, written):
    """As in chat models of 2023 without a tokenizer.json; ids match transformers."""
    from transformers import AutoTokenizer

    added = {"<|im_end|>": 1000, "<|im_start|>": 1001, "[PAD]": 1002}  # not in our order
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
    }
    if written == "tokenizer_config.json":
        config["added_tokens_decoder"] = {
            str(number): {"content": token, "special": True} for token, number in added.items()
        }
    else:
        (tmp_path / written).write_text(json.dumps(added))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.model").write_bytes(MODEL.read_bytes())
    tokenizer, bare = Tokenizer.load(tmp_path), Tokenizer.load(MODEL)
    assert {
        token: tokenizer.controls[token].id for token in added
    } == added and tokenizer.vocab_size == 1003
    assert (tokenizer.eos_id, tokenizer.pad_id) == (1000, 1002) and missing_controls(
        "chatml", tokenizer
    ) == ()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.convert_tokens_to_ids(list(added)) == list(added.values())
    for text in ("Who are you?", "".join(added)):
        assert tokenizer.encode(text) == bare.encode(text)
    extended = tokenizer.with_controls(["<|eot_id|>"])
    extended.save(tmp_path / "saved")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved").convert_tokens_to_ids("<|eot_id|>")
        == 1003
    )
    for again in (extended, Tokenizer.load(tmp_path / "saved")):
        assert {**added, "<|eot_id|>": 1003}.items() <= {
            text: token.id for text, token in again.controls.items()
        }.items()
    added["[SEP]"] = 1005
    if "added_tokens_decoder" in config:
        config["added_tokens_decoder"]["1005"] = {"content": "[SEP]", "special": True}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(
        UserError,
        match=rf"^{tmp_path}: the added token '\[SEP\]' has id 1005, in transformers 1003; ids after",
    ):
        Tokenizer.load(tmp_path)


def with_added(folder, tokens, **options):
    """Writes a folder with the tiny tokenizer and more added tokens that are not special."""
    spec = json.loads((TINY / "tokenizer.json").read_text())
    option = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
        **options,
    }
    spec["added_tokens"] += [
        {"id": 1024 + number, "content": token, **option} for number, token in enumerate(tokens)
    ]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())
    return folder


@pytest.mark.parametrize("normalized", [False, True])
def test_added_tokens_of_white_space_and_letters_are_text(tmp_path, normalized):
    """As in GPT-NeoX and DeepSeek, with ids after the vocabulary's; ids match transformers."""
    from transformers import AutoTokenizer

    folder = with_added(tmp_path / "in", ["     ", "   ", "語x", "<think>"], normalized=normalized)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert {"<pad>", "<s>", "</s>", "<think>"} == ours.controls.keys()
    for text in ("a   b", "     def f():\n        return 1 語x 2", "   ", "語 x", "a     "):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    offsets = ours.encode_spans("a   b").offsets
    assert [*offsets] == [offsets[0], offsets[1], offsets[2]] == [(0, 1), (1, 4), (4, 5)]
    assert 1024 + 3 not in ours.encode("<think>") and ours.typed("a <think> b</s>") == {
        "<think>",
        "</s>",
    }


@pytest.mark.parametrize("kind", ["tokenizer.json", "sentencepiece"])
def test_decoding_drops_special_tokens_alone(tmp_path, kind):
    """As transformers decodes answers: with <think> and <tool_call>, without what any file calls
    special, by its flag or by a name such as unk_token."""
    from transformers import AutoTokenizer

    texts = ["<think>", "</think>", "<|end|>", "<|named|>"]
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    if kind == "tokenizer.json":
        folder, first = with_added(tmp_path / "in", texts), 1024
        config = json.loads((folder / "tokenizer_config.json").read_text())
    else:
        folder, first, config = tmp_path / "in", 1000, {"tokenizer_class": "LlamaTokenizer"}
        folder.mkdir()
        shutil.copy(MODEL, folder / "tokenizer.model")
    config["unk_token"] = "<|named|>" if kind == "tokenizer.json" else "<unk>"
    texts = texts[: 4 if kind == "tokenizer.json" else 3]
    config["added_tokens_decoder"] = {
        str(first + number): {"content": text, "special": text == "<|end|>", **flags}
        for number, text in enumerate(texts)
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    word, (think, end, *special) = ours.encode("the cat"), range(first, first + len(texts))
    for ids in (
        [think, *word, end, *word, *special],
        [*special, *word, ours.bos_id, think, ours.eos_id],
    ):
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode([think, *word, *special]).startswith("<think>")
    assert ours.typed("<think></think>") == {"<think>", "</think>"}


@pytest.mark.parametrize("kind", ["tokenizer.json", "sentencepiece"])
def test_text_tokens_in_a_text_are_encoded_as_tokens(tmp_path, kind):
    """For example <think> and </think> of reasoning models, which are plain text unless a recipe
    names them."""
    if kind == "tokenizer.json":
        bare = Tokenizer.load(with_added(tmp_path / "in", ["<think>", "</think>"]))
    else:
        bare = Tokenizer.load(MODEL).with_controls(["<think>", "</think>"])
    marks = [bare.controls[mark].id for mark in ("<think>", "</think>")]
    talk = _messages([("user", "Who </s> are you?"), ("assistant", "<think> a </think>You too!")])
    assert not set(marks) & set(_ids(render(talk, "vicuna_v1.1", bare)))
    tokenizer = bare.with_text_tokens(["</think>", "<think>"])
    assert tokenizer.fingerprint != bare.fingerprint and tokenizer.with_text_tokens([]) is tokenizer
    *_, answer = render(talk, "vicuna_v1.1", tokenizer)
    assert answer.train and [token for token in answer.ids if token in marks] == marks
    # A sentencepiece model begins every text between tokens with a space.
    text = (
        "<think> a </think>You too!</s>"
        if kind == "tokenizer.json"
        else "<think>  a </think> You too!</s>"
    )
    assert tokenizer.decode(answer.ids, skip_special=False).strip() == text
    controls = {control.id for control in tokenizer.controls.values()}
    assert _ids(render(talk, "vicuna_v1.1", tokenizer)).count(
        tokenizer.eos_id
    ) == 1 and not controls & set(marks)
    assert tokenizer.typed("<think></s>") == {"</s>"}
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved").with_text_tokens(tokenizer.text_tokens)
    assert _ids(render(talk, "vicuna_v1.1", again)) == _ids(render(talk, "vicuna_v1.1", tokenizer))
    for wrong, problem in (
        ("<thin>", "is not an added token of the tokenizer"),
        ("</s>", "is the tokenizer's EOS token, which no turn may contain"),
        ("<s>", "is the tokenizer's BOS token, which no turn may contain"),
    ):
        with pytest.raises(
            UserError, match=f"text_tokens: '{wrong}' {problem}; .*</think>, <think>.* would work"
        ):
            bare.with_text_tokens([wrong])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object, but list"),
        (
            "tokenizer_config.json",
            "null",
            "tokenizer_config.json is not a JSON object, but NoneType",
        ),
        ("special_tokens_map.json", "3", "special_tokens_map.json is not a JSON object, but int"),
        ("special_tokens_map.json", "[" * 100_000, "special_tokens_map.json is not JSON"),
        (
            "tokenizer_config.json",
            '{"a": ' * 100_000 + "1" + "}" * 100_000,
            "tokenizer_config.json is not JSON",
        ),
        (
            "tokenizer_config.json",
            '{"bos_token": 3}',
            "its bos_token in tokenizer_config.json is 3, which is no text",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": {"content": []}}',
            "its eos_token in tokenizer_config.json is [], which is no text",
        ),
        (
            "tokenizer_config.json",
            '{"pad_token": "\\ud83d"}',
            "its pad_token in tokenizer_config.json is '\\ud83d', which is no text",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": {"a": 1}}',
            "the chat_template in tokenizer_config.json is no text",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": [1, {"name": "default", "template": 3}]}',
            "is no text",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": {"../rag": "a"}}',
            "the name '../rag' of a chat_template in tokenizer_config.json is no file's name",
        ),
        (
            "tokenizer_config.json",
            '{"note": ["a", "\\ud83d"]}',
            "tokenizer_config.json: note.1 holds half of a surrogate pair",
        ),
        ("chat_template.jinja", b"\xff", "byte 0 of chat_template.jinja is not UTF-8 text"),
        ("chat_template.json", b"[", "chat_template.json is not JSON"),
        (
            "chat_template.json",
            b'{"chat_template": 1}',
            "the chat_template in chat_template.json is no text",
        ),
    ],
)
@pytest.mark.parametrize("library", ["tiny_tokenizer/tokenizer.json", "tiny.model"])
def test_a_tokenizer_file_with_wrong_types_is_named(tmp_path, library, name, content, reason):
    shutil.copy(REPOSITORY / "data/fixtures" / library, tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ") and "\n" not in str(caught.value)
    # The sentencepiece engine reads this file first.
    assert reason in str(caught.value) or (
        library == "tiny.model" and name == "tokenizer_config.json"
    )


def test_bos_is_added_as_by_transformers(tmp_path):
    """With and without a post-processor that adds it."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    spec = json.loads((TINY / "tokenizer.json").read_text())
    for name, added in (("without", False), ("with", True)):
        shutil.copytree(TINY, tmp_path / name)
        from tokenizers import Tokenizer as Library

        library = Library.from_str(json.dumps(spec))
        if added:
            library.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 1)]
            )
        library.save(str(tmp_path / name / "tokenizer.json"))
        ours = Tokenizer.load(tmp_path / name)
        theirs = AutoTokenizer.from_pretrained(tmp_path / name)
        assert ours.adds_bos == (theirs("a")["input_ids"][0] == theirs.bos_token_id)
        assert ours.adds_bos == added


_TURNS_ONLY = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
_SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_LLAMA = {"tokenizer_class": "LlamaTokenizer", **_SENTENCEPIECE}


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {**_LLAMA, "legacy": True}),
        ("llama", {**_LLAMA, "legacy": False, "add_bos_token": True}),
        ("llama", {**_LLAMA, "tokenizer_class": "LlamaTokenizerFast"}),
        ("llama", {**_LLAMA, "add_prefix_space": False}),
        ("llama", {**_LLAMA, "add_prefix_space": True}),
        ("llama", {**_LLAMA, "add_bos_token": False, "add_eos_token": True}),
        ("llama", None),
        ("mistral", {**_LLAMA, "legacy": False, "add_bos_token": True}),
        ("phi3", _LLAMA),
        ("gemma2", {**_SENTENCEPIECE, "tokenizer_class": "GemmaTokenizer"}),
        (None, {**_LLAMA, "legacy": False}),
    ],
)
def test_a_sentencepiece_folder_has_transformers_ids(tmp_path, model_type, config):
    """Of texts and of turns between control tokens, as the files beside the model say; also after
    it is saved."""
    from transformers import AutoTokenizer

    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(MODEL, folder / "tokenizer.model")
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config is not None:
        config = {**config, "chat_template": _TURNS_ONLY}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ours.save(tmp_path / "saved")
    if model_type is not None:
        shutil.copy(folder / "config.json", tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    loaded = Tokenizer.load(tmp_path / "saved")
    assert loaded.fingerprint == ours.fingerprint
    if config and "add_prefix_space" in config:  # version 4 would convert tokenizer.model
        written = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    for text in ("The fox", " leading", "  two  spaces\n x ", "é 東京 🙂\t", "ﬁ１２ [INST]"):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == loaded.encode(text) == expected
        assert again(text, add_special_tokens=False)["input_ids"] == expected
    assert ours.adds_bos == (theirs("a")["input_ids"][0] == theirs.bos_token_id)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    if config is None:
        return
    turns = [{"role": role, "content": f"{role} x"} for role in ("user", "assistant") * 2]
    segments = render(
        _messages([(turn["role"], turn["content"]) for turn in turns]), "tokenizer", ours
    )
    for each in (theirs, again):
        assert each.apply_chat_template(turns, return_dict=False) == _ids(segments)


def test_a_file_of_tiktoken_is_named(tmp_path):
    """As in the folder `original` of Llama 3."""
    lines = [b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"tokenizer\.model is a file of tiktoken; the tokenizer\."):
        Tokenizer.load(tmp_path)


def test_empty_names_of_special_tokens_are_ignored(tmp_path):
    """As in LLaMA's first conversions; the model file names the tokens itself."""
    shutil.copy(MODEL, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "", "eos_token": "", "unk_token": ""})
    )
    assert (Tokenizer.load(tmp_path).bos_token, Tokenizer.load(tmp_path).eos_token) == (
        "<s>",
        "</s>",
    )


@pytest.mark.parametrize("described", [False, True])
def test_a_vocabulary_with_merges_encodes_as_in_transformers(tmp_path, described):
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, GPT2Tokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        ["the cat and the hat, then the mat"] * 9,
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    trained.save_model(str(tmp_path))
    if described:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    theirs = (AutoTokenizer if described else GPT2Tokenizer).from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    for text in ("the cat and the hat", " then é\n\n the", "mat"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    ours.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").encode("the hat") == ours.encode("the hat")


def _vocabulary_with_merges(folder, **config):
    """Writes a folder of vocab.json, merges.txt and tokenizer_config.json."""
    from tokenizers import Tokenizer as Library

    folder.mkdir(exist_ok=True)
    Library.from_file(str(TINY / "tokenizer.json")).model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("kind", "refused"), [("Own", True), ("GPT2Tokenizer", False)])
def test_code_of_a_tokenizers_folder_is_never_run(tmp_path, monkeypatch, kind, refused):
    """Even if somebody would agree; a class of transformers needs none of it."""
    folder = _vocabulary_with_merges(
        tmp_path / "in", tokenizer_class=kind, auto_map={"AutoTokenizer": ["own.Own", None]}
    )
    (folder / "own.py").write_text(
        f"from transformers import GPT2Tokenizer as Own\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    if refused:
        with pytest.raises(
            UserError, match=rf"^{folder}: vocab.json .*auto_map .* never run\); a folder with"
        ):
            Tokenizer.load(folder)
    else:
        assert Tokenizer.load(folder).encode("the") == Tokenizer.load(TINY).encode("the")
    assert not (tmp_path / "ran").exists()


def test_a_vocabulary_with_merges_follows_no_link_out_of_its_folder(tmp_path):
    folder = _vocabulary_with_merges(tmp_path / "in", tokenizer_class="BertTokenizer")
    (tmp_path / "secret").write_text("[UNK]\nPASSWORD\n")
    (folder / "vocab.txt").symlink_to(tmp_path / "secret")
    assert "PASSWORD" not in str(Tokenizer.load(folder)._files)
    (folder / "added_tokens.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"added_tokens\.json: leads to"):
        Tokenizer.load(folder)


def _replaces(text, content):
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [_replaces("a", "aa")] * 40}),
        ("normalizer", _replaces("a", "b" * 1_000_000)),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 100_000}),
        ("decoder", {"type": "Sequence", "decoders": [_replaces("a", "aa")] * 40}),
    ],
)
def test_a_tokenizer_that_inflates_text_to_gigabytes_is_refused(part, value, tmp_path):
    spec = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**spec, part: value}), encoding="utf-8")
    with pytest.raises(
        UserError,
        match=f"the {part} of its tokenizer.json turns one character into more than 1,000",
    ):
        Tokenizer.load(tmp_path)


def test_a_tokenizers_padding_and_truncation_are_ignored(tmp_path):
    """Padding to 10**11 tokens aborts the process."""
    spec = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    spec["padding"] = {
        **{"strategy": {"Fixed": 10**11}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
    }
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst"}
    spec["truncation"]["stride"] = 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    text = "a text of several words"
    assert Tokenizer.load(tmp_path).encode(text) == Tokenizer.load(TINY).encode(text)


def test_a_pattern_that_backtracks_endlessly_is_a_one_line_error(tmp_path, capfd):
    spec = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    pattern = {"Regex": "(a|aa)+$"}
    spec["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated"}
    spec["pre_tokenizer"]["invert"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(UserError, match=r"cannot encode a text of [0-9,]+ characters \(Onig"):
        tokenizer.encode("a" * 2000 + " b")


_TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
_PLAIN = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
_WITH_TOOLS = "{{ tools | tojson }}" + _PLAIN


@pytest.mark.parametrize(
    "files",
    [
        {  # the older file names other tokens; transformers uses them if the config adds none
            "tokenizer_config.json": {"chat_template": "{{ bos_token + eos_token }}" + _PLAIN},
            "special_tokens_map.json": {"bos_token": "</s>", "eos_token": {"content": "<s>"}},
        },
        {
            "tokenizer_config.json": {
                "chat_template": "{{ bos_token + eos_token }}" + _PLAIN,
                "added_tokens_decoder": {"2": {"content": "</s>", "special": True}},
            },
            "special_tokens_map.json": {"bos_token": "</s>", "eos_token": {"content": "<s>"}},
        },
        {  # more token names
            "tokenizer_config.json": {
                "sep_token": "</s>",
                "extra_special_tokens": {"image_token": "<pad>"},
                "chat_template": "{{ sep_token + image_token }}" + _PLAIN,
            },
        },
        {  # a separate template for tools, in three spellings
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "default", "template": _PLAIN},
                    {"name": "tool_use", "template": _WITH_TOOLS + "\n"},
                ]
            },
        },
        {
            "tokenizer_config.json": {
                "chat_template": {"default": "\n" + _PLAIN, "tool_use": _WITH_TOOLS}
            },
        },
        {
            "tokenizer_config.json": {},
            "chat_template.jinja": _PLAIN,
            "additional_chat_templates/tool_use.jinja": _WITH_TOOLS,
        },
        {
            "tokenizer_config.json": {},
            "additional_chat_templates/default.jinja": _PLAIN,
            "additional_chat_templates/rag.jinja": "{{ documents }}",
        },
        {  # in two files
            "tokenizer_config.json": {"chat_template": "{{ 'neither' }}"},
            "chat_template.jinja": "{{ 'none' }}",
            "additional_chat_templates/default.jinja": _PLAIN,
        },
    ],
)
@pytest.mark.parametrize("tools", [(), _TOOLS])
def test_token_names_and_templates_match_transformers(tmp_path, files, tools):
    from transformers import AutoTokenizer

    from data.conversation import Message

    folder = shutil.copytree(TINY, tmp_path / "tokenizer")
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        fields = {**config, **content} if name == "tokenizer_config.json" else content
        text = fields if isinstance(fields, str) else json.dumps(fields)
        (folder / name).write_text(text)
    messages = [Message(**turn) for turn in _TURNS]
    theirs = AutoTokenizer.from_pretrained(folder)
    Tokenizer.load(folder).save(tmp_path / "saved")
    expected = theirs.apply_chat_template(_TURNS, tools=list(tools) or None, return_dict=False)
    for path in (folder, tmp_path / "saved"):
        tokenizer = Tokenizer.load(path)
        segments = render(messages, "tokenizer", tokenizer, tools=tools)
        ids = [token for segment in segments for token in segment.ids]
        assert ids == expected, (tokenizer.decode(ids, False), theirs.decode(expected))


def test_the_template_of_an_image_models_processor_is_read_if_the_tokenizer_has_none(tmp_path):
    from transformers import AutoTokenizer, ProcessorMixin

    folder = shutil.copytree(TINY, tmp_path / "tokenizer")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": _PLAIN}))
    (folder / "processor_config.json").write_text("{}")
    expected = ProcessorMixin.get_processor_dict(folder)[0]["chat_template"]
    assert Tokenizer.load(folder).chat_template == expected == _PLAIN
    Tokenizer.load(folder).save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == expected
    config["chat_template"] = "{{ 'own' }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(folder).chat_template == "{{ 'own' }}"


@pytest.mark.parametrize("in_files", [False, True])
def test_other_templates_remain_beside_a_trained_one(tmp_path, in_files):
    """Transformers finds them by name; those that training replaces do not remain. They change no
    ids, so that a tokenizer with them needs no new preparation."""
    from transformers import AutoTokenizer

    config = json.loads((TINY / "tokenizer_config.json").read_text())
    named = {"default": "{{ 'old' }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    config["chat_template"] = named
    folder = shutil.copytree(TINY, tmp_path / "in")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    before = Tokenizer.load(folder).fingerprint
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        for name in ("default", "rag"):
            (folder / f"additional_chat_templates/{name}.jinja").write_text(named[name])
        assert Tokenizer.load(folder).fingerprint == before
    shutil.copytree(folder, tmp_path / "out")
    Tokenizer.load(folder).save(tmp_path / "out", "{{ 'trained' }}")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.chat_template == {"default": "{{ 'trained' }}", "rag": named["rag"]}
    assert Tokenizer.load(tmp_path / "out").chat_template == "{{ 'trained' }}"
