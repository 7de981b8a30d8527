"""Shapes of public data: each is read as the turns that its authors meant, and anything unread is
named; docs/data.md lists them."""

import itertools
import json
from pathlib import Path

import pytest

from data.clean import Cleaner
from data.errors import UserError
from data.fields import ROLE_FIELDS, TEXT_FIELDS
from data.reasons import UNDESIRABLE, Drop
from data.report import Report
from data.shapes import (
    PAIRS,
    SHAPES,
    SYSTEM_FIELDS,
    TOOL_FIELDS,
    TURN_LISTS,
)
from data.sources import Source, read

ONE = [("user", "Hi?"), ("assistant", "Hello.")]
TWO = [*ONE, ("user", "And?"), ("assistant", "Bye.")]
FLAT = [{"role": role, "content": text} for role, text in TWO]
GLAIVE = {
    "system": "SYSTEM: You may call functions. Use them if required -\n"
    + json.dumps({"name": "f"}, indent=2),
    "chat": 'USER: Hi?\n\n\nASSISTANT: <functioncall> {"name": "f", "arguments": \'{"a": 1}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"b": 2}\n\n\nASSISTANT: Two. <|endoftext|>\n\n\n',
}
TREE = {
    "message_tree_id": "t",
    "prompt": {
        "role": "prompter",
        "text": "Hi?",
        "replies": [
            {"role": "assistant", "text": "No.", "rank": 1, "replies": []},
            {
                "role": "assistant",
                "text": "Hello.",
                "rank": 0,
                "replies": [
                    {
                        "role": "prompter",
                        "text": "And?",
                        "replies": [{"role": "assistant", "text": "Bye.", "replies": []}],
                    }
                ],
            },
        ],
    },
}


def turns(record, **options):
    return [
        (message.role, message.content) for message in Cleaner(**options).clean(record).messages
    ]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        *(
            ({question: "Hi?", answer: "Hello."}, ONE)
            for question, answer in (
                ("question", "answer"),
                ("query", "response"),
                ("problem", "solution"),
                ("inputs", "targets"),
                ("prompt", "response"),
                ("instruction", "response"),
                ("human", "assistant"),
                ("input", "output"),
                ("input", "target"),
                ("prompt", "answer"),
                ("question", "solution"),
                ("user", "bot"),
                ("prompt", "chosen"),
                ("Question", "Answer"),
            )
        ),
        ({"instruction": "Hi?", "context": "", "response": "Hello."}, ONE),
        ({"question": "Hi?", "solution": "Hello.", "answer": "lo"}, ONE),
        ({"chosen": "\n\nHuman: Hi?\n\nAssistant: Hello.", "rejected": "x"}, ONE),
        (
            {"instruction": "Hi?", "context": "A text.", "response": "Hello."},
            [("user", "Hi?\n\nA text."), ONE[1]],
        ),
        (
            {"system_prompt": "Be.", "question": "Hi?", "response": "Hello."},
            [("system", "Be."), *ONE],
        ),
        ({"query": "And?", "response": "Bye.", "history": [["Hi?", "Hello."]]}, TWO),
        ({"data": ["Hi?", "Hello.", "And?", "Bye."]}, TWO),
        ({"conversations": ["Hi?", "Hello."]}, ONE),
        (
            {
                "conversation": [
                    {"human": "Hi?", "assistant": "Hello."},
                    {"human": "And?", "assistant": "Bye."},
                ]
            },
            TWO,
        ),
        (
            {
                "conversation": [
                    {"input": "Hi?", "output": "Hello."},
                    {"input": "And?", "output": "Bye."},
                ]
            },
            TWO,
        ),
        ({"messages": json.dumps(FLAT)}, TWO),
        ({"messages": [json.dumps(turn) for turn in FLAT]}, TWO),
        ({"messages": repr(FLAT)}, TWO),  # pandas writes lists to CSV like this
        (FLAT, TWO),
        ({"conversations": {"from": ["human", "gpt"], "value": ["Hi?", "Hello."]}}, ONE),
        (
            {
                "messages": [
                    {"role": "prompter", "text": "Hi?"},
                    {"role": "assistant", "text": "Hello."},
                ]
            },
            ONE,
        ),
        (
            {
                "dialogue": [
                    {"speaker": "customer", "text": "Hi?"},
                    {"speaker": "agent", "text": "Hello."},
                ]
            },
            ONE,
        ),
        ({"dialog": [["Hi?", "Hello."], ["And?", "Bye."]]}, TWO),
        ({"turns": [["Hi?", "Hello."], ["And?", "Bye."]], "question_id": 3}, TWO),
        ({"chosen": FLAT, "rejected": FLAT[:2]}, TWO),
        ({"prompt": FLAT[:1], "chosen": FLAT[1:2]}, ONE),
        (
            {
                "systemInstruction": {"parts": [{"text": "Be."}]},
                "contents": [
                    {"role": "user", "parts": [{"text": "Hi?"}]},
                    {"role": "model", "parts": [{"text": "Hel"}, {"text": "lo."}]},
                ],
            },
            [("system", "Be."), *ONE],
        ),
        (
            {
                "system_instruction": {"parts": [{"text": "Be."}]},
                "contents": [{"role": role, "parts": [{"text": text}]} for role, text in ONE],
            },
            [("system", "Be."), *ONE],
        ),
        (
            {
                "messages": [
                    {"author": "USER", "message": "Hi?"},
                    {"author": "CHATBOT", "message": "Hello."},
                ]
            },
            ONE,
        ),
        (
            {
                "thread": [
                    {"sender": "human", "text": "Hi?"},
                    {"sender": "bot", "content": {"type": "text", "text": "Hello."}},
                ]
            },
            ONE,
        ),
        (TREE, TWO),
        ({"messages": FLAT, "prompt": "Hi?"}, TWO),
        ({"instruction": "Hi?", "output": "Hello.", "data": [1, 2], "conversation": "c-17"}, ONE),
    ],
)
def test_public_shapes_are_read(record, expected):
    assert turns(record) == expected


