"""A digest of the programs that a result depends on; renaming does not change it.

For Python files the digest covers what is executed: it ignores comments, docstrings, annotations,
imports and the words of messages, and replaces every name that the files define by its number in
the statement. Library names are kept, since exp is not log. So results stay fresh when code is
renamed or formatted, when functions are moved or reordered, or when `a, b = 1, 2` becomes two
statements. Splitting a function in two makes them stale, though it computes the same. For recipes
and lists of requirements it covers what is read: values, or lines without comments. For other files
it covers their bytes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

# Fields of Python's syntax tree that do not affect what runs, or that only some versions of Python
# have.
_LEFT_OUT = {
    "annotation",
    "returns",
    "type_comment",
    "type_params",
    "type_ignores",
    "kind",
    "ctx",
    "simple",
}


def fingerprint(pattern: str, root: Path) -> str:
    """Returns the digest of the programs in the files below `root` that match a glob pattern."""
    paths = sorted(
        path for path in root.glob(pattern) if path.is_file() and "__pycache__" not in path.parts
    )
    return digest(tuple((path.relative_to(root).as_posix(), path.read_bytes()) for path in paths))


@functools.cache
def digest(files: tuple[tuple[str, bytes], ...]) -> str:
    """Returns the digest (16 hex digits) of (path, content) pairs, cached."""
    others, trees = [], []
    for path, content in files:
        if path.endswith(".py"):
            trees.append(_Separated().visit(ast.parse(content)))
        else:
            others.append(f"{path} {hashlib.sha256(_without_comments(path, content)).hexdigest()}")
    defined = set(itertools.chain.from_iterable(_defined(tree) for tree in trees))
    programs = [_text(statement, defined, {}) for tree in trees for statement in _statements(tree)]
    return hashlib.sha256("\n".join([*sorted(others), *sorted(programs)]).encode()).hexdigest()[:16]


def _without_comments(path: str, content: bytes) -> bytes:
    """Returns the values of a recipe, the lines of a list of requirements, or any other content."""
    if path.endswith(".yaml"):
        return json.dumps([*yaml.safe_load_all(content)], sort_keys=True, default=str).encode()
    if path.endswith(".txt"):
        lines = (re.sub(rb"(^|\s)#.*", b"", line).strip() for line in content.splitlines())
        return b"\n".join(filter(None, lines))
    return content


class _Separated(ast.NodeTransformer):
    """Makes a statement of each assignment in `a, b = 1, 2`, unless a value reads an earlier
    target."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | list[ast.stmt]:
        if not (isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)):
            return node
        targets, values, assigned = node.targets[0].elts, node.value.elts, set[str]()
        for target, value in itertools.zip_longest(targets, values):
            if not isinstance(target, ast.Name) or value is None or assigned & _names(value):
                return node
            assigned.add(target.id)
        return [ast.Assign([target], value) for target, value in zip(targets, values, strict=True)]


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields a module's executed statements, without imports and bare strings."""
    for statement in tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom) and not _is_string(statement):
            yield statement


def _is_string(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yields a module's defined names: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _text(node: object, defined: set[str], numbers: dict[str, int]) -> str:
    """Returns a syntax tree as text in which each defined name is its number in `numbers`."""
    if isinstance(node, list):
        return (
            "["
            + ",".join(_text(item, defined, numbers) for item in node if not _is_string(item))
            + "]"
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "message" if " " in node.value else repr(node.value)
    if isinstance(node, ast.JoinedStr):
        words = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
        if " " in "".join(words):
            return "message"
    if isinstance(node, ast.AST):
        fields = [
            _text(value, defined, numbers)
            for name, value in ast.iter_fields(node)
            if name not in _LEFT_OUT and value is not None and value != []
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, str) and node in defined:
        return f"#{numbers.setdefault(node, len(numbers))}"
    return repr(node)
