"""The filters, tests and operations of chat templates that count their work.

`data.templates.environment` substitutes them for Jinja's.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import pass_context, pass_environment
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Undefined

from data.templates.errors import TemplateError
from data.templates.meter import meter, walk
from data.templates.tracked import Safe, Tracked, concat, percent, text_of
from data.templates.tracked_json import to_json

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_COMPARING_TESTS = {
    "==": "eq",
    "eq": "eq",
    "equalto": "eq",
    "!=": "ne",
    "ne": "ne",
    ">": "gt",
    "gt": "gt",
    ">=": "gteq",
    "ge": "gteq",
    "<": "lt",
    "lt": "lt",
    "<=": "lteq",
    "le": "lteq",
    "in": "in",
}


def counted(values: Iterable[Any], steps: int = 1) -> Iterator[Any]:
    """Yields the values, and counts each; every loop of a template runs over this."""
    for value in Tracked(values) if type(values) is str else values:
        meter.spend(steps)
        yield value


def _spent(value: Any, steps: int) -> Any:
    meter.spend(steps)
    return value


def _tilde(parts: list[Any]) -> Tracked:
    return concat(map(text_of, parts))


@pass_context
def _added(context: Any, values: list[Any]) -> Any:
    """Returns the sum of some values, from left to right."""
    if all(type(value) in (str, Tracked) for value in values):
        return concat(values)
    total, *others = values
    for value in others:
        total = context.environment.call_binop(context, "+", total, value)
    return total


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    if isinstance(value, str | list | tuple):
        meter.spend(1 + len(value) // (100 if isinstance(value, str) else 10))
    return (Tracked(value) if type(value) is str else value)[start:stop:step]


def _hashable(value: Any) -> Any:
    walk(value)
    return value


def compared(left: Any, sign: str, right: Any) -> Any:
    """Returns the result of a comparison, and counts the values Python visits for it."""
    if sign in ("in", "notin"):
        if isinstance(right, str):
            meter.spend(1 + len(right) // 100)
        elif isinstance(right, dict):
            walk(left)
        else:
            walk(right)
            walk(left)
    elif isinstance(left, str) and isinstance(right, str):
        meter.spend(min(len(left), len(right)) // 100)
    else:
        walk(left)
        walk(right)
    return _COMPARISONS[sign](left, right)


def _comparing_test(sign: str) -> Callable[[Any, Any], Any]:
    return lambda left, right: compared(left, sign, right)


def comparing_tests() -> dict[str, Callable[[Any, Any], Any]]:
    """Returns the comparing tests, by their names in templates, counted like comparisons."""
    return {name: _comparing_test(sign) for name, sign in _COMPARING_TESTS.items()}


def _soft(value: Any) -> Tracked:
    """Returns a text unchanged, and other values as printed."""
    text = value if isinstance(value, str) else text_of(value)
    return text if isinstance(text, Tracked) else Tracked(text)


def _plain(value: Any) -> Tracked:
    """Returns what a value prints."""
    return Tracked(text_of(value))


@pass_environment
def _joined(environment: Any, value: Any, d: Any = "", attribute: Any = None) -> Tracked:
    """Returns the values joined by the text `d`, which is Jinja's name for it."""
    values = counted(value)
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return _plain(d).join(map(text_of, values))


def _indented(
    value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Tracked:
    if isinstance(width, int):
        meter.spend(max(width, 0) // 10)
        width = " " * width
    # A line end is added, so that a last empty line counts, as in Jinja's filter.
    lines = (value + Tracked("\n")).splitlines()
    between = Tracked("\n" + width) if blank else Tracked("\n")
    rest = lines[1:] if blank else [Tracked(width) + line if line else line for line in lines[1:]]
    text = between.join([*lines[:1], *rest])
    return Tracked(width) + text if first else text


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Undefined):
        return iter(())
    if not isinstance(value, dict):
        raise TypeError("Can only get item pairs from a mapping.")
    meter.spend(len(value))
    return iter(list(value.items()))


def _eager(name: str) -> Callable[..., Any]:
    """Returns a counting, eager version of a generator filter of Jinja's.

    Like Jinja's, it gives nothing for a false value, such as absent `tools`.
    """
    function = FILTERS[name]

    @pass_context
    def eager(context: Any, value: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        values = counted(value, 2) if value else ()
        return iter(list(function(context, values, *arguments, **options)))

    return eager


def _walking(name: str) -> Callable[..., Any]:
    """Returns a counting version of a comparing filter of Jinja's."""
    function = FILTERS[name]

    def walking(environment: Any, value: Any, *arguments: Any, **options: Any) -> Any:
        values = list(counted(value))
        walk(values)
        result = function(environment, values, *arguments, **options)
        return iter(list(result)) if name == "unique" else result

    vars(walking)["jinja_pass_arg"] = vars(function)["jinja_pass_arg"]
    return walking


def _sorted_items(value: dict, *arguments: Any, **options: Any) -> list[Any]:
    walk(value)
    return FILTERS["dictsort"](value, *arguments, **options)


def _format(value: Any, *arguments: Any, **options: Any) -> Any:
    if options:
        raise TemplateError("the chat template formats a text by names, which is not allowed")
    return percent(_plain(value), arguments)


def _reversed(value: Any) -> Any:
    if isinstance(value, str):
        return Tracked(value)[::-1]
    values = list(counted(value))
    return iter(values[::-1])


def _title(value: Any) -> Tracked:
    return _soft(value).mapped(FILTERS["title"])


def _replaced(value: Any, old: Any, new: Any, count: int | None = None) -> Tracked:
    return _plain(value).replace(_plain(old), _plain(new), -1 if count is None else count)


def counting_filters() -> dict[str, Callable[..., Any]]:
    """Returns counting filters in place of Jinja's, and those the compiler inserts."""
    return {
        # Inserted by the compiler: see `environment`.
        "counted": counted,
        "spent": _spent,
        "tilde": _tilde,
        "added": _added,
        "sliced": _sliced,
        "hashable": _hashable,
        "compared": compared,
        "capitalize": lambda value: _soft(value).capitalize(),
        "format": _format,
        "indent": _indented,
        "items": _items,
        "join": _joined,
        "list": lambda value: list(counted(value)),
        "lower": lambda value: _soft(value).lower(),
        "replace": _replaced,
        "reverse": _reversed,
        "safe": lambda value: Safe(text_of(value)),
        "string": _soft,
        "title": _title,
        "tojson": to_json,
        "trim": lambda value, chars=None: _soft(value).strip(chars),
        "upper": lambda value: _soft(value).upper(),
        "dictsort": _sorted_items,
        **{name: _eager(name) for name in ("map", "select", "reject", "selectattr", "rejectattr")},
        **{name: _walking(name) for name in ("min", "max", "sort", "unique")},
    }
