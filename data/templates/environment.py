"""The Jinja environment of chat templates: what templates may use, and how their work is counted.

A template is compiled without evaluating anything, and its tree is changed so that loops, macros,
comparisons, slices and `~` run through the functions of `counting`. What stands on no list
here is refused by its name.
"""

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from data.templates.counting import comparing_tests, counting_filters
from data.templates.errors import TemplateError
from data.templates.outline import MAX_OUTLINED, only_writes_contents
from data.templates.tracked import Safe, Tracked, concat, meter, percent, text_of, walk

# Those of the published templates of TRL and of the model families.
ALLOWED_FILTERS = frozenset(
    [
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "format",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "tojson",
        "trim",
        "unique",
        "upper",
    ]
)
ALLOWED_TESTS = frozenset(
    [
        "!=",
        "<",
        "<=",
        "==",
        ">",
        ">=",
        "boolean",
        "defined",
        "divisibleby",
        "eq",
        "equalto",
        "even",
        "false",
        "float",
        "ge",
        "gt",
        "in",
        "integer",
        "iterable",
        "le",
        "lt",
        "mapping",
        "ne",
        "none",
        "number",
        "odd",
        "sequence",
        "string",
        "true",
        "undefined",
    ]
)
_LOOP_ATTRIBUTES = ("first", "last", "index", "index0", "previtem", "nextitem")  # the usual ones
_OTHER_FUNCTIONS = ("cycler", "joiner", "lipsum")  # Jinja's own, which no published template calls
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (
        str,
        frozenset(
            [
                "capitalize",
                "count",
                "endswith",
                "find",
                "format",
                "index",
                "isalnum",
                "isalpha",
                "isdecimal",
                "isdigit",
                "islower",
                "isnumeric",
                "isspace",
                "isupper",
                "join",
                "lower",
                "lstrip",
                "partition",
                "removeprefix",
                "removesuffix",
                "replace",
                "rfind",
                "rpartition",
                "rsplit",
                "rstrip",
                "split",
                "splitlines",
                "startswith",
                "strip",
                "title",
                "upper",
            ]
        ),
    ),
    (dict, frozenset(["copy", "get", "items", "keys", "values"])),
    (list, frozenset(["copy", "count", "index"])),
    (tuple, frozenset(["count", "index"])),
)
MOST_NESTED = 40  # tags; published templates nest 13
_TAGS = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.For,
    nodes.If,
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.With,
    nodes.Assign,
    nodes.AssignBlock,
    nodes.ExprStmt,
    nodes.Break,
    nodes.Continue,
    nodes.Scope,
)
_NAMES_OF_TAGS = {nodes.ScopedEvalContextModifier: "autoescape", nodes.FromImport: "from"}


def _refuse(kind: str, name: str) -> NoReturn:
    raise TemplateError(f"the chat template uses the {kind} {name[:60]}, which is not allowed")


class Environment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with tracked texts and counted work."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])
    concat = staticmethod(concat)  # Jinja joins with it what macros and blocks print
    needles: frozenset[str] = frozenset()
    """Texts that the template looks for in others."""
    only_writes = False
    """Whether the template does nothing with contents but write them."""

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
            **{name: _refusing(name) for name in _OTHER_FUNCTIONS},
        }

    def _parse(self, source: str, *arguments: Any) -> nodes.Template:
        template = super()._parse(source, *arguments)
        found = _nodes_of(template)
        _check(found)
        self.needles = frozenset(_needles(found))
        self.only_writes = len(source) <= MAX_OUTLINED and only_writes_contents(template)
        return _Counting(found).visit(template)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns `obj.attribute` of a template: an attribute, an item or a tracked method."""
        if isinstance(obj, LoopContext) and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        for kind, methods in _METHODS:
            if isinstance(obj, kind):
                return self._attribute_of_data(obj, attribute, kind, methods)
        if not isinstance(obj, LoopContext | Namespace | Macro | Undefined) and hasattr(
            type(obj), attribute
        ):
            if attribute.startswith("_"):
                return self.unsafe_undefined(obj, attribute)
            _refuse("attribute", attribute)
        return super().getattr(obj, attribute)

    def _attribute_of_data(
        self, obj: Any, attribute: str, kind: type, methods: frozenset[str]
    ) -> Any:
        if attribute in methods:
            return getattr(Tracked(obj) if type(obj) is str else obj, attribute)
        if hasattr(kind, attribute):
            if attribute.startswith("_") or modifies_known_mutable(obj, attribute):
                return self.unsafe_undefined(obj, attribute)
            _refuse("method", attribute)
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

    def call(self, context: Any, function: Any, *arguments: Any, **options: Any) -> Any:
        meter.spend(20)  # a macro's call takes as long as many iterations
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
            _refuse("filter", str(name))
        meter.spend(2)
        return super().call_filter(name, *arguments, **options)

    def call_test(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Calls a test by name, as the filter `select` does."""
        if name not in ALLOWED_TESTS:
            _refuse("test", str(name))
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


# Functions of templates.


