"""What is trained on under templates without a generation prompt, with generation blocks, and with
a date."""

from datetime import datetime

import pytest

from data.conversation import Message
from data.templates import encode_conversation
from tests.data.templates.test_sandbox import tokenizer_with

TURNS = [
    Message("user", "What is 2+2?"),
    Message("assistant", "Let me see. ANSWER: 4", reasoning="Easy."),
]
TURN = "{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}"
CUT = (
    "{% if m.role == 'assistant' %}{{ '<s>assistant\n' + m.content.split('ANSWER:')[0] }}{% generation %}"
    "{{ 'ANSWER:' + m.content.split('ANSWER:')[1] + '</s>' }}{% endgeneration %}{% else %}"
    + TURN
    + "{% endif %}"
)


def trained(tokenizer):
    segments, notes = encode_conversation(TURNS, "tokenizer", tokenizer)
    return [
        tokenizer.decode(segment.ids, skip_special=False) for segment in segments if segment.train
    ], notes


def test_without_a_generation_prompt_the_heading_is_not_trained_on(tmp_path):
    texts, notes = trained(
        tokenizer_with("{% for m in messages %}" + TURN + "{% endfor %}", tmp_path)
    )
    assert texts == ["Let me see. ANSWER: 4</s>"]
    assert notes == {"reasoning left out: the template cannot write it"}


def test_only_a_generation_block_is_trained_on(tmp_path):
    texts, _ = trained(tokenizer_with("{% for m in messages %}" + CUT + "{% endfor %}", tmp_path))
    assert [text.strip() for text in texts] == ["ANSWER: 4</s>"]


@pytest.mark.parametrize(
    ("turn", "are_counted"),
    [
        ("{% generation %}{{ m.content }}{% endgeneration %}", False),
        ("{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}", True),
        # Transformers, too, takes a macro's block to be where the macro's text begins.
        (
            "{% macro say(m) %}{{ '<s>assistant\n' * 9 }}{% generation %}{{ m.content }}"
            "{% endgeneration %}{% endmacro %}{{ say(m) }}",
            True,
        ),
    ],
)
def test_answers_outside_generation_blocks_are_counted(tmp_path, turn, are_counted):
    turn = turn if "{% else %}" not in turn else turn + TURN + "{% endif %}"
    tokenizer = tokenizer_with("{% for m in messages %}" + turn + "{% endfor %}", tmp_path)
    turns = [Message(role, "x") for role in ("user", "assistant") * 2]
    notes = encode_conversation(turns, "tokenizer", tokenizer).notes
    assert notes == ({UNMARKED} if are_counted else set())


def test_the_date_comes_from_the_recipe(tmp_path):
    tokenizer = tokenizer_with(
        "{{ strftime_now('%d %B %Y') }}{% for m in messages %}" + TURN + "{% endfor %}", tmp_path
    )
    for date, text in ((None, "01 January 2025"), (datetime(2024, 3, 4), "04 March 2024")):
        dated = tokenizer if date is None else tokenizer.with_template_date(date)
        segments = encode_conversation(TURNS, "tokenizer", dated).segments
        assert dated.decode([token for segment in segments for token in segment.ids]).startswith(
            text
        )


