"""Attacks on records: JSON of every kind is read, cleaned, rendered and encoded; no text produces a
control token.

Of a record that is kept, every field with a value is read or counted in the report: nothing
vanishes.
"""

import itertools
import json
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from data.conversation import Conversation
from data.encode import Encoder, EncodingRules
from data.printable import printable
from data.report import Report, SourceReport
from data.roles import role_of
from data.sources import Source, read
from data.tokenizer import Tokenizer
from tests.soak.attacks import ROOT, Case, Failed, refusal

PIECES = (
    "hello",
    " ",
    "\n",
    "",
    "é漢字🙂",
    "\u2028",
    "\x00",
    "\ufeff",
    "\ud800",
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|begin_of_text|>",
    "USER:",
    "ASSISTANT:",
    "[INST]",
    "[/INST]",
    "{{ messages }}",
    "{% for x in y %}",
    "a" * 800,
    "\u202e",
    "e\u0301" * 50,
    "<div>",
    "&lt;s&gt;",
    "＜s＞",
    "<s",
    ">",
    "</",
    "s>",
)
ROLES = (
    "human",
    "gpt",
    "user",
    "assistant",
    "system",
    "tool",
    "function",
    "bard",
    "",
    "Human",
    None,
    1,
    [],
    {},
)
ODD = (
    None,
    True,
    0,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    2**70,
    [],
    {},
    [None],
    {"a": 1},
    "",
    "x",
    [[[[1]]]],
    "\ud800",
)
# Fields of turns and records: reasoning, flags, and fields that nothing reads.
EXTRAS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "loss",
    "train",
    "training",
    "trainable",
    "weight",
    "mask",
    "name",
    "tool_call_id",
    "loss_mask",
    "label",
    "kto_tag",
    "source",
    "score",
    "nested",
    "system",
    "instruction",
    "history",
    "messages",
    "system_prompt",
    "functions",
    "chosen",
    "answers",
    "Instruction",
)
FLAGS = ("loss", "train", "training", "trainable", "weight", "mask")
VALUES = (
    "VALUE",
    "VALUE",
    True,
    False,
    0,
    1,
    0.5,
    None,
    "",
    [],
    {},
    {"a": ["VALUE"]},
    ["VALUE"],
    [0, 1],
)
FORMATS = ("sharegpt", "sharegpt", "sharegpt", "text", "tokens")


def records(base: pathlib.Path) -> Case:
    """Returns the case: a file of a few records of one format."""
    tokenizer = Tokenizer.load(ROOT / "data" / "fixtures" / "tiny_tokenizer")
    controls = {control.id for control in tokenizer.controls.values()}
    written = {tokenizer.bos_id, tokenizer.eos_id}  # added by the template, and around a text

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        format = str(generator.choice(np.array(FORMATS, dtype=object)))
        raw = _record(format, generator)
        path = folder / "records.jsonl"
        source = Source(str(path), format=format, template="vicuna_v1.1")
        encoder = Encoder(source, tokenizer, EncodingRules(128))
        line = json.dumps(raw)
        if generator.random() < 0.1:
            line = line[: generator.integers(1, len(line) + 1)]
        first, last = (
            json.dumps(
                {
                    "sharegpt": {
                        "conversations": [
                            {"from": "human", "value": word},
                            {"from": "gpt", "value": "b"},
                        ]
                    },
                    "text": {"text": word},
                    "tokens": {"tokens": [number, 6, 7]},
                }[format]
            )
            for number, word in enumerate(("one", "two"))
        )
        # The records around it are good and must be read in any case.
        path.write_text(f"{first}\n{line}\n{last}\n", encoding="utf-8")
        report = Report()
        kept = []
        with refusal("records.jsonl") as messages:
            kept = list(read(source, report, order="any"))
        if messages or len(kept) < 2:
            raise Failed(f"good records next to {line[:200]!r} were lost: {messages or len(kept)}")
        counts = report.sources[0]
        dropped = sum(counts.dropped.values())
        if counts.records != counts.kept + dropped or counts.kept != len(kept):
            raise Failed(
                f"{counts.records} records, {counts.kept} kept ({len(kept)} read), {dropped} "
                "dropped"
            )
        if len(kept) == 3 and isinstance(kept[1], Conversation):
            check_nothing_vanished(raw, kept[1], counts)
        for record in kept:
            encoded = encoder.encode(record)
            for document in encoded.documents:
                if (
                    len(document.tokens) > 128
                    or document.tokens.min() < 0
                    or document.tokens.max() >= tokenizer.vocab_size
                ):
                    raise Failed("a document does not fit its row or the vocabulary")
                if format != "tokens" and (
                    leaked := set(document.tokens.tolist()) & (controls - written)
                ):
                    raise Failed(f"control tokens {leaked} come from a text")
                if (
                    format == "text"
                    and set(document.tokens[1:-1].tolist()) & controls
                    and len(encoded.documents) == 1
                ):
                    raise Failed("a control token within a text")
        return (
            "kept"
            if len(kept) == 3
            else f"dropped: {next(iter(counts.dropped), 'unknown').split(':')[0]}"
        )

    return case


