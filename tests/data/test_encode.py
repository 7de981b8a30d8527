"""Encoding: texts, token ids, conversations and pairs by hand; several processes."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from data.clean import CleanConfig
from data.conversation import Conversation, Labelled, Message, Preference, Text, Tokens
from data.encode import (
    BATCH,
    CUT,
    CUT_PROMPT,
    FOREIGN_ID,
    LONG_PAIR,
    NO_TARGET,
    NOT_PAIRED,
    OTHER_PROMPT,
    TYPED_IN_TEXT,
    Encoder,
    EncodingRules,
    encode_all,
)
from data.errors import TransientError
from data.prepare import prepare
from data.reasons import SPLIT
from data.report import Report
from data.sources import Source, Sources, read
from data.templates import encode_conversation
from data.templates.loss import NO_END
from data.templates.rendering import Rendered, Template
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

# Sends Ctrl-C to all processes, as a terminal does, while the first one imports its modules.
INTERRUPTED = """
import os, signal, sys, time
from data.conversation import Text
from data.encode import BATCH, Encoder, EncodingRules, encode_all
from data.sources import Source
from data.tokenizer import Tokenizer
from trainer import entry

def records():
    yield from (Text(str(number), "a text") for number in range(BATCH))
    time.sleep(0.4)
    os.killpg(0, signal.SIGINT)
    time.sleep(60)

tokenizer = Tokenizer.load("data/fixtures/tiny_tokenizer")
encoder = Encoder(Source("", "text"), tokenizer, EncodingRules(64))
sys.exit(entry.run(lambda: list(encode_all(encoder, records(), processes=2))))
"""


TINY = "data/fixtures/tiny_tokenizer"


@pytest.fixture
def tiny():
    return Tokenizer.load("data/fixtures/tiny_tokenizer")


def encoder_of(tokenizer, context_length, **rules):
    """Returns an encoder of a source with the tokenizer's own template."""
    return Encoder(Source(""), tokenizer, EncodingRules(context_length, **rules))


def test_ctrl_c_while_several_processes_tokenize_prints_one_line(repository):
    finished = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "stopped\n")


def test_a_killed_worker_process_is_named(tiny):
    """As the system kills one when memory runs out."""

    def records():
        yield from (Text(str(number), "a text") for number in range(3 * BATCH))
        for process in multiprocessing.active_children():
            process.kill()
        yield from (Text(str(number), "a text") for number in range(9 * BATCH))

    encoder = Encoder(Source("", "text"), tiny, EncodingRules(16))
    with pytest.raises(TransientError, match=r"^one of 2 processes .* ended, perhaps killed for"):
        list(encode_all(encoder, records(), processes=2))


