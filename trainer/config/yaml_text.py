"""YAML that a user writes, read strictly: PyYAML keeps the last of two equal keys, and what the first one said is lost."""

from typing import Any

import yaml

from data.errors import UserError

_MERGE = "tag:yaml.org,2002:merge"  # of `<<`, which loses nothing where it is written twice


class InvalidYAML(UserError):
    """The text is no YAML."""


class _DuplicateKey(Exception):
    def __init__(self, key: str, first: int, second: int):
        super().__init__(key, first, second)
        self.key, self.first, self.second = key, first, second


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that holds a key twice."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise _DuplicateKey(key.value, lines[name], line)
            lines[name] = line
        return node


def parse(text: str, where: str) -> Any:
    """The value of a YAML (or JSON) document.

    UserError, beginning with `where`, for a key that is written twice; InvalidYAML for what is no YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except _DuplicateKey as twice:
        lines = f"lines {twice.first} and {twice.second}" if twice.first != twice.second else f"line {twice.first}"
        place = f", on {lines}" if "\n" in text else ""
        raise UserError(f"{where}: {twice.key} is written twice{place}; keep one of the two") from None
    except RecursionError:
        raise UserError(f"{where}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-45
        raise InvalidYAML(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
