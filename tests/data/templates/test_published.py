"""Every chat template of TRL's wheel: ids, masks and refusals match transformers."""

import collections
import copy
import itertools
import json
import re
from datetime import datetime

import pytest

from data.clean import Cleaner
from data.conversation import Conversation, Message
from data.encode import Encoder, EncodingRules
from data.errors import UserError
from data.preference import PreferenceReader
from data.sources import Source
from data.templates import ARGUMENTS_AS_TEXT, CONTENTS_AS_PARTS, encode_conversation
from data.templates.notes import (
    EARLIER_REASONING_LEFT_OUT,
    LAST_REASONING_LEFT_OUT,
    REASONING_LEFT_OUT,
)
from data.tokenizer import TEMPLATE_DATE, Tokenizer
from tests.data.test_templates import TINY
from tests.trl_templates import trl_templates

TEMPLATES = trl_templates()
# Those that refuse contents that are texts, or write nothing of them.
OF_PARTS = [
    f"{name}{form}" for name in ("idefics3", "llava_next", "smolvlm") for form in ("", "_training")
]
# Tags that are added tokens in some tokenizers and plain text in others.
TAGS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
]


def _user(text):
    return {"role": "user", "content": text}


def _answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def _call(name, **arguments):
    return {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        "id": "abcdef123",
    }


SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "abcdef123"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather “now”.",
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {
                    "city": {"type": "string", "description": "A <city>"},
                    "in": {"type": "string", "enum": ["C", "F"]},
                },
            },
        },
    }
]
FIRST, SECOND = _user("What is 2+2?"), _user("And 3+3?")
CASES = {
    "plain": ([FIRST, _answer("Four.")], None),
    "system": ([SYSTEM, FIRST, _answer("Four.")], None),
    "several turns": ([FIRST, _answer("Four."), SECOND, _answer("Six.")], None),
    "spaces": ([_user("  What is 2+2?\n"), _answer("\n Four. \n\n")], None),
    "reasoning in content": ([FIRST, _answer("<think>\nEasy.\n</think>\n\nFour.")], None),
    "in two turns": (
        [
            FIRST,
            _answer("<think>\nEasy.\n</think>\n\nFour."),
            SECOND,
            _answer("<think>\nHm.\n</think>\n\nSix."),
        ],
        None,
    ),
    "twice in a turn": (
        [FIRST, _answer("<think>\nEasy.\n</think>\n\nFour.<think>\nSure?\n</think>\n\nYes.")],
        None,
    ),
    "lone end": ([FIRST, _answer("Easy.\n</think>\n\nFour.")], None),
    "lone beginning": ([FIRST, _answer("<think>Easy. Four.")], None),
    "reasoning field": (
        [
            FIRST,
            _answer("Four.", reasoning_content="Easy."),
            SECOND,
            _answer("Six.", reasoning_content="Hm."),
        ],
        None,
    ),
    "empty reasoning": ([FIRST, _answer("Four.", reasoning_content="")], None),
    "no_think": (
        [{"role": "system", "content": "Be brief. /no_think"}, FIRST, _answer("Four.")],
        None,
    ),
    "no_think of a user": ([_user("What is 2+2? /no_think"), _answer("Four.")], None),
    "calls": (
        [
            SYSTEM,
            _user("How is Ulm?"),
            _answer(
                "Let me look.",
                tool_calls=[_call("weather", city='Ulm "é"', days=[1, 2.5, {"a": None}])],
            ),
            RESULT,
            _answer("It is sunny."),
            _user("Thanks."),
            _answer("Bye."),
        ],
        TOOLS,
    ),
    "words beside a call": (
        [
            _user("How is Ulm?"),
            _answer("Let me look.", tool_calls=[_call("weather", city="Ulm")]),
            RESULT,
            _answer("It is sunny.", reasoning_content="Yes."),
        ],
        TOOLS,
    ),
    "calls alone": (
        [
            _user("How is Ulm?"),
            _answer("", tool_calls=[_call("weather", city="Ulm")]),
            RESULT,
            _answer("It is sunny."),
        ],
        TOOLS,
    ),
    "calls and reasoning": (
        [
            _user("How is Ulm?"),
            _answer(
                "", reasoning_content="Think <b> 'so'.", tool_calls=[_call("weather", city="Ulm")]
            ),
            RESULT,
            _answer("It is sunny.", reasoning_content="Yes."),
        ],
        TOOLS,
    ),
    "tools without calls": ([_user("How is Ulm?"), _answer("Fine.")], TOOLS),
}