def test_a_full_disk_for_temporary_files_is_named(tiny, tmp_path, monkeypatch):
    """Else the prepared folder's disk would be."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Tokenizer, "save", full)
    encoder = Encoder(Source("", "text"), tiny, EncodingRules(16))
    with pytest.raises(TransientError, match=rf"^{tmp_path}/.*: No space left on device; "):
        list(encode_all(encoder, [Text("a", "a text")], processes=2))


@pytest.mark.slow
def test_worker_processes_end_with_their_parent(tmp_path):
    """A killed process cannot stop its own workers."""
    code = (
        "import itertools, os; from data.conversation import Text\n"
        "from data.encode import Encoder, EncodingRules, encode_all\n"
        "from data.sources import Source; from data.tokenizer import Tokenizer\n"
        "if __name__ == '__main__':\n"
        "    tokenizer = Tokenizer.load('data/fixtures/tiny_tokenizer')\n"
        "    encoder = Encoder(Source('', 'text'), tokenizer, EncodingRules(64))\n"
        "    for number, _ in enumerate(encode_all(encoder, itertools.repeat(Text('a', 'text')), 2)):\n"
        "        if number == 1000: print('at work', flush=True)\n"
    )
    path = tmp_path / "work.py"
    path.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(path)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "at work\n"
        children = [
            int(number)
            for number in Path(f"/proc/{process.pid}/task/{process.pid}/children")
            .read_text()
            .split()
        ]
        process.kill()
    assert len(children) >= 2
    deadline = time.monotonic() + 20
    while alive := [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def test_a_text_is_encoded_and_its_prompt_is_not_trained_on(repository):
    """BOS, the text, EOS; after a prompt of 5 characters only the tokens beyond it, and EOS, are
    trained on."""
    tokenizer = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    spans = tokenizer.encode_spans("Hello there, you")
    ids = [tokenizer.bos_id, *spans.ids, tokenizer.eos_id]
    encoder = Encoder(Source("", "text", add_bos=True), tokenizer, EncodingRules(64))
    for prompt, mask in (
        (0, [1] * len(ids)),
        (5, [0, *(int(end > 5) for _, end in spans.offsets), 1]),
    ):
        (document,) = encoder.encode(Text("a", "Hello there, you", prompt=prompt)).documents
        assert document.tokens.tolist() == ids and document.loss_mask.tolist() == mask
    assert any(end == 5 for _, end in spans.offsets), "no token ends with the prompt"


def test_control_tokens_in_a_text_are_plain_text_or_those_of_transformers(tmp_path):
    """Plain text by default, and counted; with a source's `control_tokens` a text that a chat
    template has rendered has transformers' ids, and no second BOS or EOS."""
    transformers = pytest.importorskip("transformers")
    marks = ["<|im_start|>", "<|im_end|>"]
    Tokenizer.load(TINY).with_controls(marks).save(tmp_path / "tokenizer")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    prompt = "<s><|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    text = prompt + "Four.<|im_end|>\n"
    as_text, as_controls = (
        Encoder(
            Source("", "text", add_bos=True, control_tokens=control_tokens),
            tokenizer,
            EncodingRules(64),
        )
        for control_tokens in (False, True)
    )
    plain = as_text.encode(Text("a", text))
    assert plain.changes == {TYPED_IN_TEXT + token for token in ("<s>", *marks)}
    (document,) = plain.documents
    controls = {control.id for control in tokenizer.controls.values()}
    assert controls.isdisjoint(document.tokens[1:-1]) and document.loss_mask.all()
    for written, end in ((text, [tokenizer.eos_id]), (text + "</s>", []), (text + "</s>\n", [])):
        rendered = as_controls.encode(Text("a", written, prompt=len(prompt)))
        ids = theirs(written, add_special_tokens=False)["input_ids"] + end
        (document,) = rendered.documents
        assert not rendered.changes and document.tokens.tolist() == ids
        first = len(theirs(prompt, add_special_tokens=False)["input_ids"])
        assert document.loss_mask.tolist() == [0] * first + [1] * (len(ids) - first)
    assert as_controls.encode(Text("a", "Hello")).documents[0].tokens.tolist() == [
        tokenizer.bos_id,
        *tokenizer.encode("Hello"),
        tokenizer.eos_id,
    ]


def test_prepared_texts_differ_by_their_sources_control_tokens(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("<s>Hello")
    tokenizer = Tokenizer.load(TINY)
    counts = []
    for control_tokens in (False, True):
        source = Source(str(path), format="text", control_tokens=control_tokens)
        prepared = prepare(Sources((source,)), tokenizer, EncodingRules(64), tmp_path / "prepared")
        counts.append((prepared.train[0].tokens == tokenizer.bos_id).sum())
    assert counts == [int(tokenizer.adds_bos), 1]


def test_a_records_template_variables_override_the_recipes(tmp_path):
    """A template that writes `mood` after each turn; a value that is not a dictionary is ignored
    and counted."""
    path = tmp_path / "talks.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [
        {"id": "own", "messages": turns, "chat_template_kwargs": {"mood": "x"}},
        {"id": "recipe's", "messages": turns},
        {"id": "no dictionary", "messages": turns, "chat_template_kwargs": "x"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = Tokenizer.load("data/fixtures/tiny_tokenizer").with_template_kwargs({"mood": "y"})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}"
    report = Report()
    talks = read(Source(path), report, clean=CleanConfig(duplicates=False))
    encoder = encoder_of(tokenizer, 64)
    texts = [
        tokenizer.decode(encoder.encode(talk).documents[0].tokens, skip_special=False)
        for talk in talks
    ]
    assert [text.strip() for text in texts] == ["axbx", "ayby", "ayby"]
    assert report.sources[0].unread == {"record field `chat_template_kwargs`": 1}


def tokens(ids, mask=None):
    ids = np.asarray(ids, np.int32)
    return Tokens("a", ids, np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool))


def pieces(encoded):
    return [(d.tokens.tolist(), d.loss_mask.tolist()) for d in encoded.documents]


