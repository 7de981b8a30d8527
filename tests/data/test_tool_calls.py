"""Tool calls under three families' templates: ids and masks equal transformers'; and how records'
forms are read."""

import json

import pytest

from data.clean import Cleaner
from data.conversation import Conversation, Message, Text, with_last_answer_trained
from data.encode import Encoder, EncodingRules
from data.reasons import Drop
from data.report import Report
from data.sources import Source, read
from data.templates import TemplateError, render
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

TINY = REPOSITORY / "data/fixtures/tiny_tokenizer"

# Like Llama 3.1's: calls without their text, results and tools in JSON, the tools in the first user
# turn.
LLAMA = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if not (message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{%- if tools is not none and message.role == 'user' and loop.first %}"
    "{{- 'Given the following functions, answer with JSON.\n\n' }}"
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{%- endif %}"
    "{%- if message.role == 'assistant' %}{% generation %}{{- message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}"
    "{%- elif 'tool_calls' in message %}"
    "{%- if not message.tool_calls|length == 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}"
    "{%- endif %}{%- set tool_call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}"
    "{% generation %}{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}"
    "{{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}{% endgeneration %}"
    "{%- elif message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
# Like Qwen 2.5's and Hermes': calls between their own control tokens after the text, consecutive
# results in one user turn.
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be helpful.' }}{%- endif %}"
    "{{- '\n\n# Tools\n\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' and not message.tool_calls %}"
    "{{- '<|im_start|>assistant\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}{{- '\n' }}{% generation %}"
    "{%- if message.content %}{{- message.content + '\n' }}{%- endif %}"
    "{%- for tool_call in message.tool_calls %}"
    "{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}'
    "{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- if not loop.last %}{{- '\n' }}{%- endif %}{%- endfor %}"
    "{{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Like Mistral's: no generation prompt, the tools before the last user turn, ids of nine characters.
MISTRAL = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools is not none and message == users[-1] %}{{- '[AVAILABLE_TOOLS] [' }}"
    '{%- for tool in tools %}{{- \'{"type": "function", "function": \' + tool.function | tojson + \'}\' }}'
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls is defined and message.tool_calls is not none %}{% generation %}{{- '[TOOL_CALLS] [' }}"
    "{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}{{- out[:-1] }}"
    "{%- if tool_call.id is not defined or tool_call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{- ', \"id\": \"' + tool_call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}"
    "{%- endfor %}{% endgeneration %}"
    "{%- elif message.role == 'assistant' %}{% generation %}{{- ' ' + message.content | trim + eos_token }}{% endgeneration %}"
    "{%- elif message.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message.content | string + ', ' }}"
    "{{- '\"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
CONTROLS = {
    "llama": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
    "mistral": [
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ],
}
TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather “now”.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    },
]


def _call(name, call_id, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, "id": call_id}