@pytest.mark.parametrize(
    "incidental",
    [
        {"items": ["tent", "stove"]},
        {"items": [{"name": "tent", "price": 3}]},
        {"items": [{"author": "Goethe", "title": "Faust"}]},
        {"contents": ["Faust is a play.", "Goethe wrote it."]},
        {"contents": [["Faust", "A play."], ["Goethe", "A poet."]]},
        {"thread": ["a", "b", "c"]},
        {"data": ["Faust is a play."]},
        {"data": [{"name": "x"}]},
        {"conversation": ["a", "b"]},
    ],
)
@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Hi?", "output": "Hello."},
        {"question": "Hi?", "answer": "Hello."},
        {"prompt": "Hi?", "chosen": "Hello."},
    ],
)
def test_a_list_beside_a_question_and_its_answer_is_not_the_conversation(record, incidental):
    cleaned = Cleaner().clean({**record, **incidental})
    assert [(turn.role, turn.content) for turn in cleaned.messages] == ONE
    assert cleaned.unread == {f"record field `{name}`" for name in incidental}


@pytest.mark.parametrize(
    "entries", [FLAT, [{"input": "Hi?", "output": "Hello."}, {"input": "And?", "output": "Bye."}]]
)
@pytest.mark.parametrize("name", ["messages", "items", "data"])
def test_turns_and_exchanges_are_the_conversation_beside_a_question(name, entries):
    cleaned = Cleaner().clean({"question": "Who?", "answer": "Me.", name: entries})
    assert [(turn.role, turn.content) for turn in cleaned.messages] == TWO
    assert cleaned.unread == {"record field `question`", "record field `answer`"}


def test_turns_with_a_sources_names_are_the_conversation_beside_a_question():
    names = {"dialog": "messages", "who": "role", "says": "content"}
    dialog = [{"who": role, "says": text} for role, text in TWO]
    assert turns({"question": "Who?", "answer": "Me.", "dialog": dialog}, fields=names) == TWO


def test_texts_of_which_some_are_json_stay_texts():
    answer = '{"role": "user", "content": "Hi?"}'
    assert turns({"conversations": ["A turn?", answer]}) == [
        ("user", "A turn?"),
        ("assistant", answer),
    ]


