"""The Jinja environment of chat templates: what templates may call, and how their work is counted."""
import json
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.templates.errors import TemplateError


class Environment(ImmutableSandboxedEnvironment):
    """Counts iterations, calls and the sizes of texts, so that no template runs for ever or fills the memory."""

    intercepted_binops = frozenset(["+", "*", "**"])
    steps_left = 0

    def count(self, steps: int = 1) -> None:
        """Counts steps of work; raises TemplateError where `steps_left` are used up."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise TemplateError("the chat template goes on and on: too many iterations")

    def _parse(self, *arguments):
        template = super()._parse(*arguments)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        for concat in list(template.find_all(nodes.Concat)):
            concat.nodes = [nodes.Filter(node, "sized", [], [], None, None, lineno=node.lineno) for node in concat.nodes]
        return template

    def sized(self, value: object) -> object:
        """Returns the value, and counts a step for each 100 of its items."""
        if isinstance(value, str | list | tuple):
            self.count(len(value) // 100)
        return value

    def counted(self, values: Iterable[object]) -> Iterator[object]:
        """Yields the values, and counts each: what every loop of a template runs over."""
        for value in values:
            self.count()
            yield value

    def range(self, *arguments: int) -> range:
        """Returns Python's range, counted before it is run over."""
        numbers = range(*arguments)
        self.count(len(numbers))
        return numbers

    def call(self, context, function, *arguments, **options):
        self.count(20)  # a macro's call takes as long as many iterations
        return super().call(context, function, *arguments, **options)

    def call_binop(self, context, operator, left, right):
        both = isinstance(left, int) and isinstance(right, int)
        if both and operator != "+" and left.bit_length() * (right if operator == "**" else 1) > 10_000:
            raise TemplateError("the chat template computes a number of thousands of digits")
        for text, number in ((left, right), (right, left)):
            if operator == "*" and isinstance(text, str | list | tuple) and isinstance(number, int):
                self.count(len(text) * max(number, 0) // 100)
        return self.sized(super().call_binop(context, operator, left, right))


class Generation(Extension):
    """{% generation %}, which marks the assistant's text for transformers' masks, and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """Raises TemplateError; templates call it for conversations that they do not take."""
    raise TemplateError(f"the chat template refuses: {message}")


def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
           sort_keys: bool = False) -> str:
    """Returns JSON as transformers' templates write it: without HTML escapes, with Python's own options."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # A mark in quotes becomes a mark that contains a quote; see rendered_parts.
    return re.sub('"\ufdd0(\\d+)\ufdd1"', '\ufdd0\\1"\ufdd1', text)


def make_environment() -> Environment:
    """Returns the environment with the filters and functions that transformers gives its templates, without strftime_now."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters.update(tojson=tojson, counted=environment.counted, sized=environment.sized)
    environment.globals.update(range=environment.range, raise_exception=raise_exception)
    return environment