def _talk(several, text):
    """Returns two exchanges with calls and one without, in OpenAI's form; optionally with two calls
    at once, and with text next to a call."""
    first = [_call("weather", "abcdef123", city='Ulm "é"')] + [
        _call("add", "abcdef124", a=[1, 2.5], b=None)
    ] * several
    return [
        {"role": "user", "content": "How is Ulm?"},
        {"role": "assistant", "content": "Let me look." if text else "", "tool_calls": first},
        *[
            {
                "role": "tool",
                "content": f"{number} sunny",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
            }
            for number, call in enumerate(first)
        ],
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Thanks. 1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [_call("add", "abcdef125", a=1, b=2)]},
        {"role": "tool", "content": "3", "tool_call_id": "abcdef125", "name": "add"},
        {"role": "assistant", "content": "Three."},
    ]


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request, tmp_path_factory):
    """Returns (name of the family, our tokenizer, transformers')."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    Tokenizer.load(TINY).with_controls(CONTROLS[request.param]).save(
        folder, TEMPLATES[request.param]
    )
    return request.param, Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def _ids_and_mask(segments):
    return (
        [token for segment in segments for token in segment.ids],
        [int(segment.train) for segment in segments for _ in segment.ids],
    )


def _as_json(talk):
    """Returns the turns with arguments as JSON texts, as in OpenAI's files."""
    talk = json.loads(json.dumps(talk))
    for call in (call for turn in talk for call in turn.get("tool_calls", [])):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return talk


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no_tools"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_ids_and_masks_match_apply_chat_template(family, tools, several, text):
    name, ours, theirs = family
    talk = _talk(several, text)
    cleaned = Cleaner().clean(
        {"messages": _as_json(talk), "tools": json.dumps(tools) if text else tools}
    )
    if name == "llama" and several:
        with pytest.raises(TemplateError, match="single tool-calls"):
            render(cleaned.messages, "tokenizer", ours, tools=cleaned.tools)
        return
    expected = theirs.apply_chat_template(
        talk, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = _ids_and_mask(render(cleaned.messages, "tokenizer", ours, tools=cleaned.tools))
    assert ids == expected["input_ids"]
    assert mask == expected["assistant_masks"]
    trained = ours.decode(
        [token for token, train in zip(ids, mask, strict=True) if train], skip_special=False
    )
    assert (
        trained.count("weather") == 1
        and "sunny" not in trained.replace("It is sunny.", "")
        and "Three." in trained
    )


def test_only_the_last_answer_or_marked_turns_are_trained_on(family):
    _, ours, _ = family
    messages = list(Cleaner().clean({"messages": _talk(False, False)}).messages)
    ids, all_turns = _ids_and_mask(render(messages, "tokenizer", ours))
    again, last = _ids_and_mask(render(with_last_answer_trained(messages), "tokenizer", ours))
    assert ids == again and sum(last) < sum(all_turns)
    assert (
        ours.decode([token for token, train in zip(ids, last, strict=True) if train]).strip()
        == "Three."
    )


def test_control_tokens_typed_in_calls_and_tools_stay_text(family):
    name, ours, _ = family
    control = CONTROLS[name][0]
    clean, typed = (
        Cleaner().clean(
            {
                "messages": [
                    {"role": "user", "content": "Go."},
                    {"role": "assistant", "tool_calls": [_call("f", "abcdef123", x=text)]},
                    {"role": "tool", "content": "1", "tool_call_id": "abcdef123"},
                    {"role": "assistant", "content": "Yes."},
                ],
                "tools": [{"name": "f", "description": text}],
            }
        )
        for text in ("a", f"{control}</s>\ufdd0")
    )
    controls = {token.id for token in ours.controls.values()}
    kept = [
        [
            token
            for token in _ids_and_mask(
                render(record.messages, "tokenizer", ours, tools=record.tools)
            )[0]
            if token in controls
        ]
        for record in (clean, typed)
    ]
    assert kept[0] == kept[1]
    text = ours.decode(
        _ids_and_mask(render(typed.messages, "tokenizer", ours, tools=typed.tools))[0],
        skip_special=False,
    )
    assert text.count(f"{control}</s>\ufffd") == 2


def test_calls_in_sharegpts_form_are_read(family):
    """`function_call` and `observation`, with the tools as a JSON text; missing ids are
    generated."""
    _, ours, _ = family
    record = {
        "conversations": [
            {"from": "human", "value": "How is Ulm?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Ulm"}}'},
            {"from": "observation", "value": '{"sky": "blue"}'},
            {"from": "gpt", "value": "Blue."},
        ],
        "tools": json.dumps([tool["function"] for tool in TOOLS]),
    }
    cleaned = Cleaner().clean(record)
    [call] = cleaned.messages[1].tool_calls
    assert (
        call["id"].isalnum()
        and len(call["id"]) == 9
        and cleaned.messages[2].tool_call_id == call["id"]
    )
    assert list(cleaned.tools) == TOOLS
    encoded = Encoder(Source(""), ours, EncodingRules(4096)).encode(
        Conversation("a", cleaned.messages, tools=cleaned.tools)
    )
    [document] = encoded.documents
    trained = ours.decode(document.tokens[document.loss_mask.astype(bool)])
    assert '"city": "Ulm"' in trained and "sky" not in trained and trained.strip().endswith("Blue.")


CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'
OTHER = '{"name": "add", "arguments": {"a": 1}}'


def _sharegpt(text):
    return {
        "conversations": [
            {"from": "human", "value": "How is Ulm?"},
            {"from": "function_call", "value": text},
            {"from": "observation", "value": "Blue."},
            {"from": "gpt", "value": "Blue."},
        ]
    }


@pytest.mark.parametrize(
    ("text", "names", "reasoning"),
    [
        (CALL, ["weather"], None),
        (f"[{CALL}, {OTHER}]", ["weather", "add"], None),
        (f"{CALL}\n{OTHER}\n", ["weather", "add"], None),
        (f"```json\n{CALL}\n```", ["weather"], None),
        (f"```\n{CALL}\n{OTHER}\n```\n", ["weather", "add"], None),
        (f'{{"tool_calls": [{CALL}, {OTHER}]}}', ["weather", "add"], None),
        (f"<think>\nUlm, then.\n</think>\n\n{CALL}", ["weather"], "Ulm, then."),
        (f"<think></think>```json\n[{CALL}]\n```", ["weather"], ""),
    ],
)
def test_every_way_to_write_calls_as_text_is_read(text, names, reasoning):
    cleaned = Cleaner().clean(_sharegpt(text))
    answer = cleaned.messages[1]
    assert [call["function"]["name"] for call in answer.tool_calls] == names
    assert (answer.content, answer.reasoning) == ("", reasoning)
    assert answer.tool_calls[0]["function"]["arguments"] == {"city": "Ulm"}
    assert not cleaned.unread


@pytest.mark.parametrize(
    "text",
    [
        "get_weather(city='Ulm')",
        CALL.replace('"', "'"),
        '{"action": "weather", "action_input": "Ulm"}',
        f"Let me look. {CALL}",
        f"{CALL} and {OTHER}",
        f"<think>Ulm, then. {CALL}",
        "[]",
        '{"tool_calls": []}',
        "<think>Ulm.</think>",
        "",
        "[" * 100_000,
    ],
)
def test_the_text_of_a_call_that_is_no_call_drops_the_record(text):
    with pytest.raises(Drop, match=r"^a `function_call` or `tool_call` turn whose text is no call"):
        Cleaner().clean(_sharegpt(text))


def test_unread_fields_around_calls_in_a_text_are_named():
    wrapped = f'{{"tool_calls": [{CALL[:-1]}, "index": 1}}], "role": "assistant", "content": null}}'
    assert Cleaner().clean(_sharegpt(wrapped)).unread == {
        "tool call's field `index`",
        "tool call's field `role`",
    }


def test_templates_without_calls_refuse_them_and_omit_tools():
    tokenizer = Tokenizer.load(TINY)
    cleaned = Cleaner().clean({"messages": _talk(False, False), "tools": TOOLS})
    encoder, plain_encoder = (
        Encoder(Source("", template=template), tokenizer, EncodingRules(4096))
        for template in ("vicuna_v1.1", "plain")
    )
    with_calls = Conversation("a", cleaned.messages)
    assert "tool" in encoder.encode(with_calls).drop_reason
    assert "`tool_calls`" in plain_encoder.encode(with_calls).drop_reason
    plain = Conversation(
        "a", (Message("user", "a"), Message("assistant", "b")), tools=cleaned.tools
    )
    assert encoder.encode(plain).changes == {"descriptions in `tools` left out"}


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "without a name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "not a JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "not a JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "kwargs": {"a": 1}}]},
            "^a tool call without `arguments`: it has the fields id, name, kwargs$",
        ),
        (
            {"role": "tool_call", "content": '{"name": "f", "kwargs": {"a": 1}}'},
            "no call in JSON: a tool call without `arguments`: it has the fields name, kwargs$",
        ),
        (
            {"role": "assistant", "tool_calls": "f(a=1)"},
            "^`tool_calls` that is a text, but no call in JSON$",
        ),
        ({"role": "user", "tool_calls": [{"function": {"name": "f"}}]}, "not the assistant's"),
    ],
)
def test_broken_calls_are_dropped_with_a_reason(turn, reason):
    with pytest.raises(Drop, match=reason):
        Cleaner().clean({"messages": [{"role": "user", "content": "a"}, turn]})