def test_a_glaive_dialogue_has_tools_and_calls():
    cleaned = Cleaner().clean(GLAIVE)
    assert [(turn.role, turn.content) for turn in cleaned.messages] == [
        ("system", "You may call functions. Use them if required -"),
        ONE[0],
        ("assistant", ""),
        ("tool", '{"b": 2}'),
        ("assistant", "Two."),
    ]
    assert cleaned.messages[2].tool_calls[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [tool["function"]["name"] for tool in cleaned.tools] == ["f"] and not cleaned.unread
    plain = Cleaner().clean({"system": "SYSTEM: Be.", "chat": "USER: Hi?\nASSISTANT: Hello."})
    assert [turn.content for turn in plain.messages] == [
        "Be.",
        "Hi?",
        "Hello.",
    ] and plain.tools == ()


def test_an_answer_may_be_a_list_of_calls():
    calls = [{"name": "f", "arguments": {"a": 1}}]
    for answers, tools in ((calls, [{"name": "f"}]), (json.dumps(calls), '[{"name": "f"}]')):
        cleaned = Cleaner().clean({"id": 7, "query": "Hi?", "answers": answers, "tools": tools})
        assert [turn.role for turn in cleaned.messages] == ["user", "assistant"]
        assert [call["function"] for call in cleaned.messages[1].tool_calls] == calls
        assert cleaned.tools[0]["function"] == {"name": "f"} and not cleaned.unread
    functions = Cleaner().clean({"messages": FLAT, "functions": [{"name": "f"}]})
    assert functions.tools[0]["function"] == {"name": "f"} and not functions.unread


def test_the_rejected_completion_of_a_preference_is_named_as_unread():
    cleaned = Cleaner().clean({"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."})
    assert cleaned.unread == {"record field `rejected`"}


def test_a_reasoning_switch_is_not_reasoning():
    cleaned = Cleaner().clean({"input": "Hi?", "output": "Hello.", "reasoning": "off"})
    assert not cleaned.messages[1].reasoning and cleaned.unread == {"record field `reasoning`"}
    assert Cleaner().clean({"input": "?", "output": "!", "reasoning": "so"}).messages[1].reasoning


def test_replies_below_the_best_ranked_are_counted():
    changes = {"replies of a tree other than the best ranked left out"}
    assert Cleaner().clean(TREE).changes == changes


QUESTION, REPLY = ({"role": role, "content": text} for role, text in ONE)
IN_TEXT = "a prompt or completion that is the text of a list of turns: read as these turns"


@pytest.mark.parametrize("write", [json.dumps, repr])
@pytest.mark.parametrize("names", [("prompt", "completion"), ("prompt", "chosen")])
def test_the_text_of_turns_in_a_pair_is_read_as_turns(write, names):
    """As in the CSV files of `datasets`."""
    for question, answer in (
        (write([QUESTION]), write([REPLY])),
        ("Hi?", write([REPLY])),
        (write([QUESTION]), "Hello."),
    ):
        cleaned = Cleaner().clean(dict(zip(names, (question, answer), strict=True)))
        assert [(turn.role, turn.content) for turn in cleaned.messages] == ONE
        assert cleaned.changes == {IN_TEXT}
    call = {"function": {"name": "f", "arguments": {}}}
    cleaned = Cleaner().clean(
        dict(zip(names, ("Hi?", write([{"role": "assistant", "tool_calls": [call]}])), strict=True))
    )
    assert cleaned.messages[1].tool_calls and IN_TEXT in cleaned.changes


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "Ada", "text": "Hi"}]',
        '[{"speaker": "Ada", "text": "Hi"}]',
        '[{"speaker": "agent", "text": "Hi"}]',
        '{"sender": "agent", "message": "ok", "id": 7}',
        '{"author": "Claude", "text": "x"}',
        '{"role": "customer", "text": "late"}',
        '{"role": "assistant", "content": "Hello."}',
        '[{"role": "agent", "content": "Hello.", "id": 7}]',
        '[{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]',
        '[{"role": "tool", "content": "A"}, {"role": "assistant", "content": "B"}]',
        "{'role': ['user'], 'content': ['A']}",
        '{"a": 1}',
        "[{",
        "[]",
    ],
)
def test_an_answer_in_json_stays_text(text):
    for names in (("prompt", "completion"), ("instruction", "output"), ("prompt", "chosen")):
        cleaned = Cleaner().clean(dict(zip(names, ("Hi?", text), strict=True)))
        assert cleaned.messages[1].content == text and not cleaned.changes


def test_a_question_in_json_stays_text():
    for text in ('{"author": "user", "text": "A"}', '[{"role": "assistant", "content": "A"}]'):
        cleaned = Cleaner().clean({"instruction": text, "output": "Hello."})
        assert cleaned.messages[0].content == text and not cleaned.changes


@pytest.mark.parametrize("write", [json.dumps, repr, list])
def test_a_whole_conversation_in_an_answer_has_its_question_once(write):
    system = {"role": "system", "content": "S"}
    cleaned = Cleaner().clean({"prompt": "Hi?", "completion": write([system, QUESTION, REPLY])})
    assert [(turn.role, turn.content) for turn in cleaned.messages] == [("system", "S"), *ONE]
    begun = [QUESTION, REPLY, QUESTION]
    cleaned = Cleaner().clean({"prompt": write(begun), "completion": write([*begun, FLAT[3]])})
    assert [
        (turn.content, turn.train) for turn in cleaned.messages if turn.role == "assistant"
    ] == [
        ("Hello.", False),
        ("Bye.", True),
    ]


