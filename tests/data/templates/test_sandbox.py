import shutil
import time

import pytest

from data.conversation import Message
from data.errors import UserError
from data.templates import TemplateError, render
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

TINY = REPOSITORY / "data/fixtures/tiny_tokenizer"
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
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
        "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{% set s = namespace(x='aa') %}{% for a in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{% set s = namespace(x='aa') %}{% for a in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "{% set s = namespace(x=7) %}{% for a in range(60) %}{% set s.x = s.x * s.x %}{% endfor %}",
        "{{ 'a' * 9999999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_a_template_without_end_is_refused(template, tmp_path):
    tokenizer = tokenizer_with(template, tmp_path)
    start = time.monotonic()
    with pytest.raises(TemplateError, match="the chat template") as caught:
        render(TURNS, "tokenizer", tokenizer)
    assert time.monotonic() - start < 20 and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("template", ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% if 1 %}" * 300 + "{% endif %}" * 300])
def test_a_template_nested_beyond_the_compiler_is_refused(template, tmp_path):
    with pytest.raises(UserError, match=r"^the tokenizer's chat template (cannot be compiled|is not Jinja)"):
        render(TURNS, "tokenizer", tokenizer_with(template, tmp_path))


def test_loops_see_the_length_and_neighbours_of_what_they_go_through(tmp_path):
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content }}{% else %}none{% endfor %}"
        "{% for a, b in {'x': 'y'}.items() %}{{ a ~ b + 'z' * 2 }}{{ 2 ** 3 }}{% endfor %}", tmp_path)
    ids = [token for segment in render(TURNS, "tokenizer", tokenizer) for token in segment.ids]
    assert tokenizer.decode(ids) == "1/2Falsea2/2Trueb" + "xyzz8"