@pytest.mark.parametrize(
    "call",
    [
        {"name": "f", "args": {"a": 1}, "id": "c", "type": "tool_call"},  # LangChain's
        {"name": "f", "input": {"a": 1}, "id": "c", "type": "tool_use"},  # Anthropic's
        {"name": "f", "parameters": {"a": 1}, "id": "c"},
        {"name": "f", "arguments": None, "args": '{"a": 1}', "id": "c"},
        {"name": "f", "arguments": "", "input": {"a": 1}, "id": "c"},
        {"function": {"name": "f"}, "args": {"a": 1}, "id": "c", "type": "function"},
    ],
    ids=str,
)
def test_arguments_are_read_under_every_name(call):
    expected = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "c"}
    question = {"role": "user", "content": "Go."}
    for turn in (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([call])},
        {"role": "assistant", "content": "", "tool_calls": repr([call])},
        {"role": "assistant", "content": "", "tool_calls": [json.dumps(call)]},
        {"role": "assistant", "content": "", "function_call": json.dumps(call)},
        {"role": "function_call", "content": json.dumps(call)},
    ):
        cleaned = Cleaner().clean({"messages": [question, turn]})
        assert cleaned.messages[1].tool_calls == (expected,)
        assert not cleaned.unread and not cleaned.changes


@pytest.mark.parametrize(
    ("call", "arguments", "unread"),
    [
        (
            {"name": "f", "arguments": {}, "parameters": {"type": "object"}},
            {},
            ["parameters"],
        ),
        (
            {"function": {"name": "f", "arguments": {}}, "input": "the user's text"},
            {},
            ["input"],
        ),
        (
            {"function": {"name": "f", "args": {"a": 1}}, "arguments": {"b": 2}},
            {"a": 1},
            ["arguments"],
        ),
        (
            {"function": {"name": "f", "arguments": {}}, "arguments": {"b": 2}, "name": "g"},
            {},
            ["arguments", "name"],
        ),
        ({"function": {"name": "f", "arguments": None}, "arguments": {"a": 1}}, {"a": 1}, []),
        ({"function": None, "name": "f", "arguments": {"a": 1}}, {"a": 1}, []),
    ],
    ids=str,
)
def test_another_field_never_replaces_a_calls_arguments(call, arguments, unread):
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", **call}]}
    cleaned = Cleaner().clean({"messages": [{"role": "user", "content": "Go."}, turn]})
    expected = {"type": "function", "function": {"name": "f", "arguments": arguments}, "id": "c"}
    assert cleaned.messages[1].tool_calls == (expected,)
    assert cleaned.unread == {f"tool call's field `{field}`" for field in unread}


@pytest.mark.parametrize("padding", [None, "null", "", "None"])
def test_a_list_of_calls_may_be_padded(padding):
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL, padding]}
    cleaned = Cleaner().clean({"messages": [{"role": "user", "content": "Go."}, turn]})
    assert [call["function"]["name"] for call in cleaned.messages[1].tool_calls] == ["weather"]
    assert not cleaned.unread


@pytest.mark.parametrize("none", ["[]", "null", "", "None", [], None])
def test_turns_without_calls_may_have_a_column_for_them(none):
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    columns = {"tool_calls": none, "function_call": none}
    cleaned = Cleaner().clean({"messages": [{**turn, **columns} for turn in turns]})
    assert not any(message.tool_calls for message in cleaned.messages) and not cleaned.unread
    old = {"function_call": {"name": "f", "arguments": "{}"}}
    cleaned = Cleaner().clean({"messages": [turns[0], {**turns[1], "tool_calls": none, **old}]})
    assert cleaned.messages[1].tool_calls[0]["function"]["name"] == "f" and not cleaned.unread