def test_a_written_answer_may_begin_with_the_result_of_the_prompts_call():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "R"}
    written = [json.dumps(turns) for turns in ([QUESTION, call], [result, REPLY])]
    for name in ("completion", "chosen"):
        cleaned = Cleaner().clean(dict(zip(("prompt", name), written, strict=True)))
        assert [turn.content for turn in cleaned.messages] == ["Hi?", "", "R", "Hello."]
        answers = [turn for turn in cleaned.messages if turn.role == "assistant"]
        assert [turn.train for turn in answers] == [False, True]


@pytest.mark.parametrize("name", ["messages", "prompt", "completion"])
def test_turns_that_lost_their_commas_are_named(name):
    """What pandas writes to a CSV file for a list of turns read from Parquet."""
    import numpy as np

    record = {"prompt": "Hi?", "completion": "Hello.", name: str(np.array(FLAT))}
    if name == "messages":
        record = {name: record[name]}
    with pytest.raises(Drop, match="turns that lost the commas between them"):
        Cleaner().clean(record)


def test_a_dialogue_in_a_prompt_is_read_as_turns():
    """As in older forms of HH-RLHF."""
    record = {"prompt": "\n\nHuman: Hi?\n\nAssistant: Hello.\n\nHuman: And?\n\nAssistant:"}
    cleaned = Cleaner().clean({**record, "completion": "Bye."})
    assert [(turn.role, turn.content) for turn in cleaned.messages] == TWO
    assert [turn.train for turn in cleaned.messages] == [False, False, False, True]
    assert cleaned.changes == {"a prompt of `Human:` and `Assistant:` read as turns"}


def test_a_preferred_answer_of_several_turns_follows_its_prompt():
    columns = {name: [turn[name] for turn in FLAT[1:]] for name in ("role", "content")}
    for chosen in (FLAT[1:], columns):
        cleaned = Cleaner().clean({"prompt": QUESTION, "chosen": chosen})
        assert [(turn.role, turn.content) for turn in cleaned.messages] == TWO
        assert not cleaned.unread


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"chosen": "a", "rejected": "b"}, "it has the fields chosen, rejected"),
        ({}, "it has no fields"),
        ({f"f{number}": 1 for number in range(30)}, "f11, ...$"),
        ({"a\x1b[2J": 1}, "the fields a\ufffd\\[2J"),
        ({"text": "a"}, r"the fields text \(`format: text` reads these\)$"),
        ({"Text": "a"}, r"the fields Text \(`format: text` reads these\)$"),
        ({"input_ids": [1, 2]}, r"the fields input_ids \(`format: tokens` reads these\)$"),
        (
            {"question": "a", "chosen": "b", "rejected": "c"},
            r"chosen, rejected \(`format: preference` reads these\)$",
        ),
        (
            {"input": {"messages": []}, "preferred_output": ["b"], "non_preferred_output": ["c"]},
            r"non_preferred_output \(`format: preference` reads these\)$",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}], "chosen": {}, "rejected": {}},
            r"^no answer \(`format: preference` reads these\)$",
        ),
        (
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite it."]},
            "^questions without answers: `turns` next to `question_id`, as in MT-Bench$",
        ),
        ({"messages": "hello"}, "turns that are not a list: `messages`"),
        ({"question": "a", "answer": 3}, r"not text: `answer` \(int\)$"),
        ({"question": 3.5, "answer": "a"}, r"not text: `question` \(float\)$"),
    ],
)
def test_an_unknown_shape_is_dropped_with_its_fields(record, reason):
    with pytest.raises(Drop, match=reason):
        turns(record)


BAD = [
    {"prompt": "Go?", "completion": "No.", "label": False},
    {"prompt": "Go?", "completion": "No.", "label": 0},
    {"prompt": "Go?", "completion": "No.", "label": "False"},
    {"prompt": "Go?", "completion": "No.", "label": " false "},
    {"prompt": "Go?", "completion": "No.", "label": "0"},
    {"prompt": "Go?", "completion": "No.", "label": "no"},
    {"question": "Go?", "answer": "No.", "label": "FALSE"},
    {"Question": "Go?", "Answer": "No.", "Label": False},
    {
        "messages": [{"from": "human", "value": "Go?"}, {"from": "gpt", "value": "No."}],
        "label": False,
    },
    {
        "messages": [{"from": "human", "value": "Go?"}, {"from": "gpt", "value": "No."}],
        "kto_tag": False,
    },
]


@pytest.mark.parametrize("record", BAD)
def test_an_answer_labelled_bad_is_dropped(record):
    with pytest.raises(Drop, match="an answer that its `label` calls bad"):
        turns(record)


