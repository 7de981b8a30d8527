"""The chat command prefills a document once, and refuses unusable documents."""

import dataclasses
import json
import os
import shutil
from types import SimpleNamespace

import pytest

from data.errors import UserError
from data.templates import render
from data.tokenizer import Tokenizer
from eval import runner
from scripts import chat
from tests import small_model
from tests.data.test_tokenizer import with_added

DOCUMENT = "The whale swam round the ship, and the ship sailed round the whale. " * 8


def arguments(model, *flags):
    command = f"{model} --sequence 8 --compute-dtype float32 --max-new-tokens 5 --chunk 64"
    return [*command.split(), *flags]


def test_a_document_is_read_once(hf_model, tmp_path):
    (tmp_path / "book.txt").write_text(DOCUMENT)
    args = chat.parse(
        arguments(hf_model, "--document", str(tmp_path / "book.txt"), "--length", "700")
    )
    args.rows = 1
    talk = chat.Talk(
        runner.open_respondent(args),
        chat.read_document(args.document),
        args.length,
        args.max_new_tokens,
    )
    first = talk.ask("Who swam?")
    read = talk.generator.prefilled
    shown = []
    second = talk.ask("Who sailed?", shown.append)
    assert "".join(shown) == second
    assert talk.generator.prefilled - read < 40 < read
    assert [turn.role for turn in talk.turns] == ["user", "assistant"] * 2 and talk.turns[
        1
    ].content == first
    assert (
        talk.turns[0].content.startswith("Here is a text.")
        and talk.turns[2].content == "Who sailed?"
    )
    segments = render(
        talk.turns[:3], "tokenizer", talk.respondent.tokenizer, add_generation_prompt=True
    )
    ids = [token for segment in segments for token in segment.ids]
    talk.generator.free_cache()
    assert (
        talk.respondent.tokenizer.decode(talk.generator(talk.opened.params, [ids])[0]).strip()
        == second
    )
    talk.forget()
    assert talk.ask("Who swam?") == first
    with pytest.raises(UserError, match="tokens, and 695 fit; /new starts a new one"):
        talk.ask("word " * 700)
    assert len(talk.turns) == 2


def test_tags_of_an_answer_are_shown_and_part_of_the_next_prompt(tmp_path, monkeypatch):
    """Such as <think> and <tool_call>, which are not special: as transformers decodes and renders
    them. What the user types stays text."""
    from transformers import AutoTokenizer

    folder = with_added(tmp_path / "in", ["<think>", "</think>", "<tool_call>", "</tool_call>"])
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}{% else %}[answer]"
        "{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}[answer]"
    )
    tokenizer, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    answer = theirs("<think>Hm.</think><tool_call>go</tool_call></s>", add_special_tokens=False)
    asked: list[list[int]] = []
    talk, shown = chat.Talk.__new__(chat.Talk), []
    talk.opened, talk.turns, talk.document = SimpleNamespace(params={}), [], None
    talk.length, talk.new_tokens, talk._fit = 900, 5, lambda tokens: None
    talk.respondent = SimpleNamespace(
        tokenizer=tokenizer, ids=lambda prompt: runner.prompt_ids(prompt, tokenizer, "tokenizer")
    )
    talk.generator = SimpleNamespace(
        stream=lambda params, ids: asked.append(ids) or answer["input_ids"]
    )
    text = theirs.decode(answer["input_ids"], skip_special_tokens=True)
    assert talk.ask("Hi", shown.append) == "".join(shown) == text and "<tool_call>" in text
    talk.ask("Ho")
    turns = [("user", "Hi"), ("assistant", text), ("user", "Ho")]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], return_dict=False
    )
    assert asked[1] == expected
    talk.forget()
    talk.ask("<think>")
    assert tokenizer.controls["<think>"].id not in asked[-1]