def message(turn):
    """Returns a turn in OpenAI's form as a Message."""
    turn = dict(turn)
    reasoning, calls = turn.pop("reasoning_content", None), tuple(turn.pop("tool_calls", ()))
    return Message(**turn, reasoning=reasoning, tool_calls=calls)


def as_parts(turns):
    """Returns turns whose contents are lists with a text."""
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]


@pytest.fixture(autouse=True)
def one_date(monkeypatch):
    """Makes transformers use our date."""
    from transformers.utils import chat_template_utils

    class Fixed(datetime):
        @classmethod
        def now(cls, tz=None):
            return TEMPLATE_DATE

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


@pytest.fixture(scope="module", params=["tags are tokens", "tags are text"])
def pair(request, tmp_path_factory):
    """Returns our tokenizer and transformers', in which everything that the templates write between
    <| and |> is a token."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    marks = {
        mark
        for text in TEMPLATES.values()
        for mark in re.findall(r"<[|｜][^<>'\" ]{1,30}[|｜]>|<\w+_of_\w+>|<\|\w+>|<\w+\|>", text)
    }
    Tokenizer.load(TINY).with_controls(sorted(marks)).save(folder)
    if request.param == "tags are tokens":
        library = Library.from_file(str(folder / "tokenizer.json"))
        library.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
        library.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def ids_and_mask(segments):
    return (
        [token for segment in segments for token in segment.ids],
        [int(segment.train) for segment in segments for _ in segment.ids],
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_match_transformers(pair, name):
    """For every conversation; a tag of a turn that stays text is reported."""
    tokenizer, theirs = pair
    ours = copy.copy(tokenizer)
    ours.chat_template = TEMPLATES[name]
    has_blocks = re.search(r"\{%-?\s*generation\s*-?%\}", TEMPLATES[name]) is not None
    for case, (turns, tools) in CASES.items():
        try:
            expected = theirs.apply_chat_template(
                as_parts(turns) if name in OF_PARTS else copy.deepcopy(turns),
                tools=tools,
                chat_template=TEMPLATES[name],
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception:
            if name == "deepseekv3" and any("tool_calls" in turn for turn in turns):
                continue  # accepted with arguments as JSON text, as tested below
            with pytest.raises(UserError, match="the chat template"):
                encode_conversation(list(map(message, turns)), "tokenizer", ours, tools=tools or ())
            continue
        try:
            segments, notes = encode_conversation(
                list(map(message, turns)), "tokenizer", ours, tools=tools or ()
            )
        except UserError as error:
            # Texts without the turns' calls would be trained on: refused, although transformers
            # accepts them.
            assert "does not write a turn's `tool_calls`" in str(error), case
            assert "weather(" not in theirs.decode(expected["input_ids"]), case
            continue
        assert (CONTENTS_AS_PARTS in notes) == (name in OF_PARTS), case
        ids, mask = ids_and_mask(segments)
        if ids != expected["input_ids"]:
            assert any(note.startswith("control token in a turn's text") for note in notes), (
                case,
                ours.decode(ids, False),
            )
            texted = ours.with_text_tokens(TAGS)
            texted.chat_template = TEMPLATES[name]
            segments = encode_conversation(
                list(map(message, turns)), "tokenizer", texted, tools=tools or ()
            ).segments
            ids, mask = ids_and_mask(segments)
        assert ids == expected["input_ids"], (
            case,
            ours.decode(ids, False),
            theirs.decode(expected["input_ids"]),
        )
        if has_blocks:
            assert mask == expected["assistant_masks"], (case, ours.decode(ids, False))
        if case == "reasoning field":
            can_write = re.search(r"\b(reasoning_content|thinking)\b", TEMPLATES[name])
            assert (REASONING_LEFT_OUT in notes) == (not can_write), case
            assert ("Hm." in ours.decode(ids)) == bool(can_write) or notes, case


TRAINING = [name for name in TEMPLATES if f"{name}_training" in TEMPLATES]


@pytest.mark.parametrize("name", TRAINING)
def test_the_loss_mask_matches_the_training_form(pair, name):
    """Except for parts of the generation prompt, and text after the end token."""
    tokenizer, theirs = pair
    prompt = theirs.apply_chat_template(
        [FIRST], add_generation_prompt=True, tokenize=False, chat_template=TEMPLATES[name]
    )
    for case, (turns, tools) in CASES.items():
        masks, texts = [], []
        for form in (name, f"{name}_training"):
            ours = copy.copy(tokenizer)
            ours.chat_template = TEMPLATES[form]
            try:
                segments = encode_conversation(
                    list(map(message, turns)), "tokenizer", ours, tools=tools or ()
                ).segments
            except UserError:
                break
            ids, mask = ids_and_mask(segments)
            masks.append(mask)
            texts.append(ids)
        if len(texts) < 2 or texts[0] != texts[1]:  # some write different whitespace
            continue
        # Gemma 4 ends a call with this token, as its generation_config.json says.
        end_of_call = tokenizer.controls["<|tool_response>"].id
        ours_alone = {token for token, a, b in zip(ids, *masks, strict=True) if a and not b}
        assert ours_alone <= {end_of_call}, case
        assert any(masks[0]) == any(masks[1]), case
        for answer in _runs(masks[1]):
            trained = [at for at in answer if masks[0][at]]
            assert trained, case
            assert trained == list(range(trained[0], trained[-1] + 1)), case
            before = ours.decode(ids[answer.start : trained[0]], False)
            after = ours.decode(ids[trained[-1] + 1 : answer.stop], False)
            # DeepSeek V3's generation prompt after a result closes the results.
            closes_results = before == "<｜tool▁outputs▁end｜>"
            assert before in prompt or closes_results, (case, before)
            # Phi-3's ends the whole conversation with EOS.
            closes = answer.stop == len(ids) and after.strip() == tokenizer.eos_token
            assert not after.strip() or closes, (case, after)


@pytest.mark.parametrize("case", CASES)
def test_glms_turns_end_with_the_tokens_of_the_training_form(pair, case):
    """The texts of the two forms differ, since the training form ends the last turn, too."""
    tokenizer, theirs = pair
    turns, tools = CASES[case]
    ours = tokenizer.with_text_tokens([tag for tag in TAGS if tag in tokenizer.controls])
    ours.chat_template = TEMPLATES["glm4moe"]
    segments = encode_conversation(
        list(map(message, turns)), "tokenizer", ours, tools=tools or ()
    ).segments
    trained = [ours.decode(segment.ids, False) for segment in segments if segment.train]
    expected = theirs.apply_chat_template(
        copy.deepcopy(turns),
        tools=tools,
        chat_template=TEMPLATES["glm4moe_training"],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    texts = [
        theirs.decode(expected["input_ids"][answer.start : answer.stop])
        for answer in _runs(expected["assistant_masks"])
    ]
    assert trained == [*texts[:-1], texts[-1].removesuffix("<|user|>")]


def _runs(mask):
    """Returns the ranges of ones."""
    edges = [at for at in range(len(mask) + 1) if [*mask, 0][at] != [0, *mask][at]]
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def test_gemma_4s_call_with_words_ends_as_one_without(pair):
    """The words come after the result, in a conversation that goes on with another question."""
    for words, reasoning in itertools.product(("", "Let me look."), (None, "Hm.")):
        call = _answer(words, tool_calls=[_call("weather", city="Ulm")])
        call |= {"reasoning_content": reasoning} if reasoning else {}
        turns = [_user("How is Ulm?"), call, RESULT, _answer("Fine."), SECOND, _answer("Six.")]
        ours = copy.copy(pair[0])
        ours.chat_template = TEMPLATES["gemma4"]
        segments = encode_conversation(
            list(map(message, turns)), "tokenizer", ours, tools=TOOLS
        ).segments
        first = next(segment for segment in segments if segment.train)
        assert ours.decode(first.ids, False).endswith('Ulm<|"|>}<tool_call|><|tool_response>')


TWO_CALLS = [
    _user("How is it there?"),
    _answer("", tool_calls=[_call("weather", city="Ulm"), _call("weather", city="Bonn")]),
    RESULT,
    RESULT,
    _answer("Fine."),
]


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("qwen3", 2, None),
        ("gptoss", 1, "writes only the first of a turn's `tool_calls`; one call in a turn"),
        ("llama3", 0, "does not write a turn's `tool_calls`; a model whose template does"),
    ],
)
def test_a_call_that_the_template_omits_is_refused(pair, name, count, words):
    """Even if another call of the turn has the same name."""
    tokenizer, theirs = pair
    text = theirs.apply_chat_template(
        copy.deepcopy(TWO_CALLS), chat_template=TEMPLATES[name], tokenize=False
    )
    assert [city in text for city in ("Ulm", "Bonn")] == [count > 0, count > 1]
    ours = copy.copy(tokenizer)
    ours.chat_template = TEMPLATES[name]
    messages = list(map(message, TWO_CALLS))
    if words is None:
        encode_conversation(messages, "tokenizer", ours)
        return
    with pytest.raises(UserError) as caught:
        encode_conversation(messages, "tokenizer", ours)
    assert str(caught.value) == f"the chat template {words} would work"


def test_a_built_in_template_refuses_calls_and_names_the_models_own(pair):
    with pytest.raises(UserError, match=r"the model's own \(template: tokenizer\), would work$"):
        encode_conversation(list(map(message, TWO_CALLS)), "chatml", pair[0])


@pytest.mark.parametrize("case", [case for case, (_, tools) in CASES.items() if "calls" in case])
def test_arguments_are_given_as_json_text_if_the_template_requires_it(pair, case):
    """As DeepSeek V3's, to which OpenAI's form of a call fits."""
    tokenizer, theirs = pair
    ours = copy.copy(tokenizer)
    ours.chat_template = TEMPLATES["deepseekv3"]
    turns, tools = CASES[case]
    texts, has_calls = copy.deepcopy(turns), False
    for turn in texts:
        for call in turn.get("tool_calls", ()):
            has_calls = True
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    expected = theirs.apply_chat_template(
        texts, tools=tools, chat_template=TEMPLATES["deepseekv3"], return_dict=False
    )
    segments, notes = encode_conversation(
        list(map(message, turns)), "tokenizer", ours, tools=tools or ()
    )
    assert ids_and_mask(segments)[0] == expected
    assert (ARGUMENTS_AS_TEXT in notes) == has_calls
    trained = [ours.decode(segment.ids, False) for segment in segments if segment.train]
    assert not has_calls or trained[0].endswith("<｜tool▁calls▁end｜><｜end▁of▁sentence｜>")


def test_contents_are_given_as_parts_to_a_template_that_refuses_texts(pair):
    ours = copy.copy(pair[0])
    turns = [FIRST, _answer("Four."), SECOND, _answer("Six.")]
    ours.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content[0]['text'] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    segments, notes = encode_conversation(list(map(message, turns)), "tokenizer", ours)
    assert ids_and_mask(segments)[0] == pair[1].apply_chat_template(
        as_parts(turns), chat_template=ours.chat_template, return_dict=False
    )
    assert notes == {CONTENTS_AS_PARTS}
    trained = [ours.decode(segment.ids, False) for segment in segments if segment.train]
    assert trained == ["Four.<|im_end|>", "Six.<|im_end|>"]


# As Magistral's: reasoning is a part of a content.
THINKING_PARTS = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part['type'] == 'thinking' %}{{ '<think>' + part['thinking'] + '</think>' }}
{%- elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}
{%- endfor %}
{%- endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_reasoning_in_a_part_of_a_content_is_written_if_the_template_reads_parts(pair):
    tokenizer, theirs = pair
    ours = copy.copy(tokenizer)
    parts = [{"type": "thinking", "thinking": "Easy."}, {"type": "text", "text": "Four."}]
    turns = [FIRST, _answer(parts), SECOND, _answer("Six.")]
    messages = Cleaner().clean({"messages": turns}).messages
    ours.chat_template = THINKING_PARTS
    segments, notes = encode_conversation(messages, "tokenizer", ours)
    expected = theirs.apply_chat_template(turns, chat_template=THINKING_PARTS, return_dict=False)
    assert ids_and_mask(segments)[0] == expected
    assert notes == {CONTENTS_AS_PARTS}
    trained = [ours.decode(segment.ids, False) for segment in segments if segment.train]
    assert trained == ["<think>Easy.</think>Four.<|im_end|>", "Six.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "notes"),
    [
        (THINKING_PARTS, {EARLIER_REASONING_LEFT_OUT, LAST_REASONING_LEFT_OUT}),
        (THINKING_PARTS.replace("thinking", "text"), {REASONING_LEFT_OUT}),
    ],
)
def test_reasoning_that_the_template_leaves_out_is_counted_as_such(pair, template, notes):
    ours = copy.copy(pair[0])
    ours.chat_template = template
    answers = [message(_answer("Four.", reasoning_content="Easy."))] * 2
    turns = [message(FIRST), answers[0], message(SECOND), answers[1]]
    assert encode_conversation(turns, "tokenizer", ours).notes == notes


def test_parts_that_a_template_only_prints_are_not_given_to_it(pair):
    ours = copy.copy(pair[0])
    parts = [{"type": "thinking", "thinking": "Easy."}, {"type": "text", "text": "Four."}]
    messages = Cleaner().clean({"messages": [FIRST, _answer(parts)]}).messages
    for written in ("m.content", "m.content | tojson", "m.content ~ m.reasoning"):
        ours.chat_template = "{% for m in messages %}{{ " + written + " }}{% endfor %}"
        segments, notes = encode_conversation(messages, "tokenizer", ours)
        assert "Easy" not in ours.decode(ids_and_mask(segments)[0], False)
        assert REASONING_LEFT_OUT in notes and CONTENTS_AS_PARTS not in notes


def test_a_refusal_names_no_type_of_this_package(pair):
    ours = copy.copy(pair[0])
    for template in ("{{ messages[0].content + {} }}", "{{ messages[0].content.missing.x }}"):
        ours.chat_template = template
        with pytest.raises(UserError, match=r"refuses turns user, assistant: .*\bstr\b") as caught:
            encode_conversation([message(FIRST), message(_answer("a"))], "tokenizer", ours)
        assert "Tracked" not in str(caught.value)


OF_NOTHING = [
    "select",
    "reject",
    "selectattr('type')",
    "rejectattr('type')",
    "map(attribute='type')",
    "map('upper')",
]
KEYWORDS = [
    "{% macro mark(function) %}<{{ function }}>{% endmacro %}{{ mark(function='a') }}",
    "{% macro mark(context) %}<{{ context }}>{% endmacro %}{{ mark(context='a') }}",
    "{{ ['a', 'b'] | join(d=', ') }}",
    "{{ strftime_now(format='%Y') }}",
]


@pytest.mark.parametrize(
    "template", [*(f"{{{{ tools | {name} | list | length }}}}" for name in OF_NOTHING), *KEYWORDS]
)
def test_filters_of_nothing_and_keywords_work_as_in_transformers(pair, template):
    tokenizer, theirs = pair
    turns = [FIRST, _answer("Four.")]
    ours = copy.copy(tokenizer)
    ours.chat_template = template + "{% for m in messages %}{{ m.content }}{% endfor %}"
    expected = theirs.apply_chat_template(
        copy.deepcopy(turns), chat_template=ours.chat_template, return_dict=False
    )
    segments = encode_conversation(list(map(message, turns)), "tokenizer", ours).segments
    assert ids_and_mask(segments)[0] == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("text", ["Easy.", ""])
def test_reasoning_has_the_same_field_names_as_in_transformers(pair, name, text):
    """Each template reads one of the names; an empty text differs from a missing one."""
    tokenizer, theirs = pair
    turns = [FIRST, _answer("Four.", **{name: text}), SECOND, _answer("Six.")]
    messages = Cleaner().clean({"messages": turns}).messages
    for read in ("reasoning_content", "thinking", "reasoning"):
        ours = copy.copy(tokenizer)
        ours.chat_template = (
            "{% for m in messages %}{{ m.content }}{% if m."
            + read
            + " is defined %}[{{ m."
            + read
            + " }}]{% endif %}{% endfor %}"
        )
        expected = theirs.apply_chat_template(
            copy.deepcopy(turns), chat_template=ours.chat_template, return_dict=False
        )
        segments = encode_conversation(messages, "tokenizer", ours).segments
        assert ids_and_mask(segments)[0] == expected, read


DUMPS = [
    "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v | tojson }} {% endfor %}{% endfor %}",
    "{{ messages | tojson(indent=2) }}",
]
CALL = [_call("weather", city="Ulm")]
DUMPED_TURNS = [
    _answer("Four."),
    {"content": "Four.", "role": "assistant"},
    *(
        _answer("Four.", **{name: "Easy."})
        for name in ("reasoning_content", "thinking", "reasoning")
    ),
    {"reasoning": "Easy.", "content": "Four.", "role": "assistant"},
    {"reasoning_content": "Easy.", "role": "assistant", "content": "Four."},
    _answer("Four.", reasoning="Easy.", thinking="Easy."),
    _answer("", tool_calls=CALL, reasoning="Easy."),
    _answer("", thinking="Easy.", tool_calls=CALL),
]


@pytest.mark.parametrize("template", DUMPS)
@pytest.mark.parametrize("turn", DUMPED_TURNS, ids=str)
def test_a_dumped_turn_has_its_fields_in_the_order_of_transformers(pair, template, turn):
    tokenizer, theirs = pair
    turns = [FIRST, turn]
    ours = copy.copy(tokenizer)
    ours.chat_template = template
    expected = theirs.apply_chat_template(
        copy.deepcopy(turns), chat_template=template, return_dict=False
    )
    messages = Cleaner().clean({"messages": turns}).messages
    ids = ids_and_mask(encode_conversation(messages, "tokenizer", ours).segments)[0]
    assert ids == expected, (ours.decode(ids, False), theirs.decode(expected))


VARIABLES = {
    "enable_thinking": False,
    "reasoning_effort": "low",
    "preserve_thinking": True,
    "truncate_history_thinking": False,
    "date_string": "1 May 2024",
    "model_identity": "You are Ada.",
    "documents": [{"title": "Ulm", "text": "A city."}],
}


@pytest.mark.parametrize("pair", ["tags are tokens"], indirect=True)
def test_template_variables_change_ids_as_in_transformers(pair):
    """For every template, whether a recipe or a record sets them. A template's cases follow each
    other because compiling it takes most of the time."""
    tokenizer, theirs = pair
    texted, changed = tokenizer.with_text_tokens(TAGS), collections.Counter()
    cases = ("plain", "in two turns", "calls and reasoning")
    for (name, template), case in itertools.product(TEMPLATES.items(), cases):
        turns, tools = CASES[case]
        messages = list(map(message, turns))
        ours = copy.copy(texted)
        ours.chat_template = template
        try:
            expected = theirs.apply_chat_template(
                as_parts(turns) if name in OF_PARTS else copy.deepcopy(turns),
                tools=tools,
                chat_template=template,
                return_dict=False,
                **VARIABLES,
            )
            without = encode_conversation(messages, "tokenizer", ours, tools=tools or ())
            by_record = encode_conversation(
                messages, "tokenizer", ours, tools=tools or (), template_kwargs=VARIABLES
            )
        except Exception:
            continue  # refused by the template, as tested above
        by_recipe = encode_conversation(
            messages, "tokenizer", ours.with_template_kwargs(VARIABLES), tools=tools or ()
        )
        assert ids_and_mask(by_record.segments)[0] == expected, (name, case)
        assert ids_and_mask(by_recipe.segments) == ids_and_mask(by_record.segments), (name, case)
        changed[case] += ids_and_mask(without.segments)[0] != expected
    assert all(changed[case] >= 5 for case in cases), changed


def test_unread_template_variables_are_counted_and_reserved_ones_refused(pair):
    ours = copy.copy(pair[0])
    ours.chat_template = TEMPLATES["qwen3"]
    turns = [message(FIRST), message(_answer("Four."))]
    notes = encode_conversation(
        turns, "tokenizer", ours, template_kwargs={"enable_thinking": False, "thinking_mode": 1}
    ).notes
    assert notes == {"the template does not read this of chat_template_kwargs: thinking_mode"}
    with pytest.raises(UserError, match="chat_template_kwargs may not give messages"):
        encode_conversation(turns, "tokenizer", ours, template_kwargs={"messages": []})


ULM = _user("How is Ulm?")
CALLS_ULM = _answer("", tool_calls=[_call("weather", city="Ulm")])
THOUGHT, EMPTY = {"reasoning_content": "Easy."}, {"reasoning_content": ""}
# Prompts, and two completions of each.
COMPLETIONS = {
    "plain": ([SYSTEM, FIRST], [_answer("Four.")], [_answer("Five, or so.")]),
    "later": ([FIRST, _answer("Four."), SECOND], [_answer("Six.")], [_answer("Ten.")]),
    "reasoning": ([FIRST], [_answer("Four.", **THOUGHT)], [_answer("Five.", **THOUGHT)]),
    "empty reasoning": ([FIRST], [_answer("Four.", **EMPTY)], [_answer("Five.", **EMPTY)]),
    "reasoning in one": ([FIRST], [_answer("<think>\nSo.\n</think>\n\n4.")], [_answer("Five.")]),
    "calls": ([ULM], [CALLS_ULM, RESULT, _answer("It is sunny.")], [_answer("Who knows?")]),
    "a result": ([ULM, CALLS_ULM, RESULT], [_answer("Sunny.")], [_answer("It rains.")]),
    "a question": ([FIRST], [_answer("4."), SECOND, _answer("6.")], [_answer("5.")]),
}


def trls_start(theirs, template, prompt, completions, **options):
    """Returns the ids of the whole conversations, and where TRL's completions begin in all: see its
    `common_prefix_length`."""

    def ids(turns, **more):
        return theirs.apply_chat_template(
            copy.deepcopy(turns), chat_template=template, return_dict=False, **options, **more
        )

    begun, wholes = ids(prompt, add_generation_prompt=True), [ids(prompt + c) for c in completions]
    equal = itertools.takewhile(lambda row: len(set(row)) == 1, zip(begun, *wholes, strict=False))
    return wholes, sum(1 for _ in equal)


# The generation prompts of the first begin within what their generation blocks cover.
WITH_BLOCKS = ["gptoss_training", "qwen3_training", "deepseek_r1_distill_training"]
WITHOUT_BLOCKS = ["qwen3", "gptoss", "gemma4", "glm4moe", "llama3_1", "phi3", "cohere2"]


@pytest.mark.parametrize("pair", ["tags are tokens"], indirect=True)
@pytest.mark.parametrize("thinking", [True, False])
def test_the_completions_of_pairs_are_trls(pair, thinking):
    tokenizer, theirs = pair
    options, compared = {"tools": TOOLS, "enable_thinking": thinking}, collections.Counter()
    for name, case in itertools.product([*WITH_BLOCKS, *WITHOUT_BLOCKS], COMPLETIONS):
        prompt, *completions = COMPLETIONS[case]
        template = TEMPLATES[name]
        ours = tokenizer.with_text_tokens(TAGS)
        ours.chat_template = template
        try:
            wholes, start = trls_start(theirs, template, prompt, completions, **options)
        except Exception:
            continue  # refused by the template
        record = {"prompt": prompt, "chosen": completions[0], "rejected": completions[1]}
        record |= {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": thinking}}
        read, *_ = PreferenceReader().read(copy.deepcopy(record))
        encoded = Encoder(Source(""), ours, EncodingRules(4096)).encode(read)
        if encoded.drop_reason:  # the template omits calls
            continue
        (document,) = encoded.documents
        assert document.tokens.tolist() == wholes[0] + wholes[1], (name, case)
        expected = [number >= start for whole in wholes for number in range(len(whole))]
        assert document.loss_mask.tolist() == expected, (name, case, ours.decode(wholes[0], False))
        compared[case] += 1
    assert all(compared[case] > 6 for case in COMPLETIONS), compared


@pytest.mark.parametrize("pair", ["tags are tokens"], indirect=True)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_training", "llama3_1", "gptoss"])
def test_everything_of_a_completion_is_all_that_follows_its_prompt(pair, name):
    """As in TRL by default, also for the turns of a user and of tools in a completion."""
    tokenizer, theirs = pair
    ours = tokenizer.with_text_tokens(TAGS)
    ours.chat_template = TEMPLATES[name]
    encoder = Encoder(Source(""), ours, EncodingRules(4096, train_on="everything"))
    for prompt, completion, _ in COMPLETIONS.values():
        [whole], start = trls_start(theirs, TEMPLATES[name], prompt, [completion], tools=TOOLS)
        written = [{"prompt": prompt, "completion": completion}]
        if (len(prompt), len(completion)) == (1, 1) and not completion[0].keys() - FIRST.keys():
            written.append({"prompt": prompt[0]["content"], "completion": completion})
        if prompt[0] is SYSTEM:
            written.append({"system": "Be brief.", "prompt": prompt[1:], "completion": completion})
        for record in written:
            cleaned = Cleaner().clean(copy.deepcopy({**record, "tools": TOOLS}))
            conversation = Conversation("", cleaned.messages, tools=cleaned.tools)
            (document,) = encoder.encode(conversation).documents
            assert document.tokens.tolist() == whole, record
            assert document.loss_mask.tolist() == [i >= start for i in range(len(whole))], record
