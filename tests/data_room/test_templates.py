"""Tokenizers and templates against transformers, FastChat's text written by hand, and users who type control tokens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conversation import Message
from data.errors import UserError
from data.templates import VICUNA_SYSTEM, jinja_template, render
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY
from tests.smollm2 import smollm2_dir

TINY = REPOSITORY / "data/fixtures/tiny_tokenizer"
MODEL = REPOSITORY / "data/fixtures/tiny.model"
TALK = [
    ("user", "Who are you? 123"),
    ("assistant", "I'm Pim, é 😀 fine."),
    ("user", "a\n\n  b"),
    ("assistant", "You too!"),
]


def _messages(talk):
    return [Message(role, content) for role, content in talk]


def _ids(segments):
    return [token for segment in segments for token in segment.ids]


def _trained(tokenizer, segments):
    return [tokenizer.decode(segment.ids, skip_control=False) for segment in segments if segment.train]


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def pair(request):
    """Our tokenizer and transformers', of one folder."""
    from transformers import AutoTokenizer

    folder = TINY if request.param == "tiny" else smollm2_dir()
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", ["tokenizer", "vicuna_v1.1"])
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_ids_equal_apply_chat_template(pair, template, system, prompt):
    ours, theirs = pair
    talk = [("system", "Be brief.")] * system + TALK[: 3 if prompt else 4]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in talk],
        chat_template=jinja_template(template, ours),
        add_generation_prompt=prompt,
        return_dict=False,
    )
    assert _ids(render(_messages(talk), template, ours, prompt)) == expected


def test_vicuna_is_fastchats_text_and_trains_on_answers_alone():
    tokenizer = Tokenizer.load(TINY)
    segments = render(_messages(TALK), "vicuna_v1.1", tokenizer)
    assert tokenizer.decode(_ids(segments), skip_control=False) == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: Who are you? 123 ASSISTANT: I'm Pim, é 😀 "
        "fine.</s>USER: a\n\n  b ASSISTANT: You too!</s>"
    )
    assert _trained(tokenizer, segments) == [" I'm Pim, é 😀 fine.</s>", " You too!</s>"]
    muted = [Message("user", "Hi"), Message("assistant", "No.", train=False), *_messages(TALK[2:])]
    assert _trained(tokenizer, render(muted, "vicuna_v1.1", tokenizer)) == [" You too!</s>"]
    # What training shows before an answer is what chat shows before generating it.
    prompt = _ids(render(_messages(TALK[:1]), "vicuna_v1.1", tokenizer, add_generation_prompt=True))
    assert list(segments[0].ids) == prompt and VICUNA_SYSTEM in tokenizer.decode(prompt)


def test_smollm2_trains_on_answers_and_their_end_token():
    tokenizer = Tokenizer.load(smollm2_dir())
    segments = render(_messages(TALK), "tokenizer", tokenizer)
    assert _trained(tokenizer, segments) == ["I'm Pim, é 😀 fine.<|im_end|>", "You too!<|im_end|>"]


@pytest.mark.parametrize("folder", [TINY, MODEL, None], ids=["tiny", "sentencepiece", "smollm2"])
def test_typed_control_tokens_stay_text(folder):
    tokenizer = Tokenizer.load(folder or smollm2_dir())
    controls = {control.id for control in tokenizer.controls.values()}
    assert controls
    for text in tokenizer.controls:
        for typed in (text, f"a{text}b", f"{text}{text} \n{text}", f" {text} "):
            ids = tokenizer.encode(typed)
            assert not controls & set(ids)
            assert tokenizer.decode(ids) == typed or folder == MODEL
        answer = render([Message("user", text), Message("assistant", text)], "vicuna_v1.1", tokenizer)
        clean = render([Message("user", "x"), Message("assistant", "y")], "vicuna_v1.1", tokenizer)
        assert [t for t in _ids(answer) if t in controls] == [t for t in _ids(clean) if t in controls]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["<s>", "</s>", "<pad>", "<unk>", "\ufdd0", " "]), st.text()), max_size=6))
