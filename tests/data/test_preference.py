"""Preference records: TRL's shapes, and others of public data sets, become two conversations that
begin alike."""

import json

import pytest

from data.clean import CleanConfig, Cleaner
from data.preference import PreferenceReader
from data.reasons import Drop
from data.report import Report
from data.sources import Source
from data.sources import read as read_source


def turns(*texts, first="user"):
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def read(record, **options):
    return PreferenceReader(**options).read(record)


def messages_of(conversation):
    return [(m.role, m.content, m.train) for m in conversation.messages]


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {}}}


ASKED = ("user", "Which?", False)
GOOD, BAD = [ASKED, ("assistant", "This.", True)], [ASKED, ("assistant", "That.", True)]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Which?", "chosen": "This.", "rejected": "That."},
        {"question": "Which?", "chosen": "This.", "rejected": "That."},
        {
            "prompt": turns("Which?"),
            "chosen": turns("This.", first="assistant"),
            "rejected": turns("That.", first="assistant"),
        },
        {"chosen": turns("Which?", "This."), "rejected": turns("Which?", "That.")},
        {  # UltraFeedback, whose conversations repeat the prompt
            "prompt": "Which?",
            "chosen": turns("Which?", "This."),
            "rejected": turns("Which?", "That."),
        },
        {
            "system": "",
            "input": "Which?",
            "chosen": "This.",
            "rejected": "That.",
        },
        {"Prompt": "Which?", "Chosen": "This.", "REJECTED": "That."},
        {
            "conversations": [{"from": "human", "value": "Which?"}],
            "chosen": {"from": "gpt", "value": "This."},
            "rejected": {"from": "gpt", "value": "That."},
        },
        {
            "chosen": "\n\nHuman: Which?\n\nAssistant: This.",
            "rejected": "\n\nHuman: Which?\n\nAssistant: That.",
        },
        {
            "input": {"messages": turns("Which?")},
            "preferred_output": turns("This.", first="assistant"),
            "non_preferred_output": turns("That.", first="assistant"),
        },
        {"messages": turns("Which?", "This."), "rejected_response": "That."},
        {"messages": turns("Which?", "This."), "rejected_messages": turns("Which?", "That.")},
        {
            "chosen_messages": turns("Which?", "This."),
            "rejected_messages": turns("Which?", "That."),
        },
        {"query": "Which?", "response": "This.", "rejected_response": "That."},
        {"prompt": "Which?", "chosen": ["This."], "rejected": ["That."]},
        {"prompt": "", "question": "Which?", "chosen": "This.", "rejected": "That."},
    ],
    ids=[
        *("texts", "question", "turns", "implicit", "repeated"),
        *("input", "capitals", "one turn", "dialogue"),
        *("OpenAI", "ms-swift", "ms-swift's turns", "LLaMA-Factory"),
        *("ms-swift's texts", "lists of one", "an empty field"),
    ],
)
def test_every_shape_of_pairs_is_read(record):
    pair, changes, unread = read(record)
    assert messages_of(pair.chosen) == GOOD and messages_of(pair.rejected) == BAD
    assert not changes and not unread


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"instruction": "Which?", "input": "A, B."}, "Which?\n\nA, B."),
        ({"instruction": "Which?", "input": "A.", "context": "B."}, "Which?\n\nA.\n\nB."),
        ({"instruction": "Which?", "input": ""}, "Which?"),
        ({"question": "Which?", "context": "A, B."}, "A, B.\n\nWhich?"),
    ],
)
def test_a_prompt_has_the_fields_that_a_question_has_in_conversations(fields, prompt):
    """The same as `data.shapes` reads with an answer; history too, also for labelled ones."""
    record = {**fields, "history": [["Hi", "Hello"]]}
    asked = Cleaner().clean({**record, "response": "This."})
    pair, changes, unread = read({**record, "chosen": "This.", "rejected": "That."})
    labelled, _, named = read({**record, "response": "This.", "label": True})
    expected = [("user", "Hi"), ("assistant", "Hello"), ("user", prompt), ("assistant", "This.")]
    for messages in (asked.messages, pair.chosen.messages, labelled.conversation.messages):
        assert [(m.role, m.content) for m in messages] == expected
    assert [m.train for m in pair.rejected.messages] == [False, False, False, True]
    assert [m.train for m in labelled.conversation.messages] == [False, False, False, True]
    about = {"`context` put before its question"} if "question" in fields else set()
    assert changes == about and not unread and not named
    *_, unread = read({**fields, "chosen": "This.", "rejected": "That.", "history": "A post."})
    assert "history" in "".join(unread)
    with pytest.raises(Drop, match="`history` is not a list of pairs"):
        read({**fields, "chosen": "This.", "rejected": "That.", "history": ["Hi"]})


