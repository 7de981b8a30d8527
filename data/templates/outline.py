"""Finds out whether a chat template only writes contents, or also looks at them.

The output of a template that only writes them depends only on the roles, so it has to run once for
conversations with the same roles: `data.templates.rendering` remembers the result. The check is an
allow-list: unknown constructs count as looking.
"""

from typing import Literal

from jinja2 import nodes

Kind = Literal["plain", "text", "turns"]
"""What an expression's value holds: no contents; text with contents in it; or one or more turns."""
_LOOP = ("first", "last", "index", "index0", "revindex", "revindex0", "length")
_FIELDS = ("role", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
_MARKS = (nodes.Template, nodes.If, nodes.Output, nodes.Scope, nodes.ExprStmt)


MAX_OUTLINED = 10_000  # characters of a template; longer ones count as looking at contents
_PASSES = 8  # a loop may read a variable set after it


class _LooksError(Exception):
    """The template may look at contents."""


def only_writes_contents(template: nodes.Template) -> bool:
    """Returns whether a template only writes contents, whole or trimmed."""
    names: dict[str, Kind] = {"messages": "turns"}
    try:
        for _ in range(_PASSES):
            before = dict(names)
            _statement(template, names)
            if names == before:
                return True
    except _LooksError:
        pass
    return False


def _statement(node: nodes.Node, names: dict[str, Kind]) -> None:
    """Checks a statement, and notes in `names` what variables hold."""
    if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
        _bind(node.target.name, _kind(node.node, names), names)
    elif isinstance(node, nodes.For) and isinstance(node.target, nodes.Name):
        kind = _kind(node.iter, names)
        _require(kind != "text")
        _bind(node.target.name, kind, names)
        for part in (*node.body, *node.else_):
            _statement(part, names)
        if node.test is not None:
            _require(_kind(node.test, names) == "plain")
    elif isinstance(node, nodes.Output):
        for part in node.nodes:
            _require(isinstance(part, nodes.TemplateData) or _kind(part, names) != "turns")
    else:
        _require(isinstance(node, (*_MARKS, nodes.Break, nodes.Continue)))
        for part in node.iter_child_nodes():
            if isinstance(part, nodes.Expr):
                _require(_kind(part, names) == "plain")
            else:
                _statement(part, names)


def _bind(name: str, kind: Kind, names: dict[str, Kind]) -> None:
    """Notes what a variable holds; it may be set in several places, to texts or turns."""
    known = names.get(name, kind)
    _require((known == "turns") == (kind == "turns"))
    names[name] = "text" if "text" in (known, kind) else kind


def _kind(node: nodes.Node, names: dict[str, Kind]) -> Kind:
    """Returns what an expression's value holds."""
    if isinstance(node, nodes.Name):
        _require(node.name != "loop")
        return names.get(node.name, "plain")
    if isinstance(node, nodes.Getattr | nodes.Getitem):
        return _kind_of_part(node, names)
    if _is_trimmed_content(node, names):
        return "text"
    if isinstance(node, nodes.Filter) and node.name == "length" and node.node is not None:
        _require(_kind(node.node, names) != "text" and not node.args)
        return "plain"
    if isinstance(node, nodes.CondExpr):
        _require(_kind(node.test, names) == "plain")
        return _joined([part for part in (node.expr1, node.expr2) if part is not None], names)
    if isinstance(node, nodes.Add | nodes.Concat):
        return _joined(list(node.iter_child_nodes()), names)
    # An operation, a test, a filter, a call: of values without contents.
    _require(isinstance(node, nodes.Expr | nodes.Operand | nodes.Pair | nodes.Keyword))
    _require(all(_kind(part, names) == "plain" for part in node.iter_child_nodes()))
    return "plain"


def _kind_of_part(node: nodes.Getattr | nodes.Getitem, names: dict[str, Kind]) -> Kind:
    """Returns what `value.name` or `value[index]` holds."""
    name = node.attr if isinstance(node, nodes.Getattr) else _constant(node.arg)
    if isinstance(node.node, nodes.Name) and node.node.name == "loop":
        _require(name in _LOOP)
        return "plain"
    kind = _kind(node.node, names)
    _require(kind != "text")
    if kind == "plain":
        if isinstance(node, nodes.Getitem):
            _require(_kind(node.arg, names) == "plain")
        return "plain"
    if isinstance(node, nodes.Getitem) and not isinstance(name, str):
        _require(_kind(node.arg, names) == "plain")
        _require(isinstance(node.arg, nodes.Slice) or isinstance(name, int))
        return "turns"
    _require(name == "content" or name in _FIELDS)
    return "text" if name == "content" else "plain"


def _constant(node: nodes.Node) -> object:
    """Returns the value of a constant, or signed number; None for anything else."""
    if isinstance(node, nodes.Neg):
        value = _constant(node.node)
        return -value if isinstance(value, int) else None
    return node.value if isinstance(node, nodes.Const) else None


def _is_trimmed_content(node: nodes.Node, names: dict[str, Kind]) -> bool:
    """Returns whether this is a turn's content without white space at its ends."""
    if not isinstance(node, nodes.Filter) or node.name != "trim":
        return False
    part = node.node
    return (
        not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        and isinstance(part, nodes.Getattr | nodes.Getitem)
        and _kind_of_part(part, names) == "text"
    )


def _joined(parts: list[nodes.Node], names: dict[str, Kind]) -> Kind:
    """Returns what a text of several parts holds."""
    kinds = {_kind(part, names) for part in parts}
    _require("turns" not in kinds)
    return "text" if "text" in kinds else "plain"


def _require(holds: bool) -> None:
    if not holds:
        raise _LooksError