def _answers(turns):
    """Returns the names of the calls of each turn, and for each result that of its call."""
    cleaned = Cleaner().clean({"messages": [{"role": "user", "content": "Go."}, *turns]})
    calls = [call for message in cleaned.messages for call in message.tool_calls]
    names = {call["id"]: call["function"]["name"] for call in calls}
    assert len(names) == len(calls)
    per_turn = [[c["function"]["name"] for c in m.tool_calls] for m in cleaned.messages]
    results = {m.content: names[m.tool_call_id] for m in cleaned.messages if m.role == "tool"}
    return list(filter(None, per_turn)), results, cleaned


_ROW = {"role": "tool_call", "content": '{"name": "f", "arguments": {"a": 1}}'}
_OTHER_ROW = {"role": "tool_call", "content": '{"name": "g", "arguments": {"a": 1}}'}
_RESULTS = [{"role": "tool_response", "content": text} for text in ("F", "G")]
_END = {"role": "assistant", "content": "Done."}


def test_calls_in_turns_one_after_another_are_one_turn():
    """As ms-swift writes parallel calls; each result answers its call."""
    calls, results, cleaned = _answers([_ROW, _OTHER_ROW, *_RESULTS, _END])
    assert calls == [["f", "g"]] and results == {"F": "f", "G": "g"}
    joined = "calls in turns one after another joined to one turn"
    assert joined in cleaned.changes and not cleaned.unread
    assert [m.role for m in cleaned.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    in_turn = [_ROW, _RESULTS[0], _OTHER_ROW, _RESULTS[1], _END]
    calls, results, cleaned = _answers(in_turn)
    assert calls == [["f"], ["g"]] and results == {"F": "f", "G": "g"}
    assert joined not in cleaned.changes


@pytest.mark.parametrize(
    "second",
    [
        {**_OTHER_ROW, "train": False},
        {**_OTHER_ROW, "content": "<think>And g.</think>" + _OTHER_ROW["content"]},
        {"role": "assistant", "tool_calls": [{"name": "g", "arguments": {}}]},
    ],
    ids=["loss", "reasoning", "tool_calls"],
)
def test_results_of_calls_in_several_turns_answer_them_in_order(second):
    calls, results, _ = _answers([_ROW, second, *_RESULTS, _END])
    assert calls == [["f"], ["g"]] and results == {"F": "f", "G": "g"}


def test_results_answer_the_call_of_their_name():
    named = [{**result, "name": name} for result, name in zip(_RESULTS, "fg", strict=True)]
    _, results, _ = _answers([_ROW, _OTHER_ROW, *reversed(named), _END])
    assert results == {"F": "f", "G": "g"}
    _, results, _ = _answers([_ROW, {**_RESULTS[0], "name": "other"}, _END])
    assert results == {"F": "f"}


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "f", "description": "F.", "input_schema": {"type": "object"}},
        {"type": "custom", "name": "f", "description": "F.", "input_schema": {"type": "object"}},
        {"name": "f", "description": "F.", "inputSchema": {"type": "object"}},
        {"name": "f", "description": "F.", "input_schema": {"type": "object"}, "parameters": None},
    ],
    ids=["Anthropic", "Anthropic with type", "MCP", "both columns"],
)
def test_tools_of_other_services_are_put_into_openais_form(tool):
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    for tools in ([tool], [json.dumps(tool)], json.dumps([tool])):
        cleaned = Cleaner().clean({"messages": turns, "tools": tools})
        assert cleaned.tools == ({"type": "function", "function": function},)
        assert cleaned.changes == {"descriptions of tools put into OpenAI's form, under `function`"}


