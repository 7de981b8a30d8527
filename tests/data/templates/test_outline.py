"""Templates that only write contents run once for conversations with the same roles, and their
outlines give the same results; templates that inspect contents are detected."""

import pytest

from data.conversation import Message
from data.templates.built_in import BUILT_IN
from data.templates.errors import TemplateError
from data.templates.rendering import Template, _outline
from data.templates.sandbox import compile_template
from data.tokenizer import TEMPLATE_DATE

LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|h|>' + message['role'] + '<|e|>\n\n' + "
    "message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{% for m in messages if m.role != 'tool' %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}"
    "{{ '<t>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ m.content | trim ~ '</t>' }}"
    "{% endfor %}"
)
LAST = "{{ messages[-1].content }}|{{ messages[:-1] | length }}{{ messages[0]['content'] | trim }}"
TWICE = "{% for m in messages %}{{ m.content }}{{ m.content }}{{ m.content | trim }}{% endfor %}"
WRITING = [*BUILT_IN.values(), LLAMA_3, GEMMA, LAST, TWICE]
CONTENTS = ["a", "", " b \n", "<think>x</think>", "{{ y }}", "</s>", "\u00a0\u2028", "d" * 5000]
ORDERS = [
    ("user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "user"),
    ("user", "tool", "assistant"),
]


def _merged(runs):
    """Returns (characters, turn, offset), with adjacent texts of the template merged."""
    merged = []
    for length, source, offset in runs:
        turn = None if source is None else (source.turn, source.field)
        if merged and turn is None and merged[-1][1] is None:
            merged[-1] = (merged[-1][0] + length, None, 0)
        else:
            merged.append((length, turn, offset))
    return merged


@pytest.mark.parametrize("source", WRITING)
def test_an_outline_gives_the_same_result_as_the_template(source):
    assert compile_template(source).only_writes
    template = Template(source, (("bos_token", "<s>"), ("eos_token", "</s>")), TEMPLATE_DATE)
    compared = 0
    for roles in ORDERS:
        for first in range(len(CONTENTS)):
            messages = [
                Message(role, CONTENTS[(first + 3 * number) % len(CONTENTS)])
                for number, role in enumerate(roles)
            ]
            for prompt in (False, True):
                try:
                    expected = template._run(messages, (), prompt)
                except TemplateError as error:
                    with pytest.raises(TemplateError) as raised:
                        template.render(messages, (), prompt)
                    assert str(raised.value) == str(error)
                    continue
                rendered = template.render(messages, (), prompt)
                assert rendered.text == expected.text
                assert _merged(rendered.runs) == _merged(expected.runs)
                assert [s.text for s in rendered.sources] == [m.content for m in messages]
                compared += 1
    assert compared >= 16


def test_a_template_runs_once_for_the_same_roles(monkeypatch):
    _outline.cache_clear()
    runs = []
    run = Template._run
    monkeypatch.setattr(Template, "_run", lambda self, *args: (runs.append(1), run(self, *args))[1])
    template = Template(
        BUILT_IN["chatml"], (("bos_token", "<s>"), ("eos_token", "</s>")), TEMPLATE_DATE
    )
    for content in "abc":
        text = template.render([Message("user", content), Message("assistant", "x")]).text
        assert (
            text == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
        )
    assert len(runs) == 1
    template.render([Message("user", "a"), Message("assistant", "x", reasoning="y")])
    assert len(runs) == 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.content %}a{% endif %}{% endfor %}",
        "{% for m in messages %}{{ 'a' if m.content else 'b' }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content | trim('x') }}{% endfor %}",
        "{% for m in messages %}{{ ('a' + m.content) | trim }}{% endfor %}",
        "{% for m in messages %}{{ m.content[1:] }}{% endfor %}",
        "{% for m in messages %}{{ m.content.strip() }}{% endfor %}",
        "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
        "{% for m in messages %}{{ m.content == 'a' }}{% endfor %}",
        "{% for m in messages %}{{ 'a' in m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content is string }}{% endfor %}",
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m }}{% endfor %}",
        "{% for m in messages %}{{ m.items() | list }}{% endfor %}",
        "{% for m in messages %}{{ m.get('content') }}{% endfor %}",
        "{% for m in messages %}{% for k in m %}{{ m[k] }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ loop.previtem.content | length }}{% endfor %}",
        "{% for m in messages if m.content != 'a' %}b{% endfor %}",
        "{% for c in messages[0].content %}{{ c }}-{% endfor %}",
        "{{ messages | map(attribute='content') | join }}",
        "{{ messages[messages[0].content | length].role }}",
        "{% set x = messages[0].content %}{% if x == 'a' %}b{% endif %}",
        "{% for m in messages %}{{ 'y' if x else 'z' }}{% set x = m.content %}{% endfor %}",
        "{% set n = namespace(x='') %}{% set n.x = messages[0].content %}{{ n.x | length }}",
        "{% macro f(x) %}{{ x | length }}{% endmacro %}{{ f(messages[0].content) }}",
        "{% set x %}{{ messages[0].content }}{% endset %}{{ x | length }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ dict(a=messages[0].content).a | length }}",
        "{{ [messages[0].content] | length }}{{ [messages[0].content] }}",
        "{{ 'ab'[messages[0].content | int] }}",
        "".join(f"{{% set a{n} = a{n + 1} %}}" for n in range(99)),
    ],
)
def test_a_template_that_may_inspect_contents_runs_every_time(source):
    if source.startswith("{% set a0"):  # so many variables that the search for contents gives up
        source += "{% set a99 = messages[0].content %}{{ a0 }}"
    assert not compile_template(source).only_writes


def test_an_outline_counts_the_work_for_long_contents():
    source = "{% for i in range(9000) %}{{ messages[0].content }}{% endfor %}"
    assert compile_template(source).only_writes
    template = Template(source, (), TEMPLATE_DATE)
    assert len(template.render([Message("user", "a" * 99)]).text) == 9000 * 99
    with pytest.raises(TemplateError, match="does not end"):
        template.render([Message("user", "a" * 100_000)])