@pytest.mark.parametrize(
    ("repeated", "unread"),
    [
        ("Which?\n\nA, B.", set()),
        ("Which?", {"record field `input`"}),
        ("Why?", {"record field `input`", "record field `instruction`"}),
    ],
)
def test_fields_of_a_prompt_that_a_whole_conversation_lacks_are_named(repeated, unread):
    talks = {"chosen": turns(repeated, "This."), "rejected": turns(repeated, "That.")}
    assert read({"instruction": "Which?", "input": "A, B.", **talks})[2] == unread


def test_renamed_fields_system_and_tools_are_read_and_others_named():
    record = {
        "id": 7,
        "system": "Be brief.",
        "ask": "Which?",
        "better": "This.",
        "worse": "That.",
        "score_chosen": 0.5,
        "empty": None,
        "tools": [tool("look")],
    }
    pair, _, unread = read(
        record, fields={"ask": "prompt", "better": "chosen", "worse": "rejected"}
    )
    assert pair.id == "7" and unread == {"record field `score_chosen`"}
    assert messages_of(pair.rejected) == [("system", "Be brief.", False), *BAD]
    assert (
        pair.chosen.tools == pair.rejected.tools
        and pair.chosen.tools[0]["function"]["name"] == "look"
    )


def test_the_prompt_in_openais_form_has_tools_and_names_what_is_not_read():
    record = {
        "prompt": {"messages": turns("Which?"), "tools": [tool("f")], "parallel_tool_calls": True},
        "chosen": turns("This.", first="assistant"),
        "rejected": turns("That.", first="assistant"),
    }
    names = {"input": "prompt", "preferred_output": "chosen", "non_preferred_output": "rejected"}
    for fields, mapped in ((record, {}), ({k: record[v] for k, v in names.items()}, names)):
        pair, changes, unread = read(fields, fields=mapped)
        assert messages_of(pair.chosen) == GOOD and messages_of(pair.rejected) == BAD
        assert pair.chosen.tools == pair.rejected.tools == (tool("f"),) and not changes
        (name,) = unread
        assert name.endswith("`parallel_tool_calls`")


def test_a_conversation_and_its_rejected_answer_may_be_long_and_have_calls():
    """As ms-swift's: the rejected turns replace the last answer."""
    long = turns("Why?", "So.", "Which?", "This.")
    pair, _, unread = read({"messages": long, "rejected_response": "That."})
    context = [("user", "Why?", False), ("assistant", "So.", False)]
    assert messages_of(pair.chosen) == context + GOOD
    assert messages_of(pair.rejected) == context + BAD
    assert not unread
    with pytest.raises(Drop, match="with a `rejected_response` that does not end"):
        read({"messages": turns("Which?"), "rejected_response": "That."})