def test_token_ids_are_cut_at_context_length_and_pieces_without_a_target_dropped(tiny):
    """A document's first token is not a target, so a piece of one token has none."""
    encoder = encoder_of(tiny, 4)
    assert pieces(encoder.encode(tokens([5, 6, 7, 8]))) == [([5, 6, 7, 8], [1] * 4)]
    assert not encoder.encode(tokens([5, 6, 7, 8])).changes
    cut = encoder.encode(tokens([5, 6, 7, 8, 9, 5, 6, 7, 8]))
    assert pieces(cut) == [([5, 6, 7, 8], [1] * 4), ([9, 5, 6, 7], [1] * 4)]
    assert cut.changes == {CUT}
    masked = encoder.encode(tokens([5, 6, 7, 8, 9, 5], mask=[0, 0, 0, 0, 1, 0]))
    assert not masked.documents and masked.drop_reason == NO_TARGET
    masked = encoder.encode(tokens([5, 6, 7, 8, 9, 5], mask=[1, 0, 0, 0, 0, 1]))
    assert pieces(masked) == [([9, 5], [0, 1])]


@pytest.mark.parametrize("on_disk", [False, True])
def test_ids_outside_the_vocabulary_are_dropped(tiny, on_disk, tmp_path):
    for wrong, reason in ((-1, FOREIGN_ID), (tiny.vocab_size, FOREIGN_ID), (0, None)):
        ids = np.asarray([5, wrong, tiny.vocab_size - 1], np.int32)
        encoded = encoder_of(tiny, 8).encode(on_disk_or_not(ids, on_disk, tmp_path))
        assert encoded.drop_reason == reason and len(encoded.documents) == (reason is None)


def on_disk_or_not(ids, on_disk, folder):
    if not on_disk:
        return tokens(ids)
    np.save(folder / "ids.npy", ids)
    mapped = np.load(folder / "ids.npy", mmap_mode="r")
    return Tokens("a", mapped, np.ones(len(ids), bool))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 10])
def test_an_array_on_disk_is_cut_like_one_in_memory(tiny, tmp_path, count):
    encoder, ids = encoder_of(tiny, 4), np.arange(5, 5 + count, dtype=np.uint16)
    mapped = encoder.encode(on_disk_or_not(ids, True, tmp_path))
    in_memory = encoder.encode(tokens(ids))
    assert pieces(mapped) == pieces(in_memory)
    assert (mapped.changes, mapped.drop_reason) == (in_memory.changes, in_memory.drop_reason)
    for outside in (-1, len(mapped.documents)):
        with pytest.raises(IndexError):
            mapped.documents[outside]


def talk(*texts, trained=()):
    return tuple(
        Message(("user", "assistant")[i % 2], text, train=not trained or i in trained)
        for i, text in enumerate(texts)
    )


@pytest.fixture
def letters(tiny):
    """Returns a tokenizer whose template writes only the letters of turns, one token each."""
    tiny.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tiny


def text_of(tokenizer, document):
    return tokenizer.decode(document.tokens, skip_special=False)


def test_a_long_conversation_is_split_between_exchanges_or_cut(letters):
    talk_of_two = Conversation("a", talk("QQQ", "AAA", "BBB", "CCC"))
    (whole,) = encoder_of(letters, 99).encode(talk_of_two).documents
    length = len(whole.tokens)
    split = encoder_of(letters, length - 1).encode(talk_of_two)
    assert [text_of(letters, d).strip() for d in split.documents] == ["QQQAAA", "BBBCCC"]
    assert split.changes == {SPLIT, NO_END}
    cut = encoder_of(letters, length - 1, clean=CleanConfig(split=False)).encode(talk_of_two)
    assert len(cut.documents[0].tokens) == length - 1 and cut.changes == {CUT, NO_END}
    assert encoder_of(letters, length).encode(talk_of_two).changes == {NO_END}


def test_train_on_last_trains_only_the_last_answer(letters):
    conversation = Conversation("a", talk("Q", "A", "B", "C"))
    for train_on, trained in (("all", "AC"), ("last", "C")):
        encoder = encoder_of(letters, 99, train_on=train_on)
        (document,) = encoder.encode(conversation).documents
        ids = document.tokens[document.loss_mask.astype(bool)]
        assert "".join(letters.decode(ids).split()) == trained