@pytest.mark.parametrize("label", [True, 1, 2, None, "", "yes", "1", "bad"])
def test_an_answer_with_another_label_is_kept(label):
    assert turns({"prompt": "Go?", "completion": "Yes.", "label": label})
    # Here they are classes.
    for other in (0, "0", "no", label):
        assert turns({"question": "Go?", "answer": "Yes.", "label": other})


def test_bad_answers_are_counted_in_every_format(tmp_path):
    """The good answer of a labelled pair is kept in every source format, from JSON and CSV."""
    lines, table = tmp_path / "labelled.jsonl", tmp_path / "labelled.csv"
    lines.write_text(
        "".join(
            json.dumps({"prompt": "Go?", "completion": text, "label": label}) + "\n"
            for text, label in (("Yes.", True), ("No.", False))
        )
    )
    table.write_text("prompt,completion,label\nGo?,Yes.,True\nGo?,No.,False\n")
    for path, format in itertools.product((lines, table), ("sharegpt", "text")):
        report = Report()
        (record,) = read(Source(str(path), format), report)
        assert "Yes." in str(record) and "No." not in str(record)
        assert report.dropped == {UNDESIRABLE: 1}
        assert UNDESIRABLE in report.summary()


def test_a_field_mapping_reads_any_shape():
    assert turns({"q": "Hi?", "a": "Hello."}, fields={"q": "user", "a": "assistant"}) == ONE
    talk = {
        "dialog": [
            {"who": "human", "says": "Hi?"},
            {"who": "gpt", "says": "Hello.", "content": "mine"},
        ],
        "s": "Be.",
    }
    cleaned = Cleaner(
        fields={"dialog": "messages", "who": "role", "says": "content", "s": "system"}
    ).clean(talk)
    assert [(turn.role, turn.content) for turn in cleaned.messages] == [("system", "Be."), *ONE]
    assert cleaned.unread == {"turn field `content, for which another is named`"}
    names = {"q": "user", "t": "reasoning_content", "a": "assistant"}
    named = {"q": "user", "a": "assistant"}
    for field, mapping in (("t", names), ("reasoning_content", named)):
        thought = Cleaner(fields=mapping).clean({"q": "Hi?", field: "so", "a": "Ho"})
        assert thought.messages[1].reasoning == "so" and not thought.unread
    with pytest.raises(Drop, match="`a`"):
        turns({"q": "Hi?"}, fields={"q": "user", "a": "assistant"})


def test_every_field_of_a_prompt_of_turns_is_read():
    hi, hello = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}
    cleaned = Cleaner().clean({"prompt": [hi], "completion": [hello]})
    assert [turn.train for turn in cleaned.messages] == [False, True]
    assert not cleaned.unread and not cleaned.changes


def test_unread_fields_are_named():
    cleaned = Cleaner().clean(
        {
            "id": 3,
            "messages": [
                {"role": "user", "content": "Hi?", "name": "Bob", "tone": ""},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "Hello.", "cache_control": {"type": "x"}}],
                    "score": 0,
                    "tool_calls": [
                        {
                            "id": 3,
                            "index": 0,
                            "type": "function",
                            "function": {"name": "f", "arguments": {}},
                        }
                    ],
                },
            ],
            "source": "web",
            "empty": None,
            "system": {"a": 1},
            "instruction": "Hi?",
        }
    )
    assert cleaned.unread == {
        "turn field `name`",
        "turn field `score`",
        "content part's field `cache_control`",
        "tool call's field `id`",
        "tool call's field `index`",
        "record field `source`",
        "record field `system`",
        "record field `instruction`",
    }


EXCHANGES = [{"question": f"Q{number}", "answer": f"A{number}"} for number in range(2)]


def read_file(tmp_path, content, name="data.json"):
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    report = Report()
    records = list(read(Source(str(tmp_path / name)), report))
    return [[turn.content for turn in record.messages] for record in records], report.sources[0]


@pytest.mark.parametrize(
    ("content", "not_read"),
    [
        ({"data": EXCHANGES}, None),
        ({"items": EXCHANGES}, None),
        ({"contents": EXCHANGES, "topic": "x"}, "topic"),
        ({"conversations": [{"id": i, **pair} for i, pair in enumerate(EXCHANGES)]}, None),
        ({"turns": [{"label": True, **pair} for pair in EXCHANGES]}, None),
        ({"Data": EXCHANGES, "version": "1.0"}, "version"),
        ({"data": [{**EXCHANGES[0], "answer": None}, *EXCHANGES]}, None),
        ({"data": [{"prompt": "Q0", "completion": "A0"}, EXCHANGES[1]]}, None),
        ({"conversations": [{"conversations": [pair]} for pair in EXCHANGES]}, None),
    ],
)
def test_exchanges_in_a_files_only_object_are_records(tmp_path, content, not_read):
    texts, report = read_file(tmp_path, content)
    assert texts == [["Q0", "A0"], ["Q1", "A1"]]
    [note] = report.notes
    assert "the records are the list in its field" in note
    assert (f"not read: the fields {not_read}" in note) == bool(not_read)
    spread = json.dumps(content, indent=1)
    assert read_file(tmp_path, spread)[0] == texts