def test_two_conversations_are_trained_from_where_they_part():
    """As by TRL's `extract_prompt`, also under ms-swift's names."""
    from trl.data_utils import extract_prompt

    both = [turns("Which?", first, "Sure?", "Yes.") for first in ("This.", "That.")]
    expected = extract_prompt({"chosen": both[0], "rejected": both[1]})
    for names in (("messages", "rejected_messages"), ("chosen", "rejected")):
        pair, changes, unread = read(dict(zip(names, both, strict=True)))
        assert not changes and not unread
        for name, conversation in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            messages = conversation.messages
            assert [m.content for m in messages if m.train] == [
                m["content"] for m in expected[name]
            ]
            prompt = [m.content for m in messages if m.in_prompt]
            assert prompt == [m["content"] for m in expected["prompt"]]


def test_a_conversation_with_its_answer_may_have_another_beside_it():
    """Such as the short answer of an exercise."""
    beside = {"messages": turns("Which?", "This."), "answer": "42"}
    record, _, unread = read({**beside, "label": True})
    assert messages_of(record.conversation) == GOOD and unread == {"record field `answer`"}
    for rejected in ("That.", turns("Which?", "That.")):
        pair, _, unread = read({**beside, "rejected": rejected})
        assert (messages_of(pair.chosen), messages_of(pair.rejected)) == (GOOD, BAD)
        assert unread == {"record field `answer`"}


def test_unread_fields_are_named_in_their_original_case():
    pair = {"Prompt": "Which?", "Query": "How?", "Chosen": "This.", "Rejected": "That."}
    labelled = {"Prompt": "Which?", "Query": "How?", "Completion": "This.", "Label": True}
    for record in (pair, labelled):
        *_, unread = read({**record, "Level": 3})
        assert unread == {"record field `Query`", "record field `Level`"}


def test_a_prompt_that_differs_from_the_conversation_is_named():
    record = {
        "prompt": "Why?",
        "chosen": turns("Which?", "This."),
        "rejected": turns("Which?", "That."),
    }
    assert read(record)[2] == {"record field `prompt`"}


def test_earlier_answers_are_part_of_the_prompt():
    record = {
        "chosen": turns("Hi", "Hello", "Which?", "This."),
        "rejected": turns("Hi", "Hello", "Which?", "That."),
    }
    pair = read(record)[0]
    assert [train for *_, train in messages_of(pair.chosen)] == [False, False, False, True]


LONG = {
    "prompt": turns("Hi"),
    "chosen": turns("Hello", "Which?", "This.", first="assistant"),
    "rejected": turns("Hello", "Which?", "That.", first="assistant"),
}


def test_everything_after_an_explicit_prompt_is_in_the_loss():
    """Also what both completions begin with, as in TRL's tokens of a completion."""
    pair, *_ = read({"system": "Be brief.", **LONG})
    for conversation in (pair.chosen, pair.rejected):
        assert [(m.role, m.train) for m in conversation.messages] == [
            ("system", False),
            ("user", False),
            ("assistant", True),
            ("user", True),
            ("assistant", True),
        ]
    flagged = [{**LONG["chosen"][0], "train": False}, *LONG["chosen"][1:]]
    pair, changes, _ = read({**LONG, "chosen": flagged})
    answers = [m.train for m in pair.chosen.messages if m.role == "assistant"]
    assert answers == [False, True] and changes == {"turns left out of the loss by `train`"}
    unweighted = [LONG["chosen"][0], {**LONG["chosen"][1], "weight": 0}, LONG["chosen"][2]]
    pair, changes, unread = read({**LONG, "chosen": unweighted})  # a flag of no answer
    answers = [m.train for m in pair.chosen.messages if m.role == "assistant"]
    assert answers == [True, True] and not changes | unread
    begun = [*turns("Hi", "Well,")]
    pair, *_ = read({**LONG, "prompt": begun})
    assert [m.train for m in pair.chosen.messages] == [False, False, True, True, True]