def check_nothing_vanished(raw: dict, kept: Conversation, report: SourceReport) -> None:
    """Raises Failed unless every field of a record with a value is in the conversation or counted
    in the report.

    Texts are recognized by words that no other field has, flags by their counts.
    """
    conversation = repr(
        [(m.content, m.reasoning, m.tool_calls, m.tool_call_id, m.name) for m in kept.messages]
    ) + repr(kept.tools)
    counted = [*report.unread, *report.repaired]
    lists = [
        name
        for name in ("conversations", "messages")
        if isinstance(raw.get(name), list) and raw[name]
    ]
    turns = [turn for turn in raw[lists[0]] if isinstance(turn, dict)] if lists else []
    record = {name: value for name, value in raw.items() if name not in lists[:1]}
    for level, fields in [("record", record), *(("turn", turn) for turn in turns)]:
        for name, value in fields.items():
            if name not in EXTRAS or value in (None, "", [], {}):
                continue
            words = set(re.findall(r"VALUE\d+", json.dumps(value)))
            is_flag = name in (*FLAGS, "loss_mask") and not words
            named = any(
                f"{level} field `{printable(str(name))[:80]}`" == entry or f"`{name}`" in entry
                for entry in counted
            )
            if not named and not (words and all(word in conversation for word in words)):
                trailing = level == "turn" and "unanswered last turn dropped" in report.repaired
                is_default = (
                    _takes_no_answer_out(value, turns)
                    if name == "loss_mask"
                    else _changes_nothing(name, value, level == "turn" and _is_answer(fields))
                )
                if not (is_flag and is_default) and not trailing:
                    raise Failed(
                        f"the {level}'s field {name!r} with {value!r} vanished; counted: {counted}"
                    )


def _is_answer(turn: dict) -> bool:
    return role_of(str(turn.get("from", turn.get("role")))) == "assistant"


def _takes_no_answer_out(mask: object, turns: list[dict]) -> bool:
    """Returns whether a record's `loss_mask` only repeats the default."""
    if not isinstance(mask, list):
        return False
    answers = (
        [flag for flag, turn in zip(mask, turns, strict=True) if _is_answer(turn)]
        if len(mask) == len(turns)
        else mask
    )
    return all(answers)


def _changes_nothing(name: str, value: object, is_answer: bool) -> bool:
    """Returns whether a flag only repeats the default, so that there is nothing to count."""
    return (
        bool(value) == (is_answer == (name != "mask"))
        or (name == "mask" and not is_answer)
        or (bool(value) and not is_answer)
    )  # counted for all flags together


def _extra(generator: np.random.Generator, numbers: Iterator[int]) -> dict:
    """Returns a few fields with values of every kind; every text in them is a different word."""

    def numbered(value: object) -> object:
        if isinstance(value, dict):
            return {key: numbered(inner) for key, inner in value.items()}
        return (
            [numbered(inner) for inner in value]
            if isinstance(value, list)
            else (f"VALUE{next(numbers)}" if value == "VALUE" else value)
        )

    names = generator.choice(
        np.array(EXTRAS, dtype=object), size=generator.integers(0, 4), replace=False
    )
    return {str(name): numbered(VALUES[generator.integers(len(VALUES))]) for name in names}


def _text(generator: np.random.Generator) -> str:
    return "".join(generator.choice(np.array(PIECES, dtype=object), size=generator.integers(0, 6)))


def _odd(generator: np.random.Generator, usual: object, rate: float = 0.08) -> object:
    return ODD[generator.integers(len(ODD))] if generator.random() < rate else usual


def _record(format: str, generator: np.random.Generator) -> object:
    """Returns a record of this format with odd values here and there."""
    if format == "text":
        raw: dict = {"text": _odd(generator, _text(generator))}
        if generator.random() < 0.3:
            raw = {
                "prompt": _odd(generator, _text(generator)),
                "completion": _odd(generator, _text(generator)),
            }
    elif format == "tokens":
        count = int(generator.integers(0, 200))
        raw = {
            "tokens": _odd(
                generator,
                [
                    _odd(generator, int(token), 0.01)
                    for token in generator.integers(-2, 1100, count)
                ],
            )
        }
        if generator.random() < 0.5:
            raw["loss_mask"] = _odd(
                generator, [int(bit) for bit in generator.integers(0, 2, count)]
            )
        if generator.random() < 0.3:
            raw["labels"] = _odd(generator, [-100] * count)
    else:
        keys = [("from", "value", "conversations"), ("role", "content", "messages")][
            generator.integers(2)
        ]
        usual = ["human", "gpt"] if keys[0] == "from" else ["user", "assistant"]
        turns: list = []
        numbers = itertools.count(1000)
        for number in range(generator.integers(0, 9)):
            role = (
                ROLES[generator.integers(len(ROLES))]
                if generator.random() < 0.1
                else usual[number % 2]
            )
            turn: object = {keys[0]: role, keys[1]: _odd(generator, _text(generator))}
            if generator.random() < 0.3:
                turn = {**_extra(generator, numbers), **turn}
            if generator.random() < 0.1:
                call = {"function": {"name": _text(generator), "arguments": _odd(generator, {})}}
                turn["tool_calls"] = _odd(generator, [call], 0.5)
            turns.append(_odd(generator, turn, 0.03))
        raw = {keys[2]: _odd(generator, turns, 0.05)}
        if generator.random() < 0.3:
            raw = {**_extra(generator, numbers), **raw}
        if generator.random() < 0.1:
            raw["tools"] = _odd(generator, [{"type": "function", "function": {"name": "f"}}], 0.5)
    raw["id"] = _odd(generator, "an id", 0.3)
    if generator.random() < 0.1:
        raw[_text(generator)] = _odd(generator, 1, 0.5)
    return _odd(generator, raw, 0.03)
