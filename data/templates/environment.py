"""The Jinja environment of chat templates, with tracked texts and counted work.

A template is compiled without evaluating anything. Anything beyond the lists of `allowed` is
refused by name.
"""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from data.templates.allowed import (
    ALLOWED_FILTERS,
    ALLOWED_TESTS,
    LOOP_ATTRIBUTES,
    METHODS,
    OTHER_FUNCTIONS,
    refuse,
)
from data.templates.counting import comparing_tests, counting_filters
from data.templates.errors import TemplateError
from data.templates.meter import meter, walk
from data.templates.outline import MAX_OUTLINED, only_writes_contents
from data.templates.tracked import Safe, Tracked, concat, percent, text_of
from data.templates.tree import Counting, Generation, needles, nodes_of, require_allowed


class Environment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with tracked texts and counted work."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])
    concat = staticmethod(concat)  # Jinja joins the output of macros and blocks with it
    needles: frozenset[str] = frozenset()
    """Texts that the template looks for in others."""
    only_writes = False
    """Whether the template only writes contents."""

    def __init__(self, **options: Any):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_printed,
            extensions=["jinja2.ext.loopcontrols", Generation],
            **options,
        )
        self.filters = {
            **{name: FILTERS[name] for name in ALLOWED_FILTERS & FILTERS.keys()},
            **counting_filters(),
        }
        self.tests = {**{name: TESTS[name] for name in ALLOWED_TESTS}, **comparing_tests()}
        self.globals = {
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
            "raise_exception": raise_exception,
            "range": counted_range,
            "strftime_now": _no_date,
            **{name: _refusing(name) for name in OTHER_FUNCTIONS},
        }

    def _parse(self, source: str, *arguments: Any) -> nodes.Template:
        template = super()._parse(source, *arguments)
        found = nodes_of(template)
        require_allowed(found)
        self.needles = frozenset(needles(found))
        self.only_writes = len(source) <= MAX_OUTLINED and only_writes_contents(template)
        return Counting(found).visit(template)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns a template's `obj.attribute`: an attribute, an item or a tracked method."""
        if isinstance(obj, LoopContext) and attribute in LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        for kind, methods in METHODS:
            if isinstance(obj, kind):
                return self._attribute_of_data(obj, attribute, kind, methods)
        if not isinstance(obj, LoopContext | Namespace | Macro | Undefined) and hasattr(
            type(obj), attribute
        ):
            if attribute.startswith("_"):
                return self.unsafe_undefined(obj, attribute)
            refuse("attribute", attribute)
        return super().getattr(obj, attribute)

    def _attribute_of_data(
        self, obj: Any, attribute: str, kind: type, methods: frozenset[str]
    ) -> Any:
        if attribute in methods:
            return getattr(Tracked(obj) if type(obj) is str else obj, attribute)
        if hasattr(kind, attribute):
            if attribute.startswith("_") or modifies_known_mutable(obj, attribute):
                return self.unsafe_undefined(obj, attribute)
            refuse("method", attribute)
        if kind is dict and attribute in obj:
            return obj[attribute]
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Returns an item or attribute of a value, as `obj[argument]` in a template."""
        if isinstance(argument, tuple):
            walk(argument)
        try:
            return (Tracked(obj) if type(obj) is str else obj)[argument]
        except (TypeError, LookupError):
            if isinstance(argument, str):
                return self.getattr(obj, str.__str__(argument))
        return self.undefined(obj=obj, name=argument)

    def call(self, context: Any, function: Any, /, *arguments: Any, **options: Any) -> Any:
        meter.spend(20)  # calling a macro takes as long as many iterations
        if not isinstance(function, Macro):
            for argument in (*arguments, *options.values()):
                if isinstance(argument, list | tuple | dict):
                    walk(argument)
            owner = getattr(function, "__self__", None)
            if isinstance(function, type(len)) and isinstance(owner, list | tuple | dict):
                walk(list(owner))
        return super().call(context, function, *arguments, **options)

    def call_filter(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Calls a filter by name, as the filter `map` does."""
        if name not in ALLOWED_FILTERS:
            refuse("filter", str(name))
        meter.spend(2)
        return super().call_filter(name, *arguments, **options)

    def call_test(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Calls a test by name, as the filter `select` does."""
        if name not in ALLOWED_TESTS:
            refuse("test", str(name))
        meter.spend(2)
        return super().call_test(name, *arguments, **options)

    def call_binop(self, context: Any, sign: str, left: Any, right: Any) -> Any:
        if sign == "%" and isinstance(left, str):
            return percent(Tracked(left), right) if not isinstance(left, Safe) else left % right
        both = isinstance(left, int) and isinstance(right, int)
        if (
            both
            and sign in ("*", "**")
            and left.bit_length() * (right if sign == "**" else 1) > 10_000
        ):
            raise TemplateError("the chat template computes a number of thousands of digits")
        for value, number in ((left, right), (right, left)):
            if sign == "*" and isinstance(value, str | list | tuple) and isinstance(number, int):
                meter.spend(
                    max(number, 0) * (1 + len(value) // (100 if isinstance(value, str) else 4)) // 4
                )
        result = super().call_binop(context, sign, left, right)
        if isinstance(result, str | list | tuple):
            meter.spend(len(result) // (100 if isinstance(result, str) else 10))
        elif isinstance(result, int) and result.bit_length() > 40_000:
            raise TemplateError("the chat template computes a number of thousands of digits")
        return result


@pass_context  # with it, Jinja prints nothing while it compiles
def _printed(context: Any, value: Any) -> str:
    """Returns what `{{ value }}` prints."""
    text = text_of(value)
    meter.spend(1 + len(text) // 100)
    return text


class TemplateDict:
    """The function `dict`, as provided to templates by transformers."""

    def __call__(self, /, *arguments: Any, **options: Any) -> dict:
        return dict(*arguments, **options)


class TemplateNamespace(Namespace):
    """transformers' function `namespace` for templates; names that begin with _ are refused."""

    def __init__(*args: Any, **options: Any):
        self, args = args[0], args[1:]
        values = dict(*args, **options)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r} of a namespace: it begins with _")


def raise_exception(message: str) -> NoReturn:
    """Raises TemplateError; templates call it to refuse a conversation."""
    raise TemplateError(f"the chat template refuses: {str(message)[:1000]}")


def counted_range(*arguments: int) -> range:
    """Returns Python's range, counted before it is run over."""
    numbers = range(*arguments)
    # len(numbers) raises OverflowError beyond 2**63.
    meter.spend(len(numbers))
    return numbers


_DATE_FORMAT = re.compile(r"(?:%-?[A-Za-z%]|[^%])*")


def strftime(date: datetime, /, format: str) -> str:
    """Returns a formatted date like transformers' strftime_now, without widths in the format."""
    if len(format) > 200 or not _DATE_FORMAT.fullmatch(format):
        raise TemplateError(
            "the chat template writes the date in a form with a width, or of more than 200 "
            "characters"
        )
    return date.strftime(format)


def _no_date(form: str) -> NoReturn:
    raise AssertionError("strftime_now is given to each rendering")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def function(*arguments: Any, **options: Any) -> NoReturn:
        refuse("function", name)

    return function
