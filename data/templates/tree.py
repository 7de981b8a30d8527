"""A template's tree: refused if it uses anything not listed, and changed so that loops, macros,
comparisons, slices and `~` run through the functions of `counting`."""

from collections.abc import Callable, Iterator
from typing import Any, cast

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

from data.templates.allowed import ALLOWED_FILTERS, ALLOWED_TESTS, NAMES_OF_TAGS, TAGS, refuse
from data.templates.errors import TemplateError
from data.templates.meter import meter

MOST_NESTED = 40  # tags; published templates nest 13


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


def nodes_of(template: nodes.Template) -> list[nodes.Node]:
    """Returns all nodes of a template, each before its parts."""
    found: list[nodes.Node] = [template]
    for node in found:
        found.extend(node.iter_child_nodes())
    return found


def require_allowed(found: list[nodes.Node]) -> None:
    """Raises TemplateError if a template's nodes use anything not listed.

    Args:
      found: all nodes, each before its parts.
    """
    depths: dict[nodes.Node, int] = {found[0]: 0}
    for node in found:
        # Jinja's compiler revisits the inner tags for each outer one.
        if depths[node] > MOST_NESTED:
            raise TemplateError(f"the chat template nests more than {MOST_NESTED} tags")
        for part in node.iter_child_nodes():
            depths[part] = depths[node] + isinstance(part, nodes.Stmt)
        if isinstance(node, nodes.Stmt) and not isinstance(node, TAGS):
            refuse("tag", NAMES_OF_TAGS.get(type(node), type(node).__name__.lower()))
        if isinstance(node, nodes.Filter) and node.name not in ALLOWED_FILTERS:
            refuse("filter", node.name)
        if isinstance(node, nodes.Test) and node.name not in ALLOWED_TESTS:
            refuse("test", node.name)
        if isinstance(node, nodes.For) and node.recursive:
            refuse("tag", "for ... recursive")


def needles(found: list[nodes.Node]) -> Iterator[str]:
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


class Counting(NodeTransformer):
    """Inserts the counting functions into a template."""

    def __init__(self, found: list[nodes.Node]):
        """Takes all nodes of the template, each before its parts."""
        self._sizes: dict[nodes.Node, int] = {}  # 25 for each node, 1 for each character of text
        for node in reversed(found):
            text = len(node.data) if isinstance(node, nodes.TemplateData) else 0
            parts = sum(self._sizes[part] for part in node.iter_child_nodes())
            self._sizes[node] = 25 + text + parts

    def _steps(self, body: list[nodes.Node]) -> int:
        """Returns the most steps of one run of a body, without repeats of its loops."""
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