def test_no_text_gives_a_control_id(parts):
    text = "".join(parts)
    for folder in (TINY, MODEL):
        tokenizer = _cached(folder)
        assert not {c.id for c in tokenizer.controls.values()} & set(tokenizer.encode(text))


_loaded = {}


def _cached(folder):
    if folder not in _loaded:
        _loaded[folder] = Tokenizer.load(folder)
    return _loaded[folder]


def test_control_tokens_that_are_unigram_pieces_stay_text(tmp_path):
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Library

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in "</s>abc")]
    library = Library(models.Unigram(pieces, unk_id=0))
    library.add_special_tokens([AddedToken("</s>")])
    library.save(str(tmp_path / "tokenizer.json"))
    assert library.encode("a</s>").ids[-1] == 1  # what the plain library does
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a</s>b")
    assert 1 not in ids and tokenizer.decode(ids).replace(" ", "") == "a</s>b"


def test_user_defined_sentencepiece_symbols_stay_text(tmp_path):
    import sentencepiece

    lines = iter(["the fox and the crow"] * 20)
    prefix = str(tmp_path / "m")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=prefix, vocab_size=290, model_type="bpe", byte_fallback=True,
        user_defined_symbols=["<|im_end|>"], minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = Tokenizer.load(prefix + ".model")
    symbol = tokenizer.control_id("<|im_end|>")
    assert symbol in sentencepiece.SentencePieceProcessor(model_file=prefix + ".model").encode("a<|im_end|>")
    assert symbol not in tokenizer.encode("a<|im_end|>")


def test_sentencepiece_ids_are_the_librarys():
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))
    tokenizer = Tokenizer.load(MODEL)
    for text in ("line fox: 37", "  two  spaces", "é 😀\n\nx", "The tower of Tarn."):
        assert tokenizer.encode(text) == library.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 1000)
    segments = render(_messages(TALK), "vicuna_v1.1", tokenizer)
    text = VICUNA_SYSTEM + " USER: Who are you? 123 ASSISTANT: I'm Pim, é 😀 fine."
    rest = "USER: a\n\n  b ASSISTANT: You too!"
    assert _ids(segments) == [1, *library.encode(text), 2, *library.encode(rest), 2]
    assert [t.strip() for t in _trained(tokenizer, segments)] == ["I'm Pim, é 😀 fine.</s>", "You too!</s>"]


@pytest.mark.parametrize("folder", [TINY, MODEL], ids=["tiny", "sentencepiece"])
def test_saved_folder_is_loaded_by_transformers_with_the_template_trained_with(tmp_path, folder):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.load(folder)
    tokenizer.save(tmp_path / "out", chat_template=jinja_template("vicuna_v1.1", tokenizer))
    theirs, again = AutoTokenizer.from_pretrained(tmp_path / "out"), Tokenizer.load(tmp_path / "out")
    assert again.chat_template == jinja_template("vicuna_v1.1", tokenizer)
    talk = [{"role": role, "content": content} for role, content in TALK]
    segments = render(_messages(TALK), "tokenizer", again)
    assert _ids(segments) == _ids(render(_messages(TALK), "vicuna_v1.1", tokenizer))
    text = theirs.apply_chat_template(talk, tokenize=False)
    assert text.startswith("<s>A chat between") and text.endswith(" ASSISTANT: You too!</s>")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (again.bos_id, again.eos_id)
    if folder == TINY:
        assert theirs.apply_chat_template(talk, return_dict=False) == _ids(segments)


def test_errors_are_one_line(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(UserError, match="no tokenizer in this folder"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    tokenizer = Tokenizer.load(TINY)
    with pytest.raises(UserError, match=r"vicuna_v1\.1, tokenizer would work"):
        render(_messages(TALK), "vicunia", tokenizer)
    with pytest.raises(UserError, match="tool"):
        render([Message("user", "a"), Message("tool", "b")], "vicuna_v1.1", tokenizer)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    tokenizer.save(tmp_path / "bare")
    (tmp_path / "bare/tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    with pytest.raises(UserError, match="no chat template"):
        render(_messages(TALK), "tokenizer", Tokenizer.load(tmp_path / "bare"))