@pytest.mark.parametrize("write", [json.dumps, repr])
def test_the_texts_of_turns_are_read_as_turns(write):
    """As in the CSV files of `datasets`."""
    written = "a prompt or completion that is the text of a list of turns: read as these turns"
    answers = [turns(text, first="assistant") for text in ("This.", "That.")]
    wholes = [turns("Which?", text) for text in ("This.", "That.")]
    for first, (chosen, rejected) in (
        ({"prompt": write(turns("Which?"))}, map(write, answers)),
        ({"prompt": "Which?"}, map(write, answers)),
        ({"prompt": "Which?"}, map(write, wholes)),
        ({}, map(write, wholes)),
    ):
        pair, changes, unread = read({**first, "chosen": chosen, "rejected": rejected})
        assert messages_of(pair.chosen) == GOOD and messages_of(pair.rejected) == BAD
        assert changes == {written} and not unread
    record = {"prompt": write(turns("Which?")), "completion": write(answers[0]), "label": True}
    labelled, changes, _ = read(record)
    assert messages_of(labelled.conversation) == GOOD and changes == {written}


@pytest.mark.parametrize(
    ("this", "that"),
    [
        ('{"sender": "agent", "message": "hello"}', '{"sender": "client", "message": "hello"}'),
        ('[{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]', "no"),
    ],
)
def test_completions_in_json_stay_text(this, that):
    pair, changes, unread = read({"prompt": "As JSON", "chosen": this, "rejected": that})
    assert [c.messages[1].content for c in (pair.chosen, pair.rejected)] == [this, that]
    assert not changes and not unread
    labelled, changes, _ = read({"prompt": "As JSON", "completion": this, "label": True})
    assert labelled.conversation.messages[1].content == this and not changes


def test_fields_joined_to_a_prompt_in_json_keep_it_text():
    asked = {"instruction": json.dumps(turns("Which?")), "input": "A chat."}
    pair, changes, unread = read({**asked, "chosen": "This.", "rejected": "That."})
    assert pair.chosen.messages[0].content == f"{asked['instruction']}\n\nA chat."
    assert not changes and not unread