def test_everything_that_ends_an_answer_is_trained_on(tmp_path):
    """Two end tokens, an end token after text, text only; but not a heading that is always
    written."""
    heading = "{{ '<unk>assistant\n' }}"
    for number, (end, extra, expected) in enumerate(
        [
            ("</s><s>", "", "</s><s>"),
            (" (end)</s>\n", "", " (end)</s>"),
            ("\n### End\n\n", "", "\n### End"),
            ("</s>\n", heading, "</s>"),
        ]
    ):
        turns = (
            "{% for m in messages %}{{ '<unk>' + m.role + '\n' + m.content }}"
            "{% if m.role == 'assistant' %}{{ '" + end + "' }}{% else %}{{ '\n' }}{% endif %}"
            "{% endfor %}"
        )
        prompt = extra or "{% if add_generation_prompt %}" + heading + "{% endif %}"
        folder = tmp_path / str(number)
        folder.mkdir()
        texts, _ = trained(tokenizer_with(turns + prompt, folder))
        assert texts == ["Let me see. ANSWER: 4" + expected], (end, texts)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("m.content.replace('4', 'four')", "Let me see. ANSWER: four</s>"),
        ("m.content ~ ' (' ~ m.content|length ~ ')\n'", "Let me see. ANSWER: 4 (21)\n</s>"),
        ("m.content.replace('4', '') ~ '.'", "Let me see. ANSWER: .</s>"),
    ],
)
def test_an_answer_whose_end_the_template_changes_is_trained_on_up_to_its_end_token(
    tmp_path, written, expected
):
    turn = "{{ '<unk>' + m.role + '\n' ~ (" + written + ") ~ '</s>\n' }}"
    prompt = "{% if add_generation_prompt %}{{ '<unk>assistant\n' }}{% endif %}"
    tokenizer = tokenizer_with("{% for m in messages %}" + turn + "{% endfor %}" + prompt, tmp_path)
    texts, notes = trained(tokenizer)
    assert texts == [expected]
    assert notes == {"reasoning left out: the template cannot write it"}


HEADINGS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
)
CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        # EOS separates turns, so a model stops at it.
        (
            "{% for m in messages %}{{ m.content }}{% if not loop.last %}</s>{% endif %}{% endfor %}",
            "user assistant user assistant",
            "0</s>⟦1</s>⟧2</s>⟦3⟧",
        ),
        # As metharme and axolotl's Jupyter form: only the last answer has an end token.
        (
            HEADINGS + PROMPT + "{% else %}</s>{% endif %}",
            "user assistant user assistant",
            "<|user|>0<|assistant|>⟦1⟧<|user|>2<|assistant|>⟦3</s>⟧",
        ),
        (
            HEADINGS + PROMPT + "{% else %}</s>{% endif %}",
            "user assistant assistant user assistant",
            "<|user|>0<|assistant|>⟦1⟧<|assistant|>⟦2⟧<|user|>3<|assistant|>⟦4</s>⟧",
        ),
        (
            HEADINGS + PROMPT + "{% else %}</s>{% endif %}",
            "user assistant system user assistant",
            "<|user|>0<|assistant|>⟦1⟧<|system|>2<|user|>3<|assistant|>⟦4</s>⟧",
        ),
        (
            "{{ '<s><|system|>Play a role.' }}" + HEADINGS + PROMPT + "{% else %}</s>{% endif %}",
            "user assistant user assistant",
            "<s><|system|>Play a role.<|user|>0<|assistant|>⟦1⟧<|user|>2<|assistant|>⟦3</s>⟧",
        ),
        # One token opens all turns, and none ends them.
        (
            CHATML + CHATML_PROMPT + "{% endif %}",
            "user assistant assistant user assistant",
            "<|im_start|>user\n0\n<|im_start|>assistant\n⟦1⟧\n<|im_start|>assistant\n⟦2⟧\n"
            "<|im_start|>user\n3\n<|im_start|>assistant\n⟦4⟧\n",
        ),
        # As GLM 4's, whose generation_config.json names the token that opens the user's turn.
        (
            "{{ '<s>' }}" + HEADINGS + PROMPT + "{% endif %}",
            "user assistant assistant user assistant",
            "<s><|user|>0<|assistant|>⟦1⟧<|assistant|>⟦2<|user|>⟧3<|assistant|>⟦4⟧",
        ),
        # As GLM 4.6's: a model stops at the tokens of users' turns and results, and at no others.
        (
            "{{ '<s>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' }}"
            "{{ '<|call|>\n' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
            + PROMPT
            + "{% endif %}",
            "user assistant system user assistant assistant user assistant",
            "<s><|user|>\n0<|assistant|>⟦\n<|call|>\n1⟧<|system|>\n2<|user|>\n3<|assistant|>"
            "⟦\n<|call|>\n4⟧<|assistant|>⟦\n<|call|>\n5<|user|>⟧\n6<|assistant|>⟦\n<|call|>\n7⟧",
        ),
        # As Harmony: end tokens that differ, after a default system turn with one of them.
        (
            "{{ '<|system|>Play.<|end|>' }}"
            "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
            "{{ '</s>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
            + PROMPT
            + "{% endif %}",
            "user assistant assistant user assistant",
            "<|system|>Play.<|end|><|user|>0<|end|><|assistant|>⟦1<|end|>⟧<|assistant|>⟦2<|end|>⟧"
            "<|user|>3<|end|><|assistant|>⟦4</s>⟧",
        ),
    ],
)
def test_the_next_turns_heading_is_not_trained_on(tmp_path, template, roles, expected):
    """What the assistant writes ends before a heading, whatever the next turn's role."""
    turns = [Message(role, str(number)) for number, role in enumerate(roles.split())]
    assert marked(template, turns, tmp_path) == expected


