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
        tokenizer.decode(segment.ids, skip_control=False) for segment in segments if segment.train
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
    marks = [f"<|{name}|>" for name in ("user", "assistant", "system", "im_start", "end")]
    tokenizer = tokenizer_with("", tmp_path).with_controls(marks)
    tokenizer.chat_template = template
    turns = [Message(role, str(number)) for number, role in enumerate(roles.split())]
    segments = encode_conversation(turns, "tokenizer", tokenizer).segments
    texts = [
        ("⟦%s⟧" if segment.train else "%s") % tokenizer.decode(segment.ids, skip_control=False)
        for segment in segments
    ]
    assert "".join(texts) == expected
