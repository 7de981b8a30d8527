"""Turns: reasoning wherever records have it, loss flags, role names, and the order that templates
can write."""

import pytest

from data.clean import Cleaner
from data.conversation import Conversation
from data.encode import Encoder, EncodingRules
from data.reasons import Drop
from data.roles import role_of
from data.sources import Source
from data.templates.alternation import order_of
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

USER, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}


def clean(*turns, **fields):
    return Cleaner().clean({"messages": list(turns), **fields})


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning_content": "so"},
        {"reasoning": "so"},
        {"thinking": "so"},
        {"reasoning": "so", "reasoning_content": "so"},
        {"content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Hello."}]},
        {"content": [{"text": "so", "thought": True}, {"text": "Hello.", "thought": False}]},
        {"content": [{"type": "reasoning", "value": "so"}, {"type": "text", "value": "Hello."}]},
        {"content": [{"type": "thinking", "text": "so"}, {"type": "text", "content": "Hello."}]},
    ],
)
def test_reasoning_is_separated_from_content(more):
    cleaned = clean(USER, {**ANSWER, **more})
    assert (
        cleaned.messages[1].reasoning == "so"
        and cleaned.messages[1].content == "Hello."
        and not cleaned.unread
    )


def test_a_field_of_a_part_without_a_type_is_named():
    """Gemini's parts have none."""
    cleaned = clean(
        {"role": "user", "parts": [{"text": "Hi?", "thought": True}]},
        {"role": "model", "parts": [{"text": "Hello.", "thoughtSignature": "x"}]},
    )
    assert [turn.content for turn in cleaned.messages] == ["Hi?", "Hello."]
    assert cleaned.unread == {
        "content part's field `thought`",
        "content part's field `thoughtSignature`",
    }


def test_a_reasoning_turn_belongs_to_the_following_answer():
    cleaned = clean(USER, {"role": "thinking", "content": "so"}, ANSWER)
    assert [turn.role for turn in cleaned.messages] == ["user", "assistant"] and cleaned.messages[
        1
    ].reasoning == "so"
    for turns in (
        [USER, {"role": "thinking", "content": "so"}],
        [{"role": "thinking", "content": "so"}, USER, ANSWER],
    ):
        with pytest.raises(Drop, match="reasoning without an answer"):
            clean(*turns)


def test_misplaced_reasoning_is_named():
    cleaned = clean({**USER, "thinking": "hm"}, {**ANSWER, "reasoning": "a", "thinking": "b"})
    assert cleaned.messages[1].reasoning == "b"
    assert cleaned.unread == {"turn field `thinking`", "turn field `reasoning`"}
    beside_call = clean(
        USER,
        {
            "role": "assistant",
            "reasoning_content": "so",
            "tool_calls": [{"function": {"name": "f"}}],
        },
    )
    assert beside_call.messages[1].reasoning == "so" and beside_call.messages[1].tool_calls
    assert clean(USER, ANSWER).id != clean(USER, {**ANSWER, "reasoning": "a"}).id, (
        "reasoning is not part of the id"
    )


def test_loss_flags_and_masks_are_counted():
    cleaned = clean(
        {**USER, "loss": True},
        {**ANSWER, "loss": False},
        USER,
        {**ANSWER, "weight": 0.5, "train": "?"},
    )
    assert [turn.train for turn in cleaned.messages if turn.role == "assistant"] == [False, True]
    assert cleaned.changes == {
        "turns left out of the loss by `loss`",
        "`weight` between 0 and 1, or above: counted as 1",
        "a flag puts a turn that is not the assistant's into the loss: only data.train_on: everything "
        "does",
    }
    assert cleaned.unread == {"turn field `train`"}
    assert not clean(USER, {**ANSWER, "weight": "1"}).changes  # of a CSV file
    for mask in ([0, 0, 0, 1], [False, True], "[0, 0, 0, 1]", "[False, True]"):
        masked = clean(USER, ANSWER, USER, ANSWER, loss_mask=mask)
        assert [turn.train for turn in masked.messages if turn.role == "assistant"] == [False, True]
        assert masked.changes == {"turns left out of the loss by `loss_mask`"} and not masked.unread
    for mask in ([1], "1101", [1, 1, 1, None], 3):
        with pytest.raises(Drop, match="`loss_mask` does not match the turns"):
            clean(USER, ANSWER, USER, ANSWER, loss_mask=mask)


