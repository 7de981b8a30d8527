"""Random templates of loops, macros, filters and methods: each finishes within time and memory
limits, and either matches transformers or is refused."""

import gc
import random
import resource
import time

import pytest

from data.conversation import Message
from data.errors import UserError
from data.templates.rendering import Template
from data.tokenizer import TEMPLATE_DATE

TURNS = [
    Message("system", "Be brief."),
    Message("user", "What is 2+2?"),
    Message("assistant", "<think>Hm</think>Four."),
]
NUMBERS = ["0", "1", "2", "-1", "3", "7", "100", "99999", "10**9", "2000000000"]
TEXTS = [
    "'a'",
    "'</think>'",
    "' '",
    "'\\n'",
    "'x' * 50000",
    "'%s'",
    "'%2000000000d'",
    "'{}'",
    "'{:2000000000}'",
    "m.content",
    "messages[0].content",
    "m.role",
    "s.x",
    "f(1)",
    "loop.index",
    "'<b>'|safe",
]
FILTERS = [
    "trim",
    "length",
    "upper",
    "lower",
    "title",
    "capitalize",
    "tojson",
    "list",
    "string",
    "first",
    "last",
    "reverse",
    "sort",
    "unique",
    "min",
    "max",
    "int",
    "safe",
    "items",
    "count",
    "join",
    "join(', ')",
    "default('x')",
    "replace('a', 'bb')",
    "indent(4)",
    "indent(10**9)",
    "tojson(indent=10**9)",
    "map('upper')",
    "map('length')|list",
    "select('string')|list",
    "reject('none')|list",
    "string|trim",
    "string|lower",
    "list|join",
    "tojson|safe",
    "default(m, true)",
    "trim|length",
    "string|length",
    "center(10**9)",
    "round(10**9)",
    "format(1)",
    "urlize",
]
METHODS = [
    "strip()",
    "split()",
    "split('a')",
    "upper()",
    "replace('a', 'b' * 9999)",
    "join(['a'] * 9999)",
    "zfill(10**9)",
    "ljust(10**9)",
    "startswith('a')",
    "endswith('>')",
    "partition('>')",
    "splitlines()",
    "format(1)",
    "count('a')",
    "find('a')",
    "expandtabs(10**9)",
    "encode()",
    "translate({97: 'b' * 9999})",
    "items()",
    "get('a')",
    "__class__",
]
SIGNS = ["+", "~", "*", "%", "**", "-", "//", "in", "==", "<", "not in", "and", "or"]


class Grammar:
    """Generates templates from a seed."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def template(self):
        """Returns a template that sets a variable, defines a macro and has some statements."""
        macro = self._random.choice(
            ["f(n)", "'a' * n", "(f(n - 1) ~ f(n - 1)) if n > 0 else 'a'", "n", "s.x"]
        )
        return (
            "{% set s = namespace(x='ab') %}{% macro f(n) %}{{ " + macro + " }}{% endmacro %}"
            "{% for m in messages %}" + self.statements(3) + "{% endfor %}"
        )

    def statements(self, depth):
        return "".join(self.statement(depth) for _ in range(self._random.randint(1, 3)))

    def statement(self, depth):
        kind = self._random.random()
        value = self.expression(3)
        if depth and kind < 0.3:
            over = self._random.choice(
                [
                    f"range({self._random.choice(NUMBERS)})",
                    "messages",
                    f"({value})",
                    "[1, 2, 3]",
                    "m",
                ]
            )
            return "{% for i in " + over + " %}" + self.statements(depth - 1) + "{% endfor %}"
        if depth and kind < 0.45:
            return "{% if " + value + " %}" + self.statements(depth - 1) + "{% endif %}"
        if kind < 0.65:
            grown = self._random.choice(
                ["s.x ~ s.x", "s.x + s.x", "[s.x, s.x]", "s.x * 99", "{'a': s.x}", value]
            )
            return "{% set s.x = " + grown + " %}"
        return "{{ " + value + " }}"

    def expression(self, depth):
        kind = self._random.random()
        if not depth or kind < 0.2:
            return self._random.choice(TEXTS + NUMBERS)
        inner = self.expression(depth - 1)
        if kind < 0.5:
            return f"({inner})|{self._random.choice(FILTERS)}"
        if kind < 0.7:
            return f"({inner}).{self._random.choice(METHODS)}"
        if kind < 0.8:
            return f"({inner})[{self._random.choice(['0', '1:', ':-1', '::2', '::-1', '99'])}]"
        return f"({inner}) {self._random.choice(SIGNS)} ({self.expression(depth - 1)})"


def run(seeds, compare):
    """Renders the templates of the seeds; returns how many were rendered and refused, and the
    longest time in seconds.

    Args:
      compare: whether to compare rendered texts with transformers'. In its sandbox, many of the
        refused templates would take all memory, and some of the rendered ones 2 GB.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [{"role": message.role, "content": message.content} for message in TURNS]
    rendered, refused, longest = 0, 0, 0.0
    for seed in seeds:
        source = Grammar(seed).template()
        start, result = time.thread_time(), None
        try:
            result = Template(
                source, (("bos_token", "<s>"), ("eos_token", "</s>")), TEMPLATE_DATE
            ).render(TURNS)
            rendered += 1
        except UserError as error:
            assert "chat template" in str(error), source
            refused += 1
        seconds = time.thread_time() - start
        longest = max(longest, seconds)
        assert seconds < 2, (seconds, source)
        if result is not None:
            assert sum(length for length, _, _ in result.runs) == len(result.text)
        if result is not None and compare:
            [text], _ = render_jinja_template(
                [turns], chat_template=source, bos_token="<s>", eos_token="</s>"
            )
            assert result.text == text, source
    return rendered, refused, longest


@pytest.fixture(autouse=True)
def freeze_objects_of_other_tests():
    """Otherwise the garbage collector would walk over millions of them while a template is
    timed."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _check(seeds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rendered, refused, longest = run(seeds, compare=False)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    run(seeds, compare=True)
    print(f"{rendered} rendered, {refused} refused, at most {longest:.2f} s, {grown:.0f} MiB")
    assert grown < 300 and min(rendered, refused) > len(seeds) // 10


def test_200_random_templates_stay_within_time_and_memory():
    _check(range(200))


@pytest.mark.slow
def test_2000_random_templates_stay_within_time_and_memory():
    _check(range(2_000))