# A template that marks what the assistant writes; here the marks make no difference.
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}\n{% endfor %}"
)


def test_train_on_everything_gives_the_labels_of_trl(tiny):
    """Its SFTConfig has assistant_only_loss=False by default: the collator copies the ids."""
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    collator = DataCollatorForLanguageModeling(pad_token_id=theirs.pad_token_id)
    turns = [("system", "Be brief."), ("user", "Hello there."), ("assistant", "Hi!")]
    turns += [("user", "Who are you?"), ("assistant", "A model.")]
    talks = [{"role": role, "content": content} for role, content in turns]
    conversation = Conversation("a", tuple(Message(*turn) for turn in turns))
    for template in (tiny.chat_template, MARKED):
        theirs.chat_template = tiny.chat_template = template
        ids = theirs.apply_chat_template(talks, return_dict=True)["input_ids"]
        (labels,) = collator([{"input_ids": ids}])["labels"].tolist()
        (document,) = encoder_of(tiny, 999, train_on="everything").encode(conversation).documents
        assert document.tokens.tolist() == labels and document.loss_mask.all()


def test_train_on_everything_leaves_out_turns_that_a_flag_excludes(letters):
    """What remains besides the excluded answer is all that the answers-only loss leaves out."""
    turns = talk("QQ", "AA", "BB", "CC")
    turns = (turns[0], replace(turns[1], train=False), replace(turns[2], train=False), turns[3])
    (document,) = (
        encoder_of(letters, 99, train_on="everything").encode(Conversation("a", turns)).documents
    )
    trained = letters.decode(document.tokens[document.loss_mask.astype(bool)])
    assert "".join(trained.split()) == "QQCC"
    answers = [replace(turn, train=turn.role == "assistant" and not turn.train) for turn in turns]
    (excluded,) = encoder_of(letters, 99).encode(Conversation("a", tuple(answers))).documents
    both = document.loss_mask & excluded.loss_mask
    assert not both.any() and excluded.loss_mask.any()


def test_a_token_with_part_of_an_excluded_turn_is_left_out_of_everything(tiny):
    """Such as one of the template's space and the turn's first letters."""
    tiny.chat_template = "{% for m in messages %}> {{ m.content }}|{% endfor %}"
    turns = [Message("user", "the of", train=False), Message("assistant", "X")]
    turns += [Message("user", "Q"), Message("assistant", "in to", train=False)]
    (document,) = (
        encoder_of(tiny, 99, train_on="everything")
        .encode(Conversation("a", tuple(turns)))
        .documents
    )
    assert " the" in [tiny.decode([token]) for token in document.tokens.tolist()]
    trained = tiny.decode(document.tokens[document.loss_mask.astype(bool)])
    assert "".join(trained.split()) == ">|>X|>Q|>"  # the last | ends the answer


def with_prompt(turns):
    """Returns turns whose first one is the prompt of the others."""
    return (replace(turns[0], in_prompt=True, train=False), *turns[1:])


LAST_ALONE = (
    "{% for m in messages %}{{ 'X' if m.role == 'user' and not loop.last }}{{ m.content }}"
    "{% endfor %}"
)
NO_QUESTION_LAST = (
    "{% if messages[-1].role == 'user' %}{{ raise_exception('no answer') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "trained", "note"),
    [
        (LAST_ALONE, ["XQQAAXBBCC", "XQQNNXBBCC"], {OTHER_PROMPT}),  # as in TRL, which warns
        (NO_QUESTION_LAST, ["AABBCC", "NNBBCC"], set()),  # which TRL refuses
    ],
)
def test_a_prompt_that_the_template_writes_otherwise_alone(letters, template, trained, note):
    letters.chat_template = template
    chosen, rejected = (
        Conversation("a", with_prompt(talk("QQ", answer, "BB", "CC"))) for answer in ("AA", "NN")
    )
    encoded = encoder_of(letters, 99).encode(Preference("a", chosen, rejected))
    (document,) = encoded.documents
    ids = np.where(document.loss_mask, document.tokens, -1)
    parts = ids[: document.chosen], ids[document.chosen :]
    assert [
        "".join(letters.decode([i]).strip() for i in part if i >= 0) for part in parts
    ] == trained
    assert encoded.changes == {NO_END} | note
    everything = encoder_of(letters, 99, train_on="everything").encode(chosen)
    assert (
        everything.documents[0].loss_mask.tolist() == document.loss_mask[: document.chosen].tolist()
    )
    assert everything.changes == note