def test_a_conversation_is_embedded_by_its_own_length(tmp_path):
    """Under longrope its frequencies are those that transformers takes for as many tokens, not those
    of the longest conversation."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = small_model.write(tmp_path, small_model.LONGROPE)
    args = chat.parse(arguments(folder))
    args.rows = 1
    talk = chat.Talk(runner.open_respondent(args), None, args.length, args.max_new_tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def expected(question):
        ids = talk._ids([*talk.turns, talk._user(question)])
        stops = list(talk.respondent.stops)
        both = model.generate(
            torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=stops
        )[0].tolist()
        new = [token for token in both[len(ids) :] if token not in stops]
        return talk.respondent.tokenizer.decode(new).strip(), len(ids) + len(new)

    for question in ("Who swam?", "Who sailed? " * 20, "Where?"):
        answer, tokens = expected(question)
        assert (talk.ask(question), talk.tokens) == (answer, tokens)
    assert talk.tokens > 128
    talk.forget()
    answer, tokens = expected("Who swam?")
    assert (talk.ask("Who swam?"), talk.tokens) == (answer, tokens) and tokens < 128


def test_a_conversation_beyond_the_trained_length_is_noted_once(hf_model, monkeypatch, capsys):
    monkeypatch.setattr(
        chat.Talk, "ask", lambda self, question, show: setattr(self, "tokens", int(question))
    )
    assert chat.main(arguments(hf_model, "--question", "1", "--question", "128")) == 0
    assert capsys.readouterr().err == ""
    assert chat.main(arguments(hf_model, "--question", "128", "129", "--question", "300")) == 0
    assert capsys.readouterr().err == (
        "note: conversations of more than 128 tokens are beyond the trained length; this one has "
        "129\n"
    )


def test_a_question_in_another_encoding_is_not_asked():
    """Its bytes would be U+FFFD to the tokenizer."""
    with pytest.raises(UserError, match="not asked, since it is not UTF-8: caf"):
        chat.Talk.__new__(chat.Talk).ask(os.fsdecode(b"caf\xe9"))


def test_pieces_are_printed_per_token_and_have_whole_characters():
    """With a byte-level tokenizer, each piece is printed before the next token is computed."""
    log = []

    def computed(text):
        for byte in text.encode():
            log.append(byte)
            yield byte

    text = " \n a é🙂  b\ufffd c \n"
    for piece in chat.pieces(computed(text), lambda ids: bytes(ids).decode(errors="replace")):
        log.append(piece)
    shown = [item for item in log if isinstance(item, str)]
    assert shown == ["a", " é", "🙂", "  b", "\ufffd", " c"] and "".join(shown) == text.strip()
    assert (
        log[log.index(" é") - 1] == "é".encode()[-1]
        and log[log.index("🙂") - 1] == "🙂".encode()[-1]
    )
    # Half a character at the very end is shown, as in the whole text.
    assert (
        "".join(chat.pieces(b"ab\xf0\x9f", lambda ids: bytes(ids).decode(errors="replace")))
        == "ab\ufffd"
    )


def test_an_answer_cannot_control_the_terminal(hf_model, monkeypatch, capsys):
    parts = ("red:\x1b", "[31m\ttitle:\x1b]0;x\x07\nn", "ext é")
    monkeypatch.setattr(
        chat.Talk, "ask", lambda self, question, show: [show(part) for part in parts]
    )
    assert chat.main(arguments(hf_model, "--question", "Who?", "--length", "700")) == 0
    assert capsys.readouterr().out.endswith("red:\ufffd[31m\ttitle:\ufffd]0;x\ufffd\nnext é\n")


def test_unusable_documents_are_refused(hf_model, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text(" ")
    (tmp_path / "book.txt").write_text(DOCUMENT)
    for flags, words in (
        (
            ["--document", str(tmp_path / "gone.txt")],
            "gone.txt cannot be read (No such file or directory)",
        ),
        (["--document", str(tmp_path / "empty.txt")], "is empty"),
        (
            ["--question", "?", "--template", "vicuna_v1.1", "--length", "3"],
            "--length: found 3; a question and an answer of --max-new-tokens 5 take about",
        ),
        (
            ["--question", "?", "--length", "200", "--max-new-tokens", "256"],
            "or --max-new-tokens ",
        ),
        (
            ["--document", str(tmp_path / "book.txt"), "--length", "200"],
            "--length: found 200; the document, a question and an answer of --max-new-tokens 5",
        ),
    ):
        assert chat.main(arguments(hf_model, *flags)) == 2
        assert words in capsys.readouterr().err
    shutil.copytree(hf_model, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    settings = tmp_path / "plain" / "tokenizer_config.json"
    settings.write_text(
        json.dumps(
            {k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}
        )
    )
    assert chat.main(arguments(tmp_path / "plain", "--question", "Who?")) == 2
    assert (
        "its tokenizer has no chat template; pass the one it was trained with"
        in capsys.readouterr().err
    )


def test_a_token_that_the_model_lacks_is_refused(tmp_path, capsys):
    """The author added tokens and did not resize the model: transformers raises an IndexError."""
    folder = small_model.write(tmp_path, dataclasses.replace(small_model.CONFIG, vocab_size=300))
    assert chat.main(arguments(folder, "--question", "Who swam in the sea?")) == 2
    error = capsys.readouterr().err
    assert "prompt: found the id " in error and "the model has 300 rows of vocabulary" in error