def test_completions_may_begin_with_the_result_of_the_prompts_call():
    call = {"id": "a", "function": {"name": "f", "arguments": {}}}
    prompt = [*turns("Which?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    results = [{"role": "tool", "content": text, "tool_call_id": "a"} for text in ("R", "S")]
    this, that = (turns(text, first="assistant") for text in ("This.", "That."))
    record = {"prompt": prompt, "chosen": [*results[:1], *this], "rejected": [*results, *that]}
    pair, *_ = read(record)
    for conversation, texts in ((pair.chosen, ["", "This."]), (pair.rejected, ["", "That."])):
        answers = [m for m in conversation.messages if m.role == "assistant"]
        assert [m.content for m in answers] == texts
        assert [m.train for m in answers] == [False, True]
    labelled, *_ = read({"prompt": prompt, "completion": record["chosen"], "label": True})
    trained = [m.train for m in labelled.conversation.messages if m.role == "assistant"]
    assert trained == [False, True]
    with pytest.raises(Drop, match="do not begin with the assistant's"):
        last = [*results[:1], *turns("Why?", "This.")]
        read({"prompt": prompt, "completion": last, "label": True})


@pytest.mark.parametrize("results", [["F", "G"], []], ids=["results", "no results"])
def test_completions_follow_several_calls_at_the_prompts_end(results):
    calls = [{"role": "tool_call", "content": json.dumps({"name": name})} for name in "fg"]
    results = [{"role": "tool", "content": text} for text in results]
    chosen, rejected = (
        [*results, {"role": "assistant", "content": text}] for text in ("This.", "That.")
    )
    prompt = [{"role": "user", "content": "Which?"}, *calls]
    pair, changes, _ = read({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    assert "calls in turns one after another joined to one turn" in changes
    for messages in (pair.chosen.messages, pair.rejected.messages):
        roles = [message.role for message in messages]
        assert roles == ["user", "assistant", *["tool"] * len(results), "assistant"]
        trained = [message.train for message in messages if message.role == "assistant"]
        assert trained == [False, True]


def test_only_a_flag_on_a_prompts_reasoning_is_counted():
    thought = {"role": "thinking", "content": "so"}
    ends = {name: turns(f"{name}.", first="assistant") for name in ("chosen", "rejected")}
    pair, changes, _ = read({"prompt": [*turns("Which?"), thought], **ends})
    assert pair.chosen.messages[1].reasoning == "so" and not changes
    _, changes, _ = read({"prompt": [*turns("Which?"), {**thought, "train": False}], **ends})
    assert changes == {"a flag takes reasoning out of the loss, but not its answer: ignored"}


def test_a_dialogue_in_a_prompt_ends_before_its_answer():
    dialogue = {"prompt": "\n\nHuman: Which?\n\nAssistant:"}
    read_as = {"a prompt of `Human:` and `Assistant:` read as turns"}
    pair, changes, _ = read({**dialogue, "chosen": "This.", "rejected": "That."})
    assert messages_of(pair.chosen) == GOOD and messages_of(pair.rejected) == BAD
    assert changes == read_as
    labelled, changes, _ = read({**dialogue, "completion": "This.", "label": True})
    assert messages_of(labelled.conversation) == GOOD and changes == read_as


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"prompt": "Which?", "chosen": "This."},
            "no `chosen` and `rejected`, and no `completion` and `label`: it has the fields "
            "prompt, chosen",
        ),
        (
            {"prompt": "Which?", "chosen": "This.", "rejected": " This. "},
            "the chosen completion equals the rejected one",
        ),
        ({"prompt": "Which?", "chosen": "This.", "rejected": " "}, "rejected: "),
        (
            {"prompt": "Which?", "chosen": 3, "rejected": "That."},
            "a completion that is no text or list of turns: `chosen`",
        ),
        (
            {"prompt": 3, "chosen": "This.", "rejected": "That."},
            "a prompt that is no text or list of turns: `prompt`",
        ),
        ({"chosen": "This.", "rejected": "That."}, ""),
        (
            {"chosen": turns("Which?", "This."), "rejected": turns("Why?", "That.")},
            "the completions answer different prompts",
        ),
        (
            {
                "prompt": turns("Hi", "Hello", "Which?"),
                "chosen": "This.",
                "rejected": turns("Hi", "Bye", "Which?", "That."),
            },
            "the completions answer different prompts",
        ),
        ({"prompt": "", "chosen": "This.", "rejected": "That."}, "completions without a prompt"),
        ({"chosen": turns("Which?", "This."), "rejected": turns("Which?")}, ""),
        ([1], "not a record"),
    ],
)
def test_an_unusable_pair_is_dropped_with_a_reason(record, reason):
    with pytest.raises(Drop) as dropped:
        read(record)
    assert str(dropped.value).startswith(reason) and str(dropped.value)


def test_a_pair_is_a_duplicate_only_if_both_completions_are():
    reader = PreferenceReader()
    reader.read({"prompt": "Which?", "chosen": "This.", "rejected": "That."})
    reader.read({"prompt": "Which?", "chosen": "This.", "rejected": "None."})
    with pytest.raises(Drop, match="duplicate"):
        reader.read({"prompt": "Which?", "chosen": "This.", "rejected": "That."})
    kept = PreferenceReader(CleanConfig(duplicates=False))
    for _ in range(2):
        kept.read({"prompt": "Which?", "chosen": "This.", "rejected": "That."})