def test_both_completions_of_a_pair_begin_where_the_first_leaves_the_prompt(letters):
    """As in TRL's DPO; each in KTO, which takes them one by one."""
    letters.chat_template += "{% if add_generation_prompt %}AB{% endif %}"
    chosen, rejected = (
        Conversation("a", with_prompt(talk("Q", answer))) for answer in ("ABC", "AXX")
    )
    for unpaired, expected in ((False, "BC XX"), (True, "C XX")):
        encoder = encoder_of(letters, 99, unpaired=unpaired)
        documents = encoder.encode(Preference("a", chosen, rejected)).documents
        ids = np.concatenate([document.tokens for document in documents])
        mask = np.concatenate([document.loss_mask for document in documents])
        texts = [letters.decode([i]).strip() if m else " " for i, m in zip(ids, mask, strict=True)]
        assert "".join(texts).split() == expected.split()


def test_a_flag_excludes_an_answer_of_a_completion(letters):
    turns = with_prompt(talk("QQ", "AA", "BB", "CC"))
    flagged = (*turns[:3], replace(turns[3], train=False))
    encoded = encoder_of(letters, 99).encode(
        Preference("a", Conversation("a", flagged), Conversation("a", turns))
    )
    (document,) = encoded.documents
    trained = letters.decode(document.tokens[document.loss_mask.astype(bool)])
    assert "".join(trained.split()) == "AA" + "AABBCC"


def pair(chosen, rejected, prompt="PROMPT"):
    def whole(answer):
        return Conversation("a", talk(prompt, answer))

    return Preference("a", whole(chosen), whole(rejected))


def test_a_pair_is_one_document_with_the_chosen_completion_first(letters):
    encoded = encoder_of(letters, 99).encode(pair("YES", "NO"))
    (document,) = encoded.documents
    ids = document.tokens
    first, second = ids[: document.chosen], ids[document.chosen :]
    assert letters.decode(first).strip() == "PROMPTYES"
    assert letters.decode(second).strip() == "PROMPTNO"
    assert document.label == -1 and encoded.drop_reason is None
    trained = [letters.decode([i]).strip() for i in ids[document.loss_mask.astype(bool)]]
    assert "".join(trained) == "YESNO"


@pytest.mark.parametrize("same", [True, False], ids=["same prompt", "1 and 1.0"])
def test_what_both_completions_of_a_pair_follow_is_rendered_and_encoded_once(
    tiny, monkeypatch, same
):
    """The ids are those of each conversation alone; equal values may be written differently. What
    is rendered for a call in a completion is not kept: that would be the conversation's square."""

    def conversation(answer, value):
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": value}}}
        turns = [
            Message("user", "A question of more than a few letters", train=False, in_prompt=True),
            Message("assistant", "", train=False, tool_calls=(call,), in_prompt=True),
            Message("tool", "4", train=False, in_prompt=True),
            Message("assistant", answer, tool_calls=(call,)),
            Message("tool", "5"),
            Message("assistant", answer),
        ]
        return Conversation("a", tuple(turns))

    template = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name ~ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tiny.with_chat_template(template)
    encoder = Encoder(Source("a", "preference"), tokenizer, EncodingRules(999))
    chosen, rejected = conversation("Four", 1), conversation("Five", 1 if same else 1.0)
    encoder.encode(Preference("a", chosen, rejected))  # renders the template's own texts
    runs, run, engine = [], Template._run, type(tiny._engine)
    monkeypatch.setattr(Template, "_run", lambda self, *given: runs.append(1) or run(self, *given))
    encoded, encode = [], engine.encode
    monkeypatch.setattr(
        engine,
        "encode",
        lambda self, text, *rest: encoded.append(text) or encode(self, text, *rest),
    )
    kept, remembering = [], Tokenizer.remembering
    monkeypatch.setattr(
        Tokenizer, "remembering", lambda self: kept.append(remembering(self)) or kept[-1]
    )
    document = encoder.encode(Preference("a", chosen, rejected)).documents[0]
    # Each conversation, also up to its call; and the prompt, with an answer's header and without.
    assert (len(runs), sum("A question" in text for text in encoded)) == (6 if same else 8, 1)
    rendered = [value for value in kept[0].memory.values() if isinstance(value, Rendered)]
    assert len(rendered) == (2 if same else 4)
    alone = [
        segment.ids
        for each in (chosen, rejected)
        for segment in encode_conversation(each.messages, "tokenizer", tokenizer).segments
    ]
    assert document.tokens.tolist() == [token for ids in alone for token in ids]