def test_only_descriptions_of_functions_are_put_into_openais_form(family):
    """Those of a service's own tools are written as transformers writes them."""
    name, ours, theirs = family
    function = {"name": "add", "parameters": {"type": "object"}}
    nested = {"type": "function", "function": function}
    others = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
    record = {"messages": _talk(False, False)}
    for flat in (function, {"type": "function", **function}):
        cleaned = Cleaner().clean({**record, "tools": [flat, nested]})
        assert list(cleaned.tools) == [nested, nested]
        assert cleaned.changes == {"descriptions of tools put into OpenAI's form, under `function`"}
    cleaned = Cleaner().clean({**record, "tools": [nested, *others]})
    assert list(cleaned.tools) == [nested, *others] and not cleaned.changes
    if name != "mistral":  # whose template reads `function`
        expected = theirs.apply_chat_template(
            record["messages"], tools=[nested, *others], return_dict=False
        )
        ids, _ = _ids_and_mask(render(cleaned.messages, "tokenizer", ours, tools=cleaned.tools))
        assert ids == expected


@pytest.mark.parametrize("arguments", ['{"city":"Ulm"}', '{"x": 1.50}', '{"x": "\\u00e9"}', ""])
def test_arguments_and_results_that_are_written_anew_are_counted(arguments):
    def changes(arguments, result):
        call = {"id": "abcdef123", "function": {"name": "weather", "arguments": arguments}}
        turns = [
            {"role": "user", "content": "How is Ulm?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": "Sunny."},
        ]
        cleaned = Cleaner().clean({"messages": turns})
        return cleaned.messages[2].content, cleaned.changes

    anew = "arguments of a call that were JSON text, written anew"
    assert changes(arguments, "sunny") == ("sunny", {anew})
    assert changes('{"city": "Ulm", "x": 1.5}', "sunny") == ("sunny", set())
    assert changes({"city": "Ulm"}, '{"sky":1}') == ('{"sky":1}', set())
    as_text = "a tool's result that was a JSON value, written as JSON text"
    assert changes({}, {"sky": 1}) == ('{"sky": 1}', {as_text})
    assert changes({}, [{"sky": 1}]) == ('[{"sky": 1}]', {as_text})
    for value in (4, 1.5, True, None):
        assert changes({}, value) == (json.dumps(value), {as_text})


def test_only_the_completion_of_a_prompt_is_trained_on(tmp_path):
    """As texts under a template, as lists of turns, and as plain text."""
    tokenizer = Tokenizer.load(TINY)
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "\n".join(
            map(
                json.dumps,
                [
                    {"prompt": "Say hello to the ", "completion": "world, please"},
                    {"prompt": turns, "completion": [{"role": "assistant", "content": "Four."}]},
                    {"prompt": "a", "completion": ["b", "c"]},
                ],
            )
        )
    )

    def trained(format):
        report, source = Report(), Source(str(path), format, template="plain")
        encoder = Encoder(source, tokenizer, EncodingRules(512))
        texts = []
        for record in read(source, report):
            [document] = encoder.encode(record).documents
            in_loss = document.tokens[document.loss_mask.astype(bool)]
            texts.append((tokenizer.decode(document.tokens), tokenizer.decode(in_loss)))
        return texts, dict(report.dropped)

    texts, dropped = trained("sharegpt")
    assert texts[0] == ("Say hello to the\n\nworld, please", "world, please")
    assert texts[1] == ("One?\n\nTwo.\n\nThree?\n\nFour.", "Four.")
    assert list(dropped.values()) == [1] and "`completion` (list)" in next(iter(dropped))
    texts, dropped = trained("text")
    assert [text.strip() for text in texts[0]] == [
        "Say hello to the world, please",
        "world, please",
    ]
    assert sum(dropped.values()) == 2 and all(reason.startswith("no `text`") for reason in dropped)
    document = (
        Encoder(Source("", "text"), tokenizer, EncodingRules(512))
        .encode(Text("a", "Say hello to the world, please"))
        .documents[0]
    )
    assert tokenizer.decode(document.tokens) == texts[0][0] and document.loss_mask.all()