def test_pairs_with_other_tools_or_other_trained_turns_are_no_duplicates():
    reader = PreferenceReader()
    pair = {"prompt": "Which?", "chosen": "This.", "rejected": "That."}
    labelled = {"prompt": "Which?", "completion": "This.", "label": True}
    long = {
        **pair,
        "chosen": [
            {"role": "assistant", "content": "This."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes.", "train": False},
        ],
    }
    trained = {**long, "chosen": [{**turn, "train": True} for turn in long["chosen"]]}
    for record in (pair, labelled, long, trained):
        for tools in ([], [tool("first")], [tool("second")]):
            reader.read({**record, "tools": tools})
            with pytest.raises(Drop, match="duplicate"):
                reader.read({**record, "tools": tools})


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Which?", "completion": "This.", "label": True},
        {"question": "Which?", "response": "This.", "label": 1},
        {"instruction": "Which?", "input": "", "output": "This.", "kto_tag": True},
        {"question": "Which?", "answer": "This.", "label": True},
        {"prompt": turns("Which?"), "completion": turns("This.", first="assistant"), "label": True},
    ],
)
def test_labelled_completions_are_read(record):
    labelled, changes, unread = read({**record, "origin": "web"})
    assert messages_of(labelled.conversation) == GOOD and labelled.desirable is True
    assert not changes and unread == {"record field `origin`"}
    for label in (False, 0, 0.0, "False", "false", "0", "no"):
        assert read({**record, "label": label})[0].desirable is False
    for label in (1, "True", " true ", "1", "yes"):
        assert read({**record, "label": label})[0].desirable is True


@pytest.mark.parametrize("label", ["label", "kto_tag"])
def test_the_last_answer_of_a_labelled_conversation_is_its_completion(label):
    """As LLaMA-Factory has it for KTO."""
    for name in ("messages", "conversations"):
        labelled, changes, unread = read({name: turns("Which?", "This."), label: False})
        assert messages_of(labelled.conversation) == GOOD and labelled.desirable is False
        assert not changes and not unread
    labelled, *_ = read({"prompt": "Which?", "completion": "This.", label: "true"})
    assert messages_of(labelled.conversation) == GOOD and labelled.desirable is True
    long = [*turns("Hi", "Hello", "Which?"), {"role": "thought", "content": "so"}]
    labelled, *_ = read({"messages": [*long, *turns("This.", first="assistant")], label: 1})
    answers = [m for m in labelled.conversation.messages if m.role == "assistant"]
    assert [m.train for m in answers] == [False, True] and answers[1].reasoning == "so"
    for talk, reason in (
        (turns("Which?", "This.", "Why?"), "a conversation with a `label` that does not end"),
        (turns("This.", first="assistant"), "completions without a prompt"),
    ):
        with pytest.raises(Drop, match=reason):
            read({"messages": talk, label: True})


def test_a_labelled_completion_may_have_reasoning_and_a_last_question():
    thought = {"role": "thought", "content": "so"}
    completion = [thought, *turns("This.", "Why?", first="assistant")]
    labelled, *_ = read({"prompt": "Which?", "completion": completion, "label": True})
    assert messages_of(labelled.conversation) == GOOD


def test_labels_of_a_csv_file_are_read(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("prompt,completion,label\nWhich?,This.,True\nWhich?,That.,False\n")
    records = read_source(Source(str(path), "preference"), Report())
    assert [record.desirable for record in records] == [True, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": "good"}, "a `label` that is neither true nor false"),
        ({"label": ""}, "a `label` that is neither true nor false"),
        ({"label": "2"}, "a `label` that is neither true nor false"),
        ({"label": 0.7}, "a `label` that is neither true nor false"),
        ({"label": 2}, "a `label` that is neither true nor false"),
        ({"label": None}, "no `chosen` and `rejected`, and no `completion` and `label`"),
        ({"completion": " "}, "completion: "),
        ({"completion": 3}, "a completion that is no text or list of turns: `completion`"),
        ({"prompt": None}, "completions without a prompt"),
        ({"prompt": " "}, "completions without a prompt"),
    ],
)
def test_an_unusable_labelled_completion_is_dropped_with_a_reason(change, reason):
    with pytest.raises(Drop) as dropped:
        read({"prompt": "Which?", "completion": "This.", "label": True, **change})
    assert str(dropped.value).startswith(reason)


def test_the_same_completion_with_another_label_is_not_a_duplicate():
    reader = PreferenceReader()
    record = {"prompt": "Which?", "completion": "This.", "label": True}
    reader.read(record)
    reader.read({**record, "label": False})
    with pytest.raises(Drop, match="duplicate"):
        reader.read(record)