def test_bad_answers_in_a_files_only_object_are_dropped(tmp_path):
    pairs = [{"prompt": str(good), "completion": "A", "label": good} for good in (True, False)]
    texts, report = read_file(tmp_path, {"data": pairs})
    assert texts == [["True", "A"]] and report.dropped == {UNDESIRABLE: 1}


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ([{"conversations": EXCHANGES}], "data.json"),
        ({"conversations": EXCHANGES}, "data.jsonl"),
        ({"id": 1, "data": EXCHANGES}, "data.json"),
        ({"conversations": EXCHANGES}, "data.json"),
        ({"conversation_id": "1", "topic": "x", "conversations": EXCHANGES}, "data.json"),
        ({"title": "x", "Turns": EXCHANGES}, "data.json"),
        ({"dialogue": [{"id": 1, **EXCHANGES[0]}, EXCHANGES[1]]}, "data.json"),
        ({"loss_mask": [1, 1], "data": EXCHANGES}, "data.json"),
        ({"data": [{"role": "user", "content": "Q0"}, {"role": "gpt", "content": "A0"},
                   {"role": "user", "content": "Q1"}, {"role": "gpt", "content": "A1"}]}, "data.json"),
        ({"data": ["Q0", "A0", "Q1", "A1"]}, "data.json"),
    ],
)  # fmt: skip
def test_turns_and_exchanges_of_a_record_are_one_conversation(tmp_path, content, name):
    assert read_file(tmp_path, content, name)[0] == [["Q0", "A0", "Q1", "A1"]]


def test_pandas_forms_of_a_table_are_read_or_refused(tmp_path):
    """As pandas 3.1 writes them with to_json(orient="table") and orient="split"."""
    fields = [{"name": "index", "type": "integer"}] + [
        {"name": name, "type": "string", "extDtype": "str"} for name in EXCHANGES[0]
    ]
    schema = {"fields": fields, "primaryKey": ["index"], "pandas_version": "1.4.0"}
    table = {"schema": schema, "data": [{"index": i, **pair} for i, pair in enumerate(EXCHANGES)]}
    assert read_file(tmp_path, json.dumps(table))[0] == [["Q0", "A0"], ["Q1", "A1"]]
    split = {"columns": [*EXCHANGES[0]], "data": [[*pair.values()] for pair in EXCHANGES]}
    for table in (split, {**split, "index": [0, 1]}):
        with pytest.raises(UserError, match=r"a table of `columns` and `data` \(to_json\("):
            read_file(tmp_path, json.dumps(table))


def test_a_table_beside_a_conversation_is_named_as_unread(tmp_path):
    for rows in ([["x", "y"]], []):
        table = {"columns": ["a", "b"], "data": rows}
        for record in ({"question": "Hi?", "answer": "Hello."}, {"messages": [QUESTION, REPLY]}):
            texts, report = read_file(tmp_path, {**record, **table}, "data.jsonl")
            assert texts == [["Hi?", "Hello."]]
            assert "record field `columns`" in report.unread
    with pytest.raises(Drop, match="no known shape"):
        Cleaner().clean({"columns": ["a", "b"], "data": []})


def test_unread_fields_are_counted_per_source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"question": f"{n}?", "answer": "a", "level": n, f"f{n}": 1})
            for n in range(1, 400)
        )
    )
    report = Report()
    assert len(list(read(Source(str(path)), report))) == 399
    [source] = report.sources
    assert (
        source.unread["record field `level`"] == 399
        and len(source.unread) <= 201
        and source.unread.total() == 798
    )
    assert "not read       399 100.00 %  record field `level`" in report.summary()
    for format, name, value in (("text", "text", "a b"), ("tokens", "tokens", [5, 6])):
        path.write_text(json.dumps({name: value, "id": "a", "other": [1]}))
        report = Report()
        assert len(list(read(Source(str(path), format), report))) == 1
        assert report.sources[0].unread == {"record field `other`": 1}


