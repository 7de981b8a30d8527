"""The configurations that the card of a data set, a README.md as on the hub, lists.

Each has some of the files; `datasets.load_dataset` reads one of them.
"""

import functools
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml

from data.errors import UserError
from data.printable import printable

NAME = "README.md"
MAX_BYTES = 4 << 20
UNKNOWN = "its card cannot be read, so all its files are, whatever configurations it has"
_FIELDS = re.compile(r"---\r?\n(.*?)\r?\n---(?:\r?\n|\Z)", re.DOTALL)
_MOST_NAMED = 5  # configurations in a message
_DEFAULT = "default"


class Configuration(NamedTuple):
    """Files of a data set that belong together."""

    name: str
    patterns: tuple[str, ...]
    """Of its files' paths below the data set, those of the training split first."""
    is_default: bool

    def has(self, path: str) -> bool:
        """Returns whether a file, by its path below the data set, belongs to the configuration."""
        return any(matches(path, pattern) for pattern in self.patterns)


def is_pattern(text: str) -> bool:
    """Returns whether a part of a path may stand for several files."""
    return re.search(r"[*?[]", text) is not None


def matches(path: str, pattern: str) -> bool:
    """Returns whether a path matches a pattern as in `datasets`: `**` stands for any folders."""
    if not path.startswith(_literal_start(pattern)):
        return False  # quickly: some data sets have thousands of configurations and of files
    parts = pattern.split("/")

    def with_later(places: set[int]) -> set[int]:
        """Adds the place after each `**`, which may stand for no folder."""
        for place, part in enumerate(parts):
            if place in places and part == "**":
                places.add(place + 1)
        return places

    places = with_later({0})  # how many of the pattern's parts may have been matched
    for name in path.split("/"):
        stays = {place for place in places if parts[place : place + 1] == ["**"]}
        goes = {
            place + 1 for place in places if place < len(parts) and fnmatchcase(name, parts[place])
        }
        places = with_later(stays | goes)
    return len(parts) in places


@functools.lru_cache(maxsize=1 << 16)
def _literal_start(pattern: str) -> str:
    return re.split(r"[*?[]", pattern, maxsplit=1)[0]


def has_fields(text: str) -> bool:
    """Returns whether a text begins with fields in YAML, as a card does."""
    return _FIELDS.match(text) is not None


def configurations(content: bytes) -> list[Configuration] | None:
    """Returns the configurations that a README.md lists; None if it begins like a card and cannot
    be read, or the only one is of files elsewhere. Its first MAX_BYTES + 1 bytes are enough."""
    match = _FIELDS.match(content.decode("utf-8", "replace"))
    if match is None:
        return [] if len(content) <= MAX_BYTES else None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        entries = (yaml.load(match[1], loader) or {}).get("configs") or []
        listed = [_configuration(entry) for entry in entries]
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_elsewhere = len(listed) == 1 and any(":/" in pattern for pattern in listed[0].patterns)
    return None if is_elsewhere else listed


def _configuration(entry: dict[str, Any]) -> Configuration:
    """Returns one of a card's `configs`.

    Raises:
      ValueError, TypeError, KeyError, AttributeError: it has another form.
    """
    files, folder = entry.get("data_files"), entry.get("data_dir")
    if files is None:
        files = "**"
    entries: list[Any] = files if isinstance(files, list) else [files]
    if isinstance(files, dict):
        entries = [{"split": split, "path": path} for split, path in files.items()]
    entries = [each if isinstance(each, dict) else {"path": each} for each in entries]
    entries.sort(key=lambda each: each.get("split", "train") != "train")
    paths = [each["path"] for each in entries]
    flat = [path for each in paths for path in (each if isinstance(each, list) else [each])]
    patterns = tuple(str(PurePosixPath(folder or "", path)) for path in flat)
    name = entry["config_name"]
    if not isinstance(name, str | int | float):
        raise ValueError("no name")
    return Configuration(str(name), patterns, name == _DEFAULT or entry.get("default") is True)


def of_folders(folders: Collection[str]) -> list[Configuration]:
    """Returns a configuration for each of the outermost folders among these, as the hub's
    conversion to Parquet has them."""
    names = sorted({folder.split("/")[0] for folder in folders if folder})
    return [Configuration(name, (f"{name}/**",), name == _DEFAULT) for name in names]


def with_files(listed: Sequence[Configuration], paths: Collection[str]) -> list[Configuration]:
    """Returns the configurations that have one of the files, as a partial copy may lack others."""
    return [each for each in listed if any(map(each.has, paths))]


def read_alone(path: str, listed: Sequence[Configuration]) -> Configuration | None:
    """Returns the only or default one of a data set's configurations; None if it lists none.

    Args:
      path: of the whole data set, for messages.
      listed: its configurations.

    Raises:
      UserError: none of several is the default one, or more than one is.
    """
    if not listed:
        return None
    defaults = [each for each in listed if each.is_default or len(listed) == 1]
    if len(defaults) == 1:
        return defaults[0]
    raise UserError(
        f"{path}: has {len(listed)} configurations, and "
        f"{f'{len(defaults)} of them are' if defaults else 'none of them is'} the default one; the "
        f"path of one would work: {_named(path, listed, listed)}"
    )


def note(
    path: str, alone: Configuration, listed: Sequence[Configuration], files: Sequence[str]
) -> str | None:
    """Returns what a report says if one of a data set's configurations is read; None if that is
    everything.

    Args:
      path: of the whole data set.
      listed: all configurations.
      files: the data set's files with records, by their paths below it.
    """
    others = [each for each in listed if each is not alone]
    unlisted = [
        file
        for file in files
        if file != NAME and not any(each.has(file) for each in (alone, *others))
    ]
    more = f" and {len(unlisted) - 1:,} more" if len(unlisted) > 1 else ""
    if not others:
        start = f"reads its only configuration `{printable(alone.name)}`; not read: "
        return f"{start}{printable(unlisted[0])}{more}" if unlisted else None
    return (
        f"reads its default configuration `{printable(alone.name)}` alone; not read: "
        f"{_named(path, others, listed)}"
        + (f", nor {printable(unlisted[0])}{more} of no configuration" if unlisted else "")
    )


def _named(path: str, some: Sequence[Configuration], listed: Sequence[Configuration]) -> str:
    """Returns the paths of some of a data set's configurations, for a message."""
    named = [_path_of(path.rstrip("/"), each, listed) for each in some[:_MOST_NAMED]]
    more = f" and {len(some) - _MOST_NAMED:,} more" if len(some) > _MOST_NAMED else ""
    return printable(", ".join(named)) + more


def _path_of(path: str, one: Configuration, listed: Sequence[Configuration]) -> str:
    """Returns the path of a configuration: its folder, if it has one of its own, otherwise the
    pattern of its training split."""
    own, others = _folders(one), [_folders(each) for each in listed if each is not one]
    common = next(iter(own)) if len(own) == 1 else ""
    if common and not any(
        f"{folder}/".startswith(f"{common}/") for each in others for folder in each
    ):
        return f"{path}/{common}"
    first = one.patterns[0]
    if not is_pattern(str(PurePosixPath(first).parent)):
        return f"{path}/{first}"
    return f"{path} (the files of `{one.name}`)"


def _folders(one: Configuration) -> set[str]:
    """Returns the innermost folders without a pattern that hold the files of a configuration."""
    folders = set()
    for pattern in one.patterns:
        parts = PurePosixPath(pattern).parent.parts
        plain = next((n for n, part in enumerate(parts) if is_pattern(part)), len(parts))
        folders.add("/".join(parts[:plain]))
    return folders