def marked(template, turns, tmp_path):
    """Returns the text of some turns with ⟦ and ⟧ around what is trained on."""
    names = ("user", "assistant", "system", "im_start", "end", "call", "/call", "tool")
    tokenizer = tokenizer_with("", tmp_path).with_controls([f"<|{name}|>" for name in names])
    tokenizer.chat_template = template
    segments = encode_conversation(turns, "tokenizer", tokenizer).segments
    return "".join(
        ("⟦%s⟧" if segment.train else "%s") % tokenizer.decode(segment.ids, skip_special=False)
        for segment in segments
    )


CALL = "{% for c in m.tool_calls %}{{ '<|call|>' + c.function.name + c.function.arguments.x }}"
REFUSES_LAST_CALL = (
    "{% if loop.last and m.tool_calls or m.role == 'user' and loop.previtem is defined and "
    "loop.previtem.tool_calls %}{{ raise_exception('A call needs a result.') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        # As Command R7B's, which writes a generation prompt after every conversation.
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content }}"
            + CALL
            + "<|/call|>{% endfor %}<|end|>{% endfor %}<|im_start|>assistant:",
            "user call tool call",
            "<|im_start|>user:0<|end|><|im_start|>assistant:⟦<|call|>f1<|/call|><|end|>⟧"
            "<|im_start|>tool:2<|end|><|im_start|>assistant:⟦<|call|>f3<|/call|><|end|>⟧"
            "<|im_start|>assistant:",
        ),
        # As GLM's: nothing ends a turn but the heading of the next.
        (
            "{{ '<s>' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
            + CALL
            + "<|/call|>{% endfor %}{% endfor %}"
            + PROMPT
            + "{% endif %}",
            "user call tool assistant user call user call assistant",
            "<s><|user|>0<|assistant|>⟦<|call|>f1<|/call|><|tool|>⟧2<|assistant|>⟦3<|user|>⟧4"
            "<|assistant|>⟦<|call|>f5<|/call|><|user|>⟧6"
            "<|assistant|>⟦<|call|>f7<|/call|>⟧<|assistant|>⟦8⟧",
        ),
        # As metharme's: only the last answer has an end token.
        (
            "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
            + CALL
            + "<|/call|>{% endfor %}{% endfor %}"
            + PROMPT
            + "{% else %}</s>{% endif %}",
            "user call tool assistant",
            "<|user|>0<|assistant|>⟦<|call|>f1<|/call|>⟧<|tool|>2<|assistant|>⟦3</s>⟧",
        ),
        # As Apriel's, which writes the calls of the last turn without their ids.
        *(
            (
                "{% for m in messages %}{% set last = loop.last %}{{ '<|' + m.role + '|>' + m.content }}"
                + CALL
                + "{% if not last %}{{ '#' + c.id + '#' }}{% endif %}]{% endfor %}<|end|></s>{% endfor %}"
                + PROMPT
                + "{% endif %}",
                f"user call {following} assistant",
                f"<|user|>0<|end|></s><|assistant|>⟦<|call|>f1#id1#]<|end|></s>⟧<|{following}|>2"
                "<|end|></s><|assistant|>⟦3<|end|></s>⟧",
            )
            for following in ("tool", "user")
        ),
        # As Apertus': a result is part of the assistant's turn.
        (
            "{% for m in messages %}"
            "{% if m.role == 'user' %}{{ '<|user|>' + m.content + '<|end|><|assistant|>' }}"
            "{% elif m.role == 'tool' %}{{ '[' + m.content + ']' }}"
            "{% else %}{{ m.content }}" + CALL + "<|/call|>{% endfor %}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "user call tool call tool assistant",
            "<|user|>0<|end|><|assistant|>⟦<|call|>f1<|/call|>⟧[2]⟦<|call|>f3<|/call|>⟧[4]⟦5⟧",
        ),
        # As Mistral's, which writes something before the last question only.
        (
            "{% for m in messages %}{% if m.role == 'user' %}"
            "{{ '[TOOLS]' if messages[loop.index0:] | selectattr('role', 'eq', 'user') | list "
            "| length == 1 else '' }}{{ '<|user|>' + m.content + '<|end|>' }}"
            "{% elif m.role == 'tool' %}{{ '<|tool|>' + m.content + '<|/call|>' }}"
            "{% else %}{{ m.content }}" + CALL + "{% endfor %}</s>{% endif %}{% endfor %}",
            "user call tool call tool assistant user assistant",
            "<|user|>0<|end|>⟦<|call|>f1</s>⟧<|tool|>2<|/call|>⟦<|call|>f3</s>⟧<|tool|>4<|/call|>"
            "⟦5</s>⟧[TOOLS]<|user|>6<|end|>⟦7</s>⟧",
        ),
        # As Mistral Small 3's for vLLM, which writes a last question differently, and no prompt.
        (
            "{% for m in messages %}{% if m.role == 'user' %}"
            "{{ '<|system|>' + m.content if loop.last else '<|user|>' + m.content + '<|end|>' }}"
            "{% elif m.role == 'tool' %}{{ '<|tool|>' + m.content + '<|/call|>' }}"
            "{% else %}{{ m.content }}" + CALL + "{% endfor %}</s>{% endif %}{% endfor %}",
            "user call tool call tool assistant user call",
            "<|user|>0<|end|>⟦<|call|>f1</s>⟧<|tool|>2<|/call|>⟦<|call|>f3</s>⟧<|tool|>4<|/call|>"
            "⟦5</s>⟧<|user|>6<|end|>⟦<|call|>f7</s>⟧",
        ),
        # As Llama 4's for vLLM: between a result and an answer's heading there is no line end.
        (
            "{% for m in messages %}"
            "{{ '\n' if m.role == 'user' or m.tool_calls }}{{ '<|' + m.role + '|>' + m.content }}"
            + CALL
            + "{% endfor %}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}{{ '\n<|assistant|>' }}{% endif %}",
            "user call tool call tool assistant user assistant",
            "\n<|user|>0<|end|>\n<|assistant|>⟦<|call|>f1<|end|>⟧<|tool|>2<|end|>\n<|assistant|>"
            "⟦<|call|>f3<|end|>⟧<|tool|>4<|end|><|assistant|>⟦5<|end|>⟧\n<|user|>6<|end|>"
            "<|assistant|>⟦7<|end|>⟧",
        ),
        # As Granite 20B's for vLLM: after the prompt's last word there is other white space.
        (
            "{% for m in messages %}"
            "{{ '<|' + m.role + '|>' if m.role != 'assistant' else '\nASSISTANT:' }}"
            "{{ ' ' if m.role == 'assistant' and not m.tool_calls }}{{ m.content }}"
            + CALL
            + "{% endfor %}{{ '<|end|>' if m.role == 'assistant' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '\nASSISTANT: \n' }}{% endif %}",
            "user call tool call tool assistant",
            "<|user|>0\nASSISTANT:⟦<|call|>f1<|end|>⟧<|tool|>2\nASSISTANT:⟦<|call|>f3<|end|>⟧"
            "<|tool|>4\nASSISTANT:⟦ 5<|end|>⟧",
        ),
        # As DeepSeek V3's for vLLM: what precedes a last turn is written differently, and calls
        # begin with another token than their results' ending, whose first characters are the same.
        (
            "{% for m in messages %}{{ '<|' + m.role + '|>' if m.role == 'user' }}{{ m.content }}"
            "{% if m.role == 'user' %}<|assistant|>{{ '!' if loop.last }}"
            "{% elif m.role == 'tool' %}<|/call|>{{ '!' if loop.last }}{% endif %}"
            + CALL
            + "{% endfor %}{{ '<|end|>' if m.role == 'assistant' }}{% endfor %}",
            "user call tool call tool assistant",
            "<|user|>0<|assistant|>⟦<|call|>f1<|end|>⟧2<|/call|>⟦<|call|>f3<|end|>⟧4<|/call|>"
            "⟦5<|end|>⟧",
        ),
        # As Command R+'s, refused without tools: the next heading ends no call.
        (
            "{% if messages | length > 1 and not messages | selectattr('tool_calls') | list %}"
            "{{ raise_exception('No tools.') }}{% endif %}"
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
            + CALL
            + ")\n{% endfor %}{{ '<|end|>' if not m.tool_calls }}{% endfor %}"
            "{{ '<|im_start|>tool\n' if messages[-1].tool_calls }}" + CHATML_PROMPT + "{% endif %}",
            "user call tool assistant",
            "<|im_start|>user\n0<|end|><|im_start|>assistant\n⟦<|call|>f1)\n⟧<|im_start|>tool\n2"
            "<|end|><|im_start|>assistant\n⟦3<|end|>⟧",
        ),
        # A template that refuses a call without a result.
        (
            "{% for m in messages %}"
            + REFUSES_LAST_CALL
            + "{{ '<|' + m.role + '|>' + m.content }}"
            + CALL
            + ")<|/call|>{% endfor %}<|end|>{% endfor %}"
            + PROMPT
            + "{% endif %}",
            "user call tool assistant",
            "<|user|>0<|end|><|assistant|>⟦<|call|>f1)<|/call|><|end|>⟧<|tool|>2<|end|>"
            "<|assistant|>⟦3<|end|>⟧",
        ),
    ],
)
def test_a_call_is_trained_on_from_its_first_token_to_the_token_that_ends_it(
    tmp_path, template, roles, expected
):
    assert marked(template, list(map(_turn, roles.split(), map(str, range(9)))), tmp_path) == (
        expected
    )