SQUAD = {
    "id": "56be",
    "title": "Notre Dame",
    "context": "The Grotto is a Marian place of prayer.",
    "question": "What is the Grotto?",
    "answers": {"text": ["a place of prayer", "a Marian place"], "answer_start": [22, 15]},
}
LONGBENCH = {
    "input": "Who won?",
    "context": "A long report.",
    "answers": ["Ann", "Ann Lee"],
    "length": 3,
    "all_classes": None,
}
ASKED = "A text.\n\nWhy?"
OTHERS = "reference answers other than the first left out"


@pytest.mark.parametrize(
    ("record", "question", "answer", "changes"),
    [
        (
            SQUAD,
            f"{SQUAD['context']}\n\n{SQUAD['question']}",
            "a place of prayer",
            {"`context` put before its question", OTHERS},
        ),
        (
            LONGBENCH,
            "A long report.\n\nWho won?",
            "Ann",
            {"`context` put before its question", OTHERS},
        ),
        (LONGBENCH | {"input": ""}, "A long report.", "Ann", None),  # a summary
        ({"query": "Why?", "context": "A text.", "response": "So."}, ASKED, "So.", None),
        ({"prompt": "Why?", "document": "A text.", "completion": "So."}, ASKED, "So.", None),
        ({"problem": "Why?", "passage": "A text.", "solution": "So."}, ASKED, "So.", None),
        ({"question": "Why?", "article": "A text.", "answer": ["So."]}, ASKED, "So.", None),
        ({"question": "Why?", "context": ["A text."], "answer": "So."}, ASKED, "So.", None),
        ({"question": ["Why?"], "answers": ["So.", "So."]}, "Why?", "So.", set()),
        ({"question": ASKED, "context": "A text.", "answer": "So."}, ASKED, "So.", set()),
        ({"question": "Why?", "context": "", "answers": "So."}, "Why?", "So.", set()),
        ({"instruction": "Why?", "document": "A text.", "output": "So."}, ASKED, "So.", None),
        # As before: Dolly's and Alpaca's fields follow the instruction.
        (
            {"instruction": "Why?", "input": "A", "context": "B", "response": "So."},
            "Why?\n\nA\n\nB",
            "So.",
            set(),
        ),
    ],
)
def test_a_text_that_a_question_is_about_comes_before_it(record, question, answer, changes):
    cleaned = Cleaner().clean(record)
    assert [turn.content for turn in cleaned.messages] == [question, answer]
    names = {"context", "document", "passage", "article"} & record.keys()
    expected = {f"`{name}` put before its question" for name in names}
    assert (
        (cleaned.changes - {OTHERS} == expected) if changes is None else cleaned.changes == changes
    )
    named = {"record field `title`"} if record is SQUAD else set()
    assert cleaned.unread - {"record field `length`"} == named


@pytest.mark.parametrize(
    "context",
    [
        {"context": "A text.", "document": "Another text."},  # which of them?
        {"context": ["A", "B"]},
        {"context": {"titles": ["A"]}},
        {"document": "reports/a.pdf"},
        {"article": "https://example.com/a"},
    ],
)
def test_another_context_is_named_as_unread(context):
    cleaned = Cleaner().clean({"question": "Why?", "answer": "So.", **context})
    assert [turn.content for turn in cleaned.messages] == ["Why?", "So."]
    assert cleaned.unread == {f"record field `{name}`" for name in context}


@pytest.mark.parametrize("answers", [[], ["a", 1], {"text": []}, {"value": "a"}, [{"text": "a"}]])
def test_answers_without_texts_are_no_answer(answers):
    with pytest.raises(Drop, match="no known shape of a conversation: it has the fields question"):
        turns({"question": "Why?", "context": "A text.", "answers": answers})


@pytest.mark.parametrize("field", ["label", "correct_answer_id", "answerKey"])
def test_answers_of_which_a_field_names_the_right_one_are_options(field):
    """As in QuAIL and ReClor; a label of preferences is no number."""
    record = {"context": "A text.", "question": "Why?", "answers": ["So.", "No."]}
    with pytest.raises(Drop, match=f"which of them is right: `{field}`"):
        turns({**record, field: 1})
    assert turns({**record, field: True}) == turns({**record, field: None}) == turns(record)


def test_several_texts_of_other_fields_are_no_answer():
    with pytest.raises(Drop, match=r"not text: `output` \(list\)"):
        turns({"instruction": "Hi?", "output": ["Hello.", "Bye."]})