def test_flags_of_any_turn_are_kept_for_a_loss_on_everything():
    part = {"type": "text", "text": "Hi.", "train": False}
    for turn in ({**USER, "train": False}, {**USER, "mask": 1}, {**USER, "content": [part]}):
        cleaned = clean(turn, ANSWER, USER, ANSWER)
        assert [message.train for message in cleaned.messages] == [False, True, True, True]
        assert not cleaned.unread
    masked = clean(USER, ANSWER, USER, ANSWER, loss_mask=[0, 1, 1, 0])
    assert [message.train for message in masked.messages] == [False, True, True, False]


@pytest.mark.parametrize("name", ["loss_weight", "loss_scale"])
def test_a_peers_weight_of_a_turn_is_a_flag(name):
    """LLaMA-Factory's `loss_weight` and ms-swift's `loss_scale`; a user's turn has one too."""
    cleaned = clean({**USER, name: 0.0}, {**ANSWER, name: 0.0}, USER, {**ANSWER, name: 0.5})
    assert [turn.train for turn in cleaned.messages if turn.role == "assistant"] == [False, True]
    assert cleaned.changes == {
        f"turns left out of the loss by `{name}`",
        f"`{name}` between 0 and 1, or above: counted as 1",
    }
    assert not cleaned.unread


def test_flags_of_all_parts_are_the_turns():
    parts = [{"type": "text", "text": "Hel", "train": False}, {"type": "text", "text": "lo."}]
    parts[1]["weight"] = 0
    cleaned = clean({**USER, "content": parts[:1]}, {**ANSWER, "content": parts}, USER, ANSWER)
    assert [turn.train for turn in cleaned.messages if turn.role == "assistant"] == [False, True]
    assert cleaned.changes == {
        "parts of a content joined to one text",
        "turns left out of the loss by `train`",
        "turns left out of the loss by `weight`",
    }
    assert not cleaned.unread
    fraction = clean(USER, {**ANSWER, "content": [{"type": "text", "text": "A.", "weight": 0.5}]})
    assert fraction.changes == {"`weight` between 0 and 1, or above: counted as 1"}
    asked = clean({**USER, "content": [{**parts[0], "train": True}]}, ANSWER)
    assert asked.changes == {
        "a flag puts a turn that is not the assistant's into the loss: only data.train_on: everything "
        "does"
    }


FLAGGED = {"type": "text", "text": "Hello.", "train": False}
TEXT = {"type": "text", "text": "Hi."}


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ({"content": [FLAGGED, TEXT]}, "train"),
        ({"content": [{**TEXT, "weight": 0}, {**TEXT, "weight": 1}]}, "weight"),
        ({"content": [{"type": "thinking", "thinking": "so", "mask": True}, TEXT]}, "mask"),
        ({"content": [FLAGGED], "reasoning_content": "so"}, "train"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]},
            "train_detail",
        ),
    ],
)
def test_a_flag_of_a_part_of_an_answer_drops_the_record(answer, name):
    answer = {**ANSWER, **answer}
    with pytest.raises(Drop, match=f"takes only a part of an answer out of the loss: `{name}`"):
        clean(USER, answer)
    assert not clean(USER, {**answer, "train": False}, USER, ANSWER).messages[1].train


def test_parts_may_be_calls():
    """As in LLaMA-Factory's own demonstrations."""
    calls = [
        {"type": "tool_call", "value": f'{{"name": "f", "arguments": {{"x": {x}}}}}'}
        for x in (1, 2)
    ]
    parts = [{"type": "reasoning", "value": "so"}, {"type": "text", "value": "Hello."}, *calls]
    results = [{"role": "tool", "content": [{"type": "text", "value": "[4]"}]}] * 2
    messages = clean(USER, {**ANSWER, "content": parts}, *results, ANSWER).messages
    assert (messages[1].reasoning, messages[1].content) == ("so", "Hello.")
    functions = [call["function"] for call in messages[1].tool_calls]
    assert functions == [{"name": "f", "arguments": {"x": x}} for x in (1, 2)]
    assert [turn.content for turn in messages[2:4]] == ["[4]", "[4]"]
    with pytest.raises(Drop, match="whose text is no call in JSON"):
        clean(USER, {**ANSWER, "content": [{"type": "tool_call", "value": "f(1)"}]})
    with pytest.raises(Drop, match="a content part that is not text: tool_call"):
        clean({**USER, "content": calls}, ANSWER)


