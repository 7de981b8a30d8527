"""A user's own chat template in a file, against transformers' apply_chat_template with it."""

import pytest
import transformers

from data.conversation import Message
from data.encode import EncodingRules
from data.errors import UserError
from data.job import Job
from data.sources import Source, Sources
from data.templates import render
from data.templates.sandbox import MAX_SOURCE
from data.templates.template_file import read_template
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

TINY = REPOSITORY / "data/fixtures/tiny_tokenizer"
OWN = (
    "{{ bos_token }}{% for message in messages %}<<{{ message['role'] }}>>\n"
    "{{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<<assistant>>\n{% endif %}\n"
)
TURNS = [Message("user", "Who are you? é"), Message("assistant", " I'm Pim. ")]


@pytest.fixture
def tokenizer():
    return Tokenizer.load(TINY)


def ids(tokenizer):
    return [token for part in render(TURNS, "tokenizer", tokenizer) for token in part.ids]


def test_the_ids_are_those_of_transformers_and_the_answer_is_trained(tokenizer, tmp_path):
    (tmp_path / "own.j2").write_text(OWN, encoding="utf-8")
    own = tokenizer.with_chat_template(read_template(str(tmp_path / "own.j2")))
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    turns = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    expected = theirs.apply_chat_template(turns, chat_template=OWN, return_dict=False)
    assert ids(own) == expected != ids(tokenizer)
    trained = [
        own.decode(part.ids, skip_special=False)
        for part in render(TURNS, "tokenizer", own)
        if part.train
    ]
    assert trained == [f"I'm Pim.{tokenizer.eos_token}"]


def test_other_tokenizers_of_it_keep_the_template(tokenizer, tmp_path):
    """Processes that encode get the tokenizer's files; control tokens are added to it."""
    own = tokenizer.with_chat_template(OWN)
    own.save(tmp_path)
    saved = Tokenizer.load(tmp_path, as_saved=True)
    assert (saved.chat_template, saved.fingerprint) == (OWN, own.fingerprint)
    assert ids(saved) == ids(own)
    assert own.with_controls(["<|new|>"]).chat_template == OWN
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template == OWN


def test_prepared_data_are_named_by_the_templates_text(tokenizer, tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"messages": ["a question", "an answer"]}\n')

    def name(text):
        chats = Source(str(tmp_path / "chats.jsonl"), template="tokenizer")
        own = tokenizer.with_chat_template(text)
        return Job(Sources((chats,), (), 0.0), own, EncodingRules(64)).key()

    assert name(OWN) == name(OWN)
    assert len({name(OWN), name(OWN.replace("<<", "[["))}) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot be read (No such file or directory); a file with a Jinja template would"]),
        (b" \n", ["is empty; a Jinja template would work"]),
        (b"\xff", ["byte 0 is not UTF-8 text"]),
        (b"{% for x in %}", ["is not Jinja: line 1: "]),
        (b"x" * (MAX_SOURCE + 1), ["has 50,001 characters; up to 50,000 would work"]),
        (b"x" * (4 * MAX_SOURCE + 1), ["has 200,001 bytes; up to 200,000 would work"]),
        (b"{% include 'other.jinja' %}", []),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path, content, words):
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_template(str(path))
    for word in [str(path), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