def test_a_context_and_answers_can_be_mapped():
    """Such as gretel's text to SQL, under every pair of targets."""
    record = {"sql_prompt": "Why?", "sql_context": "A text.", "sql": "So."}
    for asked, answered in (("user", "assistant"), ("prompt", "completion")):
        fields = {"sql_prompt": asked, "sql_context": "context", "sql": answered}
        cleaned = Cleaner(fields=fields).clean(record)
        assert [turn.content for turn in cleaned.messages] == [ASKED, "So."]
        assert not cleaned.unread
    fields = {"q": "question", "refs": "answers"}
    cleaned = Cleaner(fields={"refs": "answers"}).clean({"question": "Why?", "refs": ["So.", "x"]})
    assert [turn.content for turn in cleaned.messages] == ["Why?", "So."]
    assert cleaned.changes == {OTHERS}


@pytest.mark.parametrize("name", ["images", "videos", "Audios", "image", "audio"])
def test_a_record_with_more_than_text_is_dropped(name):
    """As LLaMA-Factory, ms-swift and LLaVA have them; null columns are no pictures."""
    tag = f"<{name.lower()}>"
    record = {"messages": [{"role": "user", "content": f"{tag}What?"}, FLAT[1]]}
    with pytest.raises(Drop, match=f"of which nothing is read: `{name}`"):
        turns({**record, name: ["a.png"]})
    for nothing in (None, [], [None], 0, False):
        assert turns({**record, name: nothing}) == turns(record)
    if tag in ("<image>", "<audio>"):  # elsewhere the word may mean anything
        record = {"messages": FLAT, name: "a.png"}
        assert Cleaner().clean(record).unread == {f"record field `{name}`"}


@pytest.mark.parametrize("format", ["preference", "tokens"])
def test_other_formats_drop_a_record_with_more_than_text(tmp_path, format):
    fields = {"prompt": "a", "chosen": "b", "rejected": "c", "tokens": [1, 2]}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(fields | more) + "\n" for more in ({}, {"images": ["x"]})))
    report = Report()
    assert len(list(read(Source(str(path), format), report))) == 1
    assert [*report.dropped] == ["more than text, of which nothing is read: `images`"]


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (
            {"Question": "Hi?", "Response": "Hello.", "Complex_CoT": "so"},
            {"Question": "prompt", "Response": "completion", "Complex_CoT": "reasoning_content"},
        ),
        ({"Question": "Hi?", "Response": "Hello.", "CoT": "so"}, {"CoT": "reasoning_content"}),
        ({"messages": FLAT[:2], "CoT": "so"}, {"CoT": "reasoning_content"}),
        (
            {"prompt": FLAT[:1], "completion": FLAT[1:2], "CoT": "so"},
            {"CoT": "reasoning_content"},
        ),
    ],
)
def test_a_mapped_field_belongs_to_a_records_only_answer(record, fields):
    cleaned = Cleaner(fields=fields).clean(record)
    assert [(turn.role, turn.content) for turn in cleaned.messages] == ONE
    assert cleaned.messages[1].reasoning == "so" and not cleaned.unread


def test_of_several_answers_none_has_the_records_field():
    cleaned = Cleaner(fields={"CoT": "reasoning_content"}).clean({"messages": FLAT, "CoT": "so"})
    assert [turn.reasoning for turn in cleaned.messages] == [None] * 4
    assert cleaned.unread == {"record field `CoT`"}
    fields = {"who": "role", "says": "content", "dialog": "messages"}
    dialog = [{"who": "human", "says": "Hi?"}, {"who": "gpt", "says": "Hello."}]
    cleaned = Cleaner(fields=fields).clean({"dialog": dialog, "who": "Ann"})
    assert [(turn.role, turn.content) for turn in cleaned.messages] == ONE


def test_a_mapped_answer_without_the_field_says_so():
    with pytest.raises(Drop, match=r"name is missing: `x` \(it has the fields q, a\)"):
        turns({"q": "Hi?", "a": "Hello."}, fields={"q": "user", "x": "assistant"})


def test_docs_have_the_table_of_shapes():
    docs = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    for shape in SHAPES:
        assert f"| {shape.name} | {shape.fields} | {shape.becomes} |" in docs
    words = " ".join(docs.split())
    for names in (TURN_LISTS, ROLE_FIELDS, TEXT_FIELDS, SYSTEM_FIELDS[:-1], TOOL_FIELDS[:1]):
        assert ", ".join(f"`{name}`" for name in names) in words
    assert ", ".join(f"`{question}`/`{answer}`" for question, answer in PAIRS) in words


def test_unread_fields_are_named_in_their_original_case():
    cleaned = Cleaner().clean(
        {"Question": "Hi?", "Answer": "Hello.", "Level": 3, "HISTORY": None, "Functions": 0}
    )
    assert [(turn.role, turn.content) for turn in cleaned.messages] == ONE
    assert cleaned.unread == {"record field `Level`", "record field `Functions`"}
    assert cleaned.changes == {"descriptions in `tools` left out"}