def _turn(role, text):
    """Returns a turn; of the role `call`, an assistant's call f(x=text)."""
    if role != "call":
        return Message(role, text)
    function = {"name": "f", "arguments": {"x": text}}
    call = {"type": "function", "function": function, "id": f"id{text}"}
    return Message("assistant", "", tool_calls=(call,))


UNMARKED = "an answer outside the template's {% generation %} blocks, which alone are in the loss"
ENDLESS = "no token that ends an answer is in the loss: the template writes none"
GUESSED = "the beginning of an answer guessed: the template's generation prompt is not before it"


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        (HEADINGS + PROMPT + "{% endif %}", "user assistant", {ENDLESS}),
        (HEADINGS + PROMPT + "{% endif %}", "user assistant user assistant", set()),
        (HEADINGS + PROMPT + "{% else %}</s>{% endif %}", "user assistant", set()),
        (
            "{% for m in messages %}{{ '#' if loop.last }}{{ '<|' + m.role + '|>' + m.content }}"
            "{{ '</s>' }}{% endfor %}",
            "user assistant user assistant",
            {GUESSED},
        ),
    ],
)
def test_answers_without_a_known_beginning_or_end_are_counted(tmp_path, template, roles, expected):
    turns = [Message(role, "x") for role in roles.split()]
    tokenizer = tokenizer_with("", tmp_path).with_controls(["<|user|>", "<|assistant|>"])
    tokenizer.chat_template = "{{ '<s>' }}" + template
    assert encode_conversation(turns, "tokenizer", tokenizer).notes == expected
