"""Cleaning: what each rule drops or changes and what it keeps; filters are off by default;
splitting loses nothing."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import html
from data.clean import SETS, CleanConfig, Cleaner
from data.conversation import Message
from data.reasons import MADE_IDS, Drop
from data.splitting import split

SCRAPED = SETS["scraped"]


def talk(*contents, system=None):
    """Returns a record of alternating turns."""
    turns = [
        {"from": ("human", "gpt")[i % 2], "value": content} for i, content in enumerate(contents)
    ]
    return {"conversations": ([{"from": "system", "value": system}] if system else []) + turns}


def contents(record, **options):
    """Returns the contents of the cleaned turns."""
    return [message.content for message in Cleaner(CleanConfig(**options)).clean(record)[1]]


@pytest.mark.parametrize(
    ("rule", "record", "kept"),
    [
        (
            {"refusals": True},
            talk("Hi", "As an AI language model, I do not eat."),
            talk("Why?", "Because I am an ailing man."),
        ),
        (
            {"refusals": True},
            talk("Hi", "I'm sorry, but I cannot do that."),
            talk("I'm sorry, but I cannot go.", "Fine."),
        ),
        (
            {"company_names": True},
            talk("Who made you?", "OpenAI did."),
            talk("Who made you?", "An open-air cinema."),
        ),
        (
            {"languages": ("en",)},
            talk("Wie geht es dir heute, mein Freund?", "Sehr gut, danke, und dir auch?"),
            talk("How are you doing today, my old friend?", "Very well, thank you, and you?"),
        ),
    ],
)
def test_filters_drop_only_if_enabled(rule, record, kept):
    assert contents(record) and contents(kept) and contents(kept, **rule)
    with pytest.raises(Drop):
        contents(record, **rule)


def test_a_record_in_alpacas_form_is_one_exchange():
    assert contents({"instruction": "Add.", "input": "1, 2", "output": "3"}) == [
        "Add.\n\n1, 2",
        "3",
    ]
    assert contents({"instruction": "Sing.", "input": "", "output": "La."}) == ["Sing.", "La."]
    with pytest.raises(Drop, match="it has the fields instruction, output"):
        contents({"instruction": "Sing.", "output": None})


def test_a_system_text_becomes_the_first_turn_and_tools_are_reported():
    exchange = talk("Hi", "Ho")
    for record in (
        {**exchange, "system": " Be brief. "},
        {**exchange, "system_prompt": "Be brief."},
        {**talk("Hi", "Ho", system="Be brief."), "system": "Never mind."},
        {
            "conversations": [{"from": "system", "value": " "}, *exchange["conversations"]],
            "system": "Be brief.",
        },
        {"instruction": "Hi", "output": "Ho", "system": "Be brief.", "history": []},
    ):
        turns = Cleaner().clean(record)[1]
        assert [(turn.role, turn.content) for turn in turns] == [
            ("system", "Be brief."),
            ("user", "Hi"),
            ("assistant", "Ho"),
        ]
    for nothing in (None, "", " ", 3, {"a": "b"}):
        assert contents({**exchange, "system": nothing, "tools": []}) == ["Hi", "Ho"]
    assert contents({"instruction": "c", "output": "d", "history": [["a", "b"]]}) == [
        "a",
        "b",
        "c",
        "d",
    ]
    with pytest.raises(Drop, match="`history`"):
        contents({"instruction": "c", "output": "d", "history": ["a", "b"]})
    tool = {"type": "function", "function": {"name": "f"}}
    described = Cleaner().clean({**exchange, "tools": [tool]})
    assert described.changes == set() and described.tools == (tool,)
    for broken in ("f(x)", {"name": "f"}, ["f"]):
        assert Cleaner().clean({**exchange, "tools": broken}).changes == {
            "descriptions in `tools` left out"
        }
    called = {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    _, call, result, _ = (
        Cleaner()
        .clean(
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    called,
                    {"role": "tool", "content": "1"},
                    {"role": "assistant", "content": "One."},
                ]
            }
        )
        .messages
    )
    assert call.content == "Let me look." and call.tool_calls[0]["function"] == {
        "name": "f",
        "arguments": {},
    }
    assert result.content == "1" and result.tool_call_id == call.tool_calls[0]["id"]


@pytest.mark.parametrize(("ids", "made"), [({}, True), ({"id": ""}, True), ({"id": "c1"}, False)])
def test_ids_made_for_calls_are_counted(ids, made):
    call = {"function": {"name": "f", "arguments": {}}, **ids}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", **({} if made else {"tool_call_id": "c1"})},
        {"role": "assistant", "content": "One."},
    ]
    assert (MADE_IDS in Cleaner().clean({"messages": turns}).changes) is made


@pytest.mark.parametrize(
    ("flag", "train"),
    [
        ({}, True),
        ({"train": True}, True),
        ({"train": False}, False),
        ({"train": 0}, False),
        ({"train": "false"}, False),
        ({"train": "?"}, True),
        ({"loss": False}, False),
        ({"loss": True}, True),
        ({"training": False}, False),
        ({"trainable": 0}, False),
        ({"weight": 0}, False),
        ({"weight": 1.0}, True),
        ({"weight": None}, True),
        ({"weight": float("nan")}, True),
        ({"mask": True}, False),
        ({"mask": False}, True),
        ({"masked": 1}, False),
        ({"train": True, "weight": 0}, False),
    ],
)
def test_a_turns_flag_decides_whether_it_is_trained_on(flag, train):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **flag}]
    assert [message.train for message in Cleaner().clean({"messages": turns})[1]] == [True, train]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["<p>x</p>", "\ud83d"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "train", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)
TURNS = st.lists(
    st.dictionaries(
        st.sampled_from(["from", "role", "value", "content", "train"]),
        JSON | st.sampled_from(["human", "gpt", "tool", "system", "Hi"]),
        max_size=4,
    )
    | JSON,
    max_size=4,
)


KEYS = ["id", "conversations", "messages", "instruction", "output", "system", "history"]


@given(
    st.dictionaries(st.sampled_from(KEYS), TURNS | JSON) | JSON,
    st.builds(
        CleanConfig, html=st.sampled_from(["detect", "always", "never"]), refusals=st.booleans()
    ),
    st.sampled_from(["any", "question first", "alternating"]),
)
def test_any_json_gives_ordered_turns_or_a_reason(record, config, order):
    try:
        identity, messages, *_ = Cleaner(config, order).clean(record)
    except Drop as drop:
        assert str(drop)
        return
    assert isinstance(identity, str) and identity
    roles = [message.role for message in messages]
    roles = roles[1:] if roles[0] == "system" else roles
    assert roles[-1] == "assistant" and "user" in roles
    if order != "any":
        assert roles[0] != "assistant"
    if order == "alternating":
        assert roles[0] == "user" and "system" not in roles
    assert all(
        message.content.encode() or message.reasoning or message.role in ("system", "tool")
        for message in messages
    )


def test_duplicates_are_detected_by_the_text_of_turns():
    cleaner, again = Cleaner(), {**talk("Hi", "Ho"), "id": "another"}
    cleaner.clean(talk("Hi", "Ho"))
    cleaner.clean(talk("Hi", "Ho", system="Sing."))
    with pytest.raises(Drop, match="duplicate"):
        cleaner.clean(again)
    lenient = Cleaner(CleanConfig(duplicates=False))
    assert [lenient.clean(again)[0] for _ in range(2)] == ["another"] * 2


def test_the_same_turns_trained_on_differently_are_no_duplicates():
    """As in OpenAI's files, which weigh answers. A record without flags has the digest, and so the
    id, of one whose flags say the same."""

    def weighed(*weights):
        turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
        messages = [{"role": role, "content": content} for role, content in turns]
        for answer, weight in zip(messages[1::2], weights, strict=False):
            answer["weight"] = weight
        return {"messages": messages}

    cleaner = Cleaner()
    kept = [cleaner.clean(weighed(*weights)) for weights in ((1, 0), (0, 1), ())]
    assert [[turn.train for turn in talk.messages[1::2]] for talk in kept] == [
        [True, False],
        [False, True],
        [True, True],
    ]
    turns = [["user", "a"], ["assistant", "b"], ["user", "c"], ["assistant", "d"]]
    digest = hashlib.sha256(json.dumps(turns).encode()).hexdigest()
    assert kept[2].id == digest[:16] and len({talk.id for talk in kept}) == 3
    for again in ((1, 0), (0, 1), (1, 1), ()):
        with pytest.raises(Drop, match="duplicate"):
            cleaner.clean(weighed(*again))
    opening = {"messages": [{"role": "assistant", "content": "z"}, *weighed()["messages"]]}
    digest = hashlib.sha256(json.dumps([["assistant", "z"], *turns]).encode()).hexdigest()
    assert cleaner.clean(opening).id == digest[:16], "an opening answer's exclusion is no flag"


def test_a_busy_reply_ends_a_conversation_but_a_mention_of_one_does_not():
    busy = "Too many requests in 1 hour. Try again later."
    assert contents(talk("a", "b", "c", busy, "d", "e"), **SCRAPED) == ["a", "b"]
    assert contents(talk("a", "b", "c", busy)) == ["a", "b", "c", busy]
    assert len(contents(talk(busy, "You were too quick."), **SCRAPED)) == 2
    longer = f"{busy[:-1]}: the service says so " + "when it is asked too much. " * 20
    assert len(contents(talk("What is it?", longer), **SCRAPED)) == 2
    with pytest.raises(Drop, match="the only answer is a service's error message"):
        contents(talk("a", busy, "b", "c", system="s"), **SCRAPED)


@pytest.mark.parametrize("apostrophe", ["'", "’"])
def test_both_apostrophes_are_recognized(apostrophe):
    busy = f"You{apostrophe}ve reached our usage limit. Try again later."
    assert contents(talk("a", "b", "c", busy), **SCRAPED) == ["a", "b"]
    for written in (
        "I'm sorry, but I can't help with that.",
        "I can't assist with it.",
        "Well, I'm just an AI of few words.",
    ):
        refusal = written.replace("'", apostrophe)
        assert contents(talk("a", refusal)) == ["a", refusal]
        with pytest.raises(Drop, match="refusal"):
            contents(talk("a", refusal), refusals=True)


@pytest.mark.parametrize(
    "text",
    [
        "Use <b>bold</b> & so on",
        "<div>\n <p>page</p>\n</div>",
        "<!DOCTYPE html><p>x</p>",
        "<p>x</p> is a paragraph",
        "```html\n<p>x</p>\n```",
        "<https://a.b/c>",
        "vector<int> &amp;",
        "1 / 2\nCopy code",
    ],
)
def test_markdown_with_html_is_left_unchanged(text):
    assert contents(talk(text, text), **SCRAPED) == [text, text]


def test_html_pages_become_markdown():
    page = (
        '<h2>Title</h2><p>A <a href="https://x.y">link</a><br>and <em>more_or_less</em> 2 * 3</p>'
    )
    assert (
        contents(talk("?", page), **SCRAPED)[1]
        == "## Title\n\nA [link](https://x.y)  \nand *more_or_less* 2 * 3"
    )
    assert contents(talk("?", page))[1] == page
    assert contents(talk("?", "a &lt; b <b>c</b>"), html="always")[1] == "a < b **c**"
    formula = (
        '<p>So <span class="katex"><span><math><mi>x</mi>'
        "<annotation>x^2</annotation></math></span><span>x2</span></span></p>"
    )
    assert html.to_markdown(formula) == "So $x^2$"
    assert html.to_markdown("<p>2 / 3</p><p>Text</p>") == "Text"
    with pytest.raises(Drop, match="empty turn"):
        contents(talk("?", "<p> </p>"), **SCRAPED)
    with pytest.raises(Drop, match="cannot be read"):
        contents(talk("?", "<b>" * 5000), html="always")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.booleans(), st.integers(1, 60))
def test_splitting_keeps_every_exchange_in_order(sizes, with_system, room):
    messages = [Message("system", "s")] * with_system
    for number, size in enumerate(sizes):
        messages += [Message("user", f"{number}"), Message("assistant", "x" * size)]

    def length(part):
        return sum(len(message.content) for message in part if message.role == "assistant")

    parts = list(split(messages, list, length, room, messages))
    assert all(part[:with_system] == messages[:with_system] for part in parts)
    bodies = [part[with_system:] for part in parts]
    assert [message for body in bodies for message in body] == messages[with_system:]
    for body, following in zip(bodies, [*bodies[1:], None], strict=True):
        assert body[0].role == "user" and body[-1].role == "assistant"
        assert length(body) <= room or len(body) == 2
        assert following is None or length(body) + len(following[1].content) > room, (
            "a part has room for the next exchange"
        )
