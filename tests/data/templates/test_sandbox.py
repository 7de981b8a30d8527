import resource
import shutil
import time

import pytest

from data.conversation import Message
from data.errors import UserError
from data.templates import TemplateError, render
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

TINY = REPOSITORY / "data/fixtures/tiny_tokenizer"
NESTED = (
    "{% set x = namespace(v=[1]) %}{% for a in range(40) %}{% set x.v = [x.v, x.v] %}{% endfor %}"
)
TURNS = [Message("user", "a"), Message("assistant", "b")]


def tokenizer_with(template, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) "
        "}}",
        "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{% set s = namespace(x='aa') %}{% for a in range(60) %}{% set s.x = s.x + s.x %}{% "
        "endfor %}",
        "{% set s = namespace(x='aa') %}{% for a in range(60) %}{% set s.x = s.x ~ s.x %}{% "
        "endfor %}",
        "{% set s = namespace(x=7) %}{% for a in range(60) %}{% set s.x = s.x * s.x %}{% endfor %}",
        "{{ 'a' * 9999999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_an_endless_template_is_refused(template, tmp_path):
    tokenizer = tokenizer_with(template, tmp_path)
    start = time.monotonic()
    with pytest.raises(TemplateError, match="the chat template") as caught:
        render(TURNS, "tokenizer", tokenizer)
    assert (
        time.monotonic() - start < 20
        and "\n" not in str(caught.value)
        and len(str(caught.value)) < 400
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ '%2000000000d' % 1 }}", "formats a text by % with a width"),
        ("{{ '%2000000000d' | format(1) }}", "formats a text by % with a width"),
        ("{{ '{:2000000000}'.format(1) }}", "with a width or an attribute"),
        ("{{ '{0.__class__}'.format('') }}", "with a width or an attribute"),
        ("{{ 'a'.zfill(2000000000) }}", "uses the method zfill, which is not allowed"),
        ("{{ 'a'['ljust'](2000000000) }}", "uses the method ljust, which is not allowed"),
        (
            "{{ ('a' * 100).translate({97: 'b' * 9999}) }}",
            "uses the method translate, which is not allowed",
        ),
        ("{{ 1 | round(1000000000) }}", "uses the filter round, which is not allowed"),
        (
            "{{ ['a'] | map('center', 1000000000) | list }}",
            "uses the filter center, which is not allowed",
        ),
        ("{{ ['a'] | map('counted') | list }}", "uses the filter counted, which is not allowed"),
        ("{{ ['a'] | select('callable') | list }}", "uses the test callable, which is not allowed"),
        ("{{ lipsum(5000000) }}", "uses the function lipsum, which is not allowed"),
        ("{{ cycler('a') }}", "uses the function cycler, which is not allowed"),
        ("{% include '/etc/passwd' %}", "uses the tag include, which is not allowed"),
        ("{% import 'a' as b %}", "uses the tag import, which is not allowed"),
        ("{{ range }}", "prints a function, which is not allowed"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{{ 'a' | indent(2000000000) }}", "more than [0-9,]+ steps of work"),
        ("{{ ('a' * 50000) | replace('a', 'a' * 50000) }}", "more than [0-9,]+ steps of work"),
        ("{{ (['a' * 100000] * 30000) | join }}", "more than [0-9,]+ steps of work"),
        ("{{ [1, 2] | tojson(indent=1000000000) }}", "more than [0-9,]+ steps of work"),
        (
            "{% set b = 'a' * 1000000 %}{% for i in range(3000) %}{{ b }}{% endfor %}",
            "more than [0-9,]+ steps of work",
        ),
        ("{{ ('a ' * 30000000).split() | length }}", "more than [0-9,]+ steps of work"),
        (NESTED + "{{ x.v }}", "more than [0-9,]+ steps of work"),
        (NESTED + "{{ x.v | tojson }}", "more than [0-9,]+ steps of work"),
        (NESTED + "{{ x.v == [1] }}", "more than [0-9,]+ steps of work"),
        (NESTED + "{{ {x.v | string: 1} }}", "more than [0-9,]+ steps of work"),
        (
            "{% set x = namespace(v=(1, 2)) %}{% for a in range(40) %}{% set x.v = (x.v, x.v) "
            "%}{% endfor %}{{ {x.v: 1} }}",
            "more than [0-9,]+ steps of work",
        ),
        ("{% macro f(n) %}{{ f(n - 1) if n }}{% endmacro %}{{ f(40000) }}", "nested too deeply"),
        (
            "{% for a in range(9000) %}" + "{{ 'a' }}" * 5000 + "{% endfor %}",
            "more than [0-9,]+ steps of work",
        ),
        ("{{ strftime_now('%2000000000Y') }}", "the date in a form with a width"),
        ("{{ " + "'a' ~ " * 9000 + "'a' }}", "characters; up to 50,000"),
        (
            "{% for a in [1] %}" * 90 + "{{ 'a' }}" * 5000 + "{% endfor %}" * 90,
            "nests more than 40 tags",
        ),
        (
            "{% macro f() %}" * 90 + "{{ 'a' }}" * 5000 + "{% endmacro %}" * 90,
            "nests more than 40 tags",
        ),
    ],
)
def test_a_bomb_is_refused_within_a_second_with_a_reason(template, words, tmp_path):
    tokenizer = tokenizer_with(
        template + "{% for m in messages %}{{ m.content }}{% endfor %}", tmp_path
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()  # CPU time of this thread, independent of other load
    with pytest.raises(UserError, match=words) as caught:
        render(TURNS, "tokenizer", tokenizer)
    assert time.thread_time() - start < 1 and "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


@pytest.mark.parametrize(
    "template", ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% if 1 %}" * 300 + "{% endif %}" * 300]
)
def test_a_template_nested_beyond_the_compiler_is_refused(template, tmp_path):
    with pytest.raises(
        UserError, match=r"^the tokenizer's chat template (cannot be compiled|is not Jinja)"
    ):
        render(TURNS, "tokenizer", tokenizer_with(template, tmp_path))


def test_loop_variables_have_the_length_and_position(tmp_path):
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content }}{% "
        "else %}none{% endfor %}{% for a, b in {'x': 'y'}.items() %}{{ a ~ b + 'z' * 2 }}{{ 2 ** 3 "
        "}}{% endfor %}",
        tmp_path,
    )
    ids = [token for segment in render(TURNS, "tokenizer", tokenizer) for token in segment.ids]
    assert tokenizer.decode(ids) == "1/2Falsea2/2Trueb" + "xyzz8"


@pytest.mark.parametrize("text", ["'\\ud800'", "'a' ~ '\\udfff' * 40"])
def test_half_a_surrogate_pair_is_replaced(text, tmp_path):
    tokenizer = tokenizer_with("{{ " + text + " }}{{ messages[1].content }}", tmp_path)
    ids = [token for segment in render(TURNS, "tokenizer", tokenizer) for token in segment.ids]
    assert tokenizer.decode(ids).strip("a") == "\ufffd" * (1 if "*" not in text else 40) + "b"