class TemplateDict:
    """The function `dict`, as transformers gives it to templates."""

    def __call__(self, *arguments: Any, **options: Any) -> dict:
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
    """Raises TemplateError; templates call it for conversations that they do not take."""
    raise TemplateError(f"the chat template refuses: {str(message)[:1000]}")


def counted_range(*arguments: int) -> range:
    """Returns Python's range, counted before it is run over."""
    numbers = range(*arguments)
    # len(numbers) raises OverflowError beyond 2**63.
    meter.spend(len(numbers))
    return numbers


_DATE_FORMAT = re.compile(r"(?:%-?[A-Za-z%]|[^%])*")


def strftime(date: datetime, form: str) -> str:
    """Returns a date in a form as transformers' strftime_now does, without widths in it."""
    if len(form) > 200 or not _DATE_FORMAT.fullmatch(form):
        raise TemplateError(
            "the chat template writes the date in a form with a width, or of more than 200 "
            "characters"
        )
    return date.strftime(form)


def _no_date(form: str) -> NoReturn:
    raise AssertionError("strftime_now is given to each rendering")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def function(*arguments: Any, **options: Any) -> NoReturn:
        _refuse("function", name)

    return function


# What happens to a template's tree.


class Generation(Extension):
    """{% generation %}, which marks the assistant's text for the loss."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        """Returns a block's text, and notes its range in the printed text, as transformers does."""
        text = caller()
        start = meter.printed
        meter.generated.append((start, start + len(text)))
        return text


def _nodes_of(template: nodes.Template) -> list[nodes.Node]:
    """Returns all nodes of a template, each before its parts."""
    found: list[nodes.Node] = [template]
    for node in found:
        found.extend(node.iter_child_nodes())
    return found


def _check(found: list[nodes.Node]) -> None:
    """Raises TemplateError where a template's nodes use what is on no list.

    Args:
      found: all nodes, each before its parts.
    """
    depths: dict[nodes.Node, int] = {found[0]: 0}
    for node in found:
        # Jinja's compiler goes through the inner tags again for each outer one.
        if depths[node] > MOST_NESTED:
            raise TemplateError(f"the chat template nests more than {MOST_NESTED} tags")
        for part in node.iter_child_nodes():
            depths[part] = depths[node] + isinstance(part, nodes.Stmt)
        if isinstance(node, nodes.Stmt) and not isinstance(node, _TAGS):
            _refuse("tag", _NAMES_OF_TAGS.get(type(node), type(node).__name__.lower()))
        if isinstance(node, nodes.Filter) and node.name not in ALLOWED_FILTERS:
            _refuse("filter", node.name)
        if isinstance(node, nodes.Test) and node.name not in ALLOWED_TESTS:
            _refuse("test", node.name)
        if isinstance(node, nodes.For) and node.recursive:
            _refuse("tag", "for ... recursive")


def _needles(found: list[nodes.Node]) -> Iterator[str]:
    """Yields the constants that a template looks for with `in`, or with a method such as split."""
    for node in found:
        if isinstance(node, nodes.Compare) and isinstance(node.expr, nodes.Const):
            if any(operand.op in ("in", "notin") for operand in node.ops):
                yield str(node.expr.value)
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            yield from (
                str(argument.value) for argument in node.args if isinstance(argument, nodes.Const)
            )


def _filter(node: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


class _Counting(NodeTransformer):
    """Puts the functions that count into a template."""

    def __init__(self, found: list[nodes.Node]):
        """Takes all nodes of the template, each before its parts."""
        self._sizes: dict[nodes.Node, int] = {}  # 25 for each node, 1 for each character of text
        for node in reversed(found):
            text = len(node.data) if isinstance(node, nodes.TemplateData) else 0
            parts = sum(self._sizes[part] for part in node.iter_child_nodes())
            self._sizes[node] = 25 + text + parts

    def _steps(self, body: list[nodes.Node]) -> int:
        """Returns how many steps a body takes at most once, without more rounds of loops in it."""
        return 1 + sum(self._sizes[part] for part in body) // 100

    def visit_For(self, node: nodes.For) -> nodes.For:
        steps = self._steps(node.body)
        self.generic_visit(node)
        node.iter = _filter(cast(nodes.Expr, node.iter), "counted", nodes.Const(steps))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._counted_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._counted_body(node)

    def _counted_body(self, node: Any) -> Any:
        steps = self._steps(node.body)
        self.generic_visit(node)
        count = _filter(nodes.Const(None, lineno=node.lineno), "spent", nodes.Const(steps))
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        left, comparisons = node.expr, list[nodes.Expr]()
        for operand in node.ops:
            comparisons.append(_filter(left, "compared", nodes.Const(operand.op), operand.expr))
            left = operand.expr
        result = comparisons[0]
        for following in comparisons[1:]:
            result = nodes.And(result, following, lineno=node.lineno)
        return result

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "tilde")

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.left, nodes.Filter) and node.left.name == "added":
            cast(nodes.List, node.left.node).items.append(node.right)
            return node.left
        return _filter(nodes.List([node.left, node.right], lineno=node.lineno), "added")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [
            part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step)
        ]
        return _filter(node.node, "sliced", *ends)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter(node.key, "hashable")
        return node
