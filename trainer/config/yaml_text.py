"""Reads YAML strictly: PyYAML silently keeps only the last of two equal keys."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from data.errors import UserError

MAX_BYTES = 4 << 20  # of a file
MAX_VALUES = 100_000  # in a document, counting repeats by aliases
_MAX_DIGITS = 400  # of a number; the longest float has 309 before its point
_MAX_DEPTH = 100  # nesting of brackets and indents
_MERGE = "tag:yaml.org,2002:merge"  # the key `<<`; two in one mapping lose nothing


class InvalidYAML(UserError):
    """The text is not YAML."""


class _DuplicateKey(Exception):
    def __init__(self, key: str, first: int, second: int) -> None:
        super().__init__(key, first, second)
        self.key, self.first, self.second = key, first, second


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys and, early, deep nesting.

    PyYAML's time grows with the square of the depth.
    """

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level >= _MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(token)

    def add_indent(self, column: int) -> bool:
        if len(self.indents) >= _MAX_DEPTH:
            raise RecursionError
        return super().add_indent(column)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise _DuplicateKey(key.value, lines[name], line)
            lines[name] = line
        return node

    def construct_date(self, node: Any) -> str:
        """Returns a date as written: no field has the type date, and some hold one as text."""
        self.construct_yaml_timestamp(node)  # raises ValueError if it does not exist
        return str(node.value)

    def construct_short_int(self, node: Any) -> int:
        """Returns a whole number; refuses a long one, which would take minutes."""
        return self._short(node, self.construct_yaml_int)

    def construct_short_float(self, node: Any) -> float:
        """Returns a number; refuses a long one."""
        return self._short(node, self.construct_yaml_float)

    def _short(self, node: Any, construct: Callable[[Any], Any]) -> Any:
        if len(node.value) > _MAX_DIGITS:
            line = node.start_mark.line + 1
            raise ValueError(f"line {line} has a number of {len(node.value):,} characters")
        return construct(node)


# Without YAML 1.1's octal 010 and base-60 1:30, which nobody means by them: they are texts, as 1:30
# is in YAML 1.2, and so no numbers.
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)",
    "tag:yaml.org,2002:float": r"[-+]?(?:0|[1-9][0-9_]*)\.[0-9_]*(?:[eE][-+][0-9]+)?"
    r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile(f"^(?:{_NUMBERS[tag]})$") if tag in _NUMBERS else pattern)
        for tag, pattern in resolvers
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_date)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_short_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_short_float)


def _require_small(root: yaml.Node, source: str) -> None:
    """Raises UserError for recursive aliases, or expansions beyond MAX_VALUES values."""
    sizes: dict[yaml.Node, float] = {}  # number of values in a node; inf while counting

    def count(node: yaml.Node) -> float:
        if node not in sizes:
            sizes[node] = math.inf
            parts = (
                itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
            )
            sizes[node] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(map(count, parts)))
        return sizes[node]

    if (total := count(root)) > MAX_VALUES:
        found = (
            "an alias within its own anchor"
            if total == math.inf
            else f"aliases that stand for {total:,} values"
        )
        raise UserError(
            f"{source}: not a recipe: {found}; plain values, without aliases, would work"
        )


def parse(text: str, source: str) -> Any:
    """Returns the value of a YAML (or JSON) document.

    Args:
      source: the file or flag that holds the text, which begins an error.

    Raises:
      InvalidYAML: the text is not YAML.
      UserError: a key is written twice in one mapping, or the document is nested too deeply.
    """
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # a character that YAML excludes, such as a control character
        raise InvalidYAML(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _require_small(node, source)
        return loader.construct_document(node)
    except _DuplicateKey as duplicate:
        lines = (
            f"line {duplicate.first}"
            if duplicate.first == duplicate.second
            else f"lines {duplicate.first} and {duplicate.second}"
        )
        position = f", on {lines}" if "\n" in text else ""
        raise UserError(
            f"{source}: {duplicate.key} is written twice{position}; keep one of the two"
        ) from None
    except RecursionError:
        raise UserError(f"{source}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-45
        raise InvalidYAML(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()
