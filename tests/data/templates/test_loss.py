"""What is trained on under templates without a generation prompt, with generation blocks, and with
a date."""

from datetime import datetime

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