def test_a_result_that_is_a_list_of_values_stays_json():
    result = {"role": "tool", "content": [{"value": "4"}, {"content": "5"}]}
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert clean(USER, call, result, ANSWER).messages[2].content == (
        '[{"value": "4"}, {"content": "5"}]'
    )


THOUGHT = {"role": "thought", "content": "so"}


@pytest.mark.parametrize("mask", [[0, 0, 0, 0, 1], [0, 1, 0, 0, 1], [0, 0, 0, 1], [0, 1]], ids=str)
def test_a_loss_mask_may_have_an_entry_for_reasoning(mask):
    masked = clean(USER, THOUGHT, ANSWER, USER, ANSWER, loss_mask=mask)
    assert [turn.train for turn in masked.messages if turn.role == "assistant"] == [False, True]
    assert masked.changes == {"turns left out of the loss by `loss_mask`"}


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"masked": True}], ids=str)
def test_a_flag_on_reasoning_alone_is_counted(flag):
    ignored = "a flag takes reasoning out of the loss, but not its answer: ignored"
    flagged = clean(USER, {**THOUGHT, **flag}, ANSWER)
    assert flagged.messages[1].train and flagged.changes == {ignored} and not flagged.unread
    masked = clean(USER, THOUGHT, ANSWER, loss_mask=[0, 0, 1])
    assert masked.messages[1].train and masked.changes == {ignored}
    both = clean(USER, {**THOUGHT, **flag}, {**ANSWER, **flag})
    assert not both.messages[1].train and ignored not in both.changes
    assert not clean(USER, {**THOUGHT, "train": True}, ANSWER).changes


@pytest.mark.parametrize("content", [42, 1.5, True])
def test_a_content_that_is_no_text_is_named(content):
    kind = type(content).__name__
    with pytest.raises(Drop, match=rf"a turn whose content is not text: `content` \({kind}\)"):
        clean(USER, {"role": "assistant", "content": content})


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("gpt-4o", "assistant"),
        ("gpt4", "assistant"),
        ("GPT-4-turbo-2024-04-09", "assistant"),
        ("claude-3.5-sonnet", "assistant"),
        ("llm", "assistant"),
        ("chat-gpt", "assistant"),
        ("function-call", "assistant"),
        ("function response", "tool"),
        ("thinking", "thought"),
        (" Human ", "user"),
        ("narrator", None),
        ("gptuser", None),
        ("", None),
    ],
)
def test_role_names_of_real_dumps_are_recognized(name, role):
    assert role_of(name) == role


def test_an_unknown_role_and_part_are_named():
    with pytest.raises(Drop, match=r"^unknown role: narrator$"):
        clean(USER, {"role": "narrator", "content": "x"})
    with pytest.raises(Drop, match="a content part that is not text: image_url"):
        clean({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ANSWER)
    with pytest.raises(Drop, match="a content part without a text: it has the fields type, ref"):
        clean({"role": "user", "content": [{"type": "text", "ref": "a", "text": None}]}, ANSWER)


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ({"role": "assistant", "content": None}, "`content` is null; it has the fields role"),
        (
            {"role": "assistant", "content": None, "refusal": "No.", "audio": None},
            "`content` is null; it has the fields role, refusal",
        ),
        ({"role": "assistant", "audio": {"id": "x"}}, "it has the fields role, audio"),
        ({"type": "message", "text": "Hi.", "ts": "1"}, "it has the fields type, text, ts"),
        (
            {"author": {"name": "bob"}, "content": "Hi."},
            "`author` is no text (dict); it has the fields author, content",
        ),
        ({"role": None, "content": ""}, "it has no fields"),
        ([USER, ANSWER], "it is a list"),
        (
            {"role": "tool", "content": None, "output": "4"},
            "`content` is null; it has the fields role, output",
        ),
    ],
)
def test_what_a_turn_without_role_or_text_has_is_named(turn, found):
    with pytest.raises(Drop) as dropped:
        clean(USER, ANSWER, turn)
    assert str(dropped.value) == f"a turn without role or text: {found}"


SYSTEM = {"role": "system", "content": "Be."}


