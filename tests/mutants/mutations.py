"""Faults at one place of a Python file, like plausible typing mistakes."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# Nodes that affect only messages.
_MESSAGES = (ast.Raise, ast.Assert, ast.JoinedStr)
_PRINTING = {"print", "warn", "say", "require", "UserError"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a file.

    Attributes:
      line: line of the file.
      what: the fault in words, such as `Sub for Add`.
      node: number of the broken node in the syntax tree.
    """

    line: int
    what: str
    node: int


def faults(source: str) -> list[Fault]:
    """Returns every possible fault at one place of a Python file, in the file's order."""
    tree = _numbered(source)
    return sorted(
        (Fault(node.lineno, what, node.number) for node, what in _breakable(tree)),
        key=lambda fault: (fault.line, fault.what, fault.node),
    )


def broken(source: str, fault: Fault) -> str:
    """Returns the file with the fault in it."""
    tree = _numbered(source)
    _break(next(node for node in ast.walk(tree) if node.number == fault.node), fault.what)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _numbered(source: str) -> Any:
    """Returns the syntax tree with numbered nodes."""
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        node.number = number  # type: ignore[attr-defined]
    return tree


def _breakable(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    """Yields each node that can be broken, and how."""
    for node in _code(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield (
                node,
                f"{COMPARISONS[type(node.ops[0])].__name__} for {type(node.ops[0]).__name__}",
            )
        elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
            yield node, f"{OPERATORS[type(node.op)].__name__} for {type(node.op).__name__}"
        elif isinstance(node, ast.BoolOp):
            yield node, "Or for And" if isinstance(node.op, ast.And) else "And for Or"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node, f"no {type(node.op).__name__}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, f"{not node.value} for {node.value}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, f"{node.value + 1} for {node.value}"
        elif isinstance(node, ast.If | ast.IfExp):
            yield node, "never true"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "left out"


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of code that runs: no messages, annotations, decorators or docstrings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _MESSAGES) or _prints(child):
                continue
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                yield child
                yield from _code(child)


def _prints(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    ) in _PRINTING


def _break(node: ast.AST, what: str) -> None:
    """Puts the fault into a node, in place."""
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()
        if what == "no Not":  # `not not x`: bool(x) without a name that could be shadowed
            node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Constant):
        node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.Constant(False)
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