def test_a_pair_that_is_too_long_is_dropped_or_loses_the_start_of_its_prompt(letters):
    """At least one token of the prompt stays: it predicts the completion's first."""
    (whole,) = encoder_of(letters, 99).encode(pair("YES", "NO")).documents
    length = len(whole.tokens)
    prompt = int(whole.loss_mask.argmax())
    fits = encoder_of(letters, length).encode(pair("YES", "NO"))
    assert len(fits.documents) == 1 and fits.changes == {NO_END}
    too_long = encoder_of(letters, length - 1).encode(pair("YES", "NO"))
    assert not too_long.documents and too_long.drop_reason == LONG_PAIR
    for context, cut in (
        (length - 1, 1),
        (length - 2, 1),
        (length - 3, 2),
        (length - 2 * (prompt - 1), prompt - 1),
        (length - 2 * prompt + 1, None),
    ):
        encoded = encoder_of(letters, context, cut_prompts=True).encode(pair("YES", "NO"))
        if cut is None:
            assert encoded.drop_reason == LONG_PAIR
            continue
        (document,) = encoded.documents
        kept = np.delete(whole.tokens, [*range(cut), *range(whole.chosen, whole.chosen + cut)])
        assert document.tokens.tolist() == kept.tolist() and encoded.changes == {CUT_PROMPT, NO_END}
        assert document.chosen == whole.chosen - cut and document.loss_mask.sum() == (
            whole.loss_mask.sum()
        )


def test_unpaired_losses_get_one_document_per_labelled_completion(letters):
    encoder = encoder_of(letters, 99, unpaired=True)
    documents = encoder.encode(pair("YES", "NO")).documents
    assert [(text_of(letters, d).strip(), d.label, d.chosen) for d in documents] == [
        ("PROMPTYES", 1, 0),
        ("PROMPTNO", 0, 0),
    ]
    liked = Labelled("a", Conversation("a", talk("PROMPT", "YES")), desirable=True)
    for record, label in ((liked, 1), (replace(liked, desirable=False), 0)):
        (document,) = encoder.encode(record).documents
        assert document.label == label
    refused = encoder_of(letters, 99).encode(liked)
    assert not refused.documents and refused.drop_reason == NOT_PAIRED


def test_a_completion_that_the_template_omits_has_no_target(letters):
    letters.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    encoded = encoder_of(letters, 99).encode(pair("YES", "NO"))
    assert not encoded.documents and encoded.drop_reason


def test_several_processes_encode_in_order_like_one_process(tiny):
    records = [Text(str(i), f"text {i} " * (1 + i % 5)) for i in range(5 * BATCH + 3)]
    encoder = Encoder(Source("", "text"), tiny, EncodingRules(16))
    one, two = (list(encode_all(encoder, iter(records), processes)) for processes in (1, 2))
    assert [record for record, _ in two] == records
    assert [pieces(encoded) for _, encoded in two] == [pieces(encoded) for _, encoded in one]
    assert [encoded.changes for _, encoded in two] == [encoded.changes for _, encoded in one]


def test_content_that_a_template_omits_is_reported(letters):
    """Reasoning, which the letters' template does not write, in whole and split conversations and
    in pairs."""
    left_out = {"reasoning left out: the template cannot write it", NO_END}
    turns = talk("QQQ", "AAA", "BBB", "CCC")
    thought = (*turns[:3], replace(turns[3], reasoning="Why."))
    for context, expected in ((99, left_out), (8, left_out | {SPLIT})):
        encoder = encoder_of(letters, context)
        assert encoder.encode(Conversation("a", thought)).changes == expected
    conversation = Conversation("a", (turns[0], replace(turns[1], reasoning="Why.")))
    plain = Conversation("a", (turns[0], replace(turns[1], content="NO")))
    for chosen, rejected in ((conversation, plain), (plain, conversation)):
        pair = Preference("a", chosen, rejected)
        assert encoder_of(letters, 99).encode(pair).changes == left_out