@pytest.mark.parametrize(
    ("turns", "roles"),
    [
        ([USER, USER, ANSWER], ["user", "user", "assistant"]),
        ([USER, ANSWER, ANSWER], ["user", "assistant", "assistant"]),
        (
            [USER, ANSWER, SYSTEM, USER, ANSWER],
            ["user", "assistant", "system", "user", "assistant"],
        ),
        ([ANSWER, USER, ANSWER], ["assistant", "user", "assistant"]),
    ],
)
def test_any_order_is_kept_if_the_template_can_write_it(turns, roles):
    cleaned = clean(*turns)
    assert [turn.role for turn in cleaned.messages] == roles
    opening = [turn.train for turn in cleaned.messages if turn.role == "assistant"]
    assert opening == ([False, True] if roles[0] == "assistant" else [True] * len(opening))
    tokenizer = Tokenizer.load(REPOSITORY / "data/fixtures/tiny_tokenizer").with_controls(
        ["<|im_start|>", "<|im_end|>"]
    )
    encoder = Encoder(Source("", template="chatml"), tokenizer, EncodingRules(512))
    [document] = encoder.encode(Conversation("a", cleaned.messages)).documents
    assert tokenizer.decode(document.tokens, skip_special=False).count("<|im_start|>") == len(roles)
    alternating = Cleaner(order="alternating")
    if roles[0] == "assistant":
        assert alternating.clean({"messages": turns}).changes == {"leading assistant turns dropped"}
    else:
        with pytest.raises(Drop, match=r"roles do not alternate|system turn in the middle"):
            alternating.clean({"messages": turns})


def test_the_required_order_is_derived_from_the_template(tmp_path):
    tokenizer = Tokenizer.load(REPOSITORY / "data/fixtures/tiny_tokenizer")
    assert [order_of(name) for name in ("vicuna_v1.1", "llama-2", "chatml", "llama-3")] == [
        "alternating",
        "alternating",
        "any",
        "any",
    ]
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    for template, order in (("", "any"), (refusing, "question first")):
        tokenizer.save(
            tmp_path,
            template + "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}",
        )
        assert order_of("tokenizer", Tokenizer.load(tmp_path)) == order


def test_question_first_drops_only_leading_answers():
    cleaner = Cleaner(order="question first")
    for turns in ([USER, USER, ANSWER], [USER, ANSWER, SYSTEM, USER, ANSWER]):
        assert cleaner.clean({"messages": turns}).changes == set()
    opened = cleaner.clean({"messages": [ANSWER, USER, ANSWER]})
    assert [turn.role for turn in opened.messages] == ["user", "assistant"]
    assert opened.changes == {"leading assistant turns dropped"}


def test_turns_that_change_rendering_are_kept_or_counted():
    """An empty system turn and reasoning, a developer turn, a missing content, joined parts."""
    empty = {"role": "system", "content": ""}
    assert clean(empty, USER, ANSWER).messages[0].role == "system"
    left_out = Cleaner(order="alternating").clean({"messages": [empty, USER, ANSWER]})
    assert left_out.messages[0].role == "user"
    assert left_out.changes == {"empty system turn left out"}
    assert clean(USER, {**ANSWER, "reasoning_content": ""}).messages[-1].reasoning == ""
    assert clean({**SYSTEM, "role": "developer"}, USER, ANSWER).changes == {
        "a developer's turn read as a system turn"
    }
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    silent = {"role": "tool", "content": ""}
    called = clean(USER, call, silent, ANSWER)
    assert [turn.content for turn in called.messages[1:3]] == ["", ""]
    assert called.changes == {
        "a `content` that is null, or missing, next to calls or reasoning: taken as empty",
        "ids made for calls that had none, which some templates write",
    }
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert clean({"role": "user", "content": parts}, ANSWER).changes == {
        "parts of a content joined to one text"
    }
    # Templates may write a result's list as JSON, as transformers gives it to them.
    result = {"role": "tool", "content": parts[:1]}
    called = clean(USER, {**call, "content": "Hm."}, result, ANSWER)
    assert "parts of a tool's result joined to one text" in called.changes


def test_a_split_conversation_keeps_opening_and_late_system_turns():
    from data.splitting import split

    cleaned = clean(
        SYSTEM, ANSWER, USER, USER, ANSWER, {**SYSTEM, "content": "Late."}, USER, ANSWER
    )
    parts = list(split(cleaned.messages, list, len, 5, cleaned.messages))
    assert [[turn.role for turn in part] for part in parts] == [
        ["system", "assistant", "user", "user", "assistant"],
        ["system", "system", "user", "assistant"],
    ]
