"""The files of a source: those of a folder that hold records, and those that are passed over."""

import os
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import fsspec

from data import cards, hub
from data.errors import UserError
from data.folders import is_unfinished
from data.paths import File, expanded, is_remote, open_file_system
from data.printable import printable
from data.untrusted_files import (
    MAX_JSON_BYTES,
    check_within,
    file_within,
    parse_json,
    refuse_pointer,
)

# Caches that the library datasets keeps in a data folder, such as a filtered copy of the data.
_CACHE_OF_DATASETS = re.compile(r"cache-[0-9a-f]{16}(?:_\d+_of_\d+)?\.arrow")
_STATE = "state.json"  # of a folder by save_to_disk; lists its shards
# Warnings about a Hugging Face data set.
NOT_LISTED = (
    "read from the cache, which may lack some of its files: the hub's list of them is not there; a "
    "start with access to the hub gets it, and the files"
)
PARTIAL = (
    "the hub's conversion has only a part of this data set (in folders `partial-...`); its own "
    "files would be the whole"
)
# Usual companions of data, which nobody expects to be read.
_ABOUT_DATA = re.compile(
    r"(?:readme|licen[cs]e|copying|notice|changelog|citation|_success)(?:\.\w+)?", re.IGNORECASE
)


class SourceFiles(NamedTuple):
    """What the path of a source stands for."""

    files: list[File]
    """The files to read, sorted; or the one at the path, which may not exist."""
    unread: Sequence[str] = ()
    """Files that are passed over and may hold records, sorted, as their names below the folder.

    These have another suffix, or one of these and a hidden name; of a Hugging Face data set those
    that its repository has besides. Files about the data, such as README, are not among them.
    """
    where: str = "in this folder"
    """Which files were looked at, for a message that none can be read."""
    notes: Sequence[str] = ()
    """Warnings about the configurations of a data set, and shards of an earlier one."""


class _Tree(NamedTuple):
    """Files below a folder of a file system."""

    folder: str
    names: list[str]
    """Their paths in the file system, sorted."""
    is_pattern: bool = False
    """Whether only those below what a pattern matches."""

    @property
    def where(self) -> str:
        """See SourceFiles.where."""
        return "that this pattern stands for" if self.is_pattern else "in this folder"

    def below(self, name: str) -> str:
        """Returns the path of a file below the folder."""
        return name.removeprefix(self.folder).lstrip("/")


def find(
    path: str | Path, suffixes: Sequence[str], left_out: Sequence[str | Path] = ()
) -> SourceFiles:
    """Returns the file at `path`, or all files of a tree with one of the suffixes.

    If nothing has the name in the last part of a path, this may be a pattern of files and folders.
    For a Hugging Face data set, the files are in the local cache, without those about the data set.
    If a card lists configurations that have files, only those of the default or only one are read.
    None is hidden, from a folder in `left_out`, or a folder of prepared data or a run.

    Raises:
      UserError: there are several configurations and no default one, a pattern in another part, or
        a file that Git LFS has not fetched.
    """
    hub.refuse_page(path)
    of_hub = hub.is_hub_dataset(path)
    local, listed = _downloaded(str(path), suffixes) if of_hub else (path, [])
    with open_file_system(local) as (file_system, inner_path):
        tree = _tree(file_system, local, inner_path)
        if tree is None:
            if not is_remote(local):
                refuse_pointer(inner_path)
            return SourceFiles([File(str(local))])
        if hub.is_converted(path):
            listed = cards.of_folders({tree.below(name).rpartition("/")[0] for name in tree.names})
        elif not of_hub and not tree.is_pattern:
            listed = _listed(file_system, local, tree)
        alone = cards.read_alone(str(path), listed or [])
        names, unread = _sorted_out(tree, suffixes, of_hub)
        notes = [cards.UNKNOWN] if listed is None else []
        if alone and listed:
            note = cards.note(str(path), alone, listed, [*map(tree.below, names)])
            notes = [note] if note else []
            names = [name for name in names if alone.has(tree.below(name))]
        if of_hub:
            others, warnings = _others_on_hub(str(path), Path(local), tree, names)
            notes += warnings
            unread = [] if alone else others
        if not is_remote(local):
            for name in names:
                check_within(tree.folder, name)
                refuse_pointer(name)
        if left_over := _left_over(file_system, names):
            notes.append(_earlier_shards([*map(tree.below, left_over)]))
            names = sorted({*names} - {*left_over})
        files = _files_of(file_system, local, names)
        passed_over = dict(zip(_files_of(file_system, local, unread), unread, strict=True))
    top = None if is_remote(local) else Path(tree.folder)
    return SourceFiles(
        _without_folders(files, top, left_out),
        [tree.below(passed_over[file]) for file in _without_folders(passed_over, top, left_out)],
        f"of its configuration {alone.name}" if alone else tree.where,
        notes,
    )


def _left_over(file_system: fsspec.AbstractFileSystem, names: Sequence[str]) -> list[str]:
    """Returns shards that `datasets.save_to_disk` wrote and a later one, into the same folder, left
    there: those beside a state.json that lists others."""
    shards: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".arrow"):
            shards.setdefault(name.rpartition("/")[0], []).append(name)
    left_over, all_names = list[str](), {*names}
    for folder, beside in shards.items():
        if (state := f"{folder}/{_STATE}") in all_names:
            listed = {f"{folder}/{name}" for name in _listed_shards(file_system, state)}
            if listed and listed <= {*beside}:
                left_over += [name for name in beside if name not in listed]
    return left_over


def _listed_shards(file_system: fsspec.AbstractFileSystem, state: str) -> list[str]:
    """Returns the shards that a state.json lists; none if it is something else."""
    with file_system.open(state, "rb") as file:
        content = file.read(MAX_JSON_BYTES)
    try:
        return [str(entry["filename"]) for entry in parse_json(content)["_data_files"]]
    except (ValueError, TypeError, KeyError):
        return []


def _earlier_shards(names: Sequence[str]) -> str:
    """Returns a warning about shards that are not read, see `_left_over`."""
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return (
        f"not read: {printable(names[0])}{more}, which {_STATE} does not list: left there by an "
        "earlier save_to_disk"
    )


def _downloaded(
    path: str, suffixes: Sequence[str]
) -> tuple[Path, list[cards.Configuration] | None]:
    """Downloads what is read of a data set on the hub, unless it is in the cache.

    Returns:
      Its path in the cache, and the configurations that the card of a whole data set lists; None if
      the card cannot be read.

    Raises:
      UserError: there are several configurations and no default one; or as `hub.local_path`.
    """
    listed = hub.configurations(path) if hub.is_whole(path) else []
    if hub.is_converted(path):  # refused before it is downloaded
        cards.read_alone(path, hub.converted_configurations(path, suffixes))
    alone = cards.read_alone(path, listed or [])
    return hub.local_path(path, suffixes, alone.patterns if alone else ()), listed


def _others_on_hub(
    path: str, local: Path, tree: _Tree, names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns the files that may hold records and that a Hugging Face data set has besides those to
    read, whether they are in the cache or not, and warnings about what may be missing.

    Args:
      path: of the data set, or of a part of it.
      local: its path in the cache.
      tree: its files in the cache.
      names: those to read.
    """
    listed, read, start = hub.listed_files(path, local), {*names}, f"{tree.folder.rstrip('/')}/"
    others = [
        name
        for name in sorted(listed or ())
        if name.startswith(start)
        and (not tree.is_pattern or fnmatchcase(tree.below(name).split("/")[0], local.name))
        and name not in read
        and not any(part.startswith(".") for part in tree.below(name).split("/"))
        and PurePosixPath(name).name not in hub.NOT_RECORDS
        and not _ABOUT_DATA.fullmatch(PurePosixPath(name).name)
    ]
    is_partial = hub.is_of_conversion(path) and any(
        "/partial-" in f"/{tree.below(name)}" for name in names
    )
    return others, [NOT_LISTED] * (listed is None) + [PARTIAL] * is_partial


def _tree(
    file_system: fsspec.AbstractFileSystem, path: str | Path, inner_path: str
) -> _Tree | None:
    """Returns the files below a folder, or those that a pattern stands for; None for a path that is
    neither.

    Args:
      path: with the store's prefix.
      inner_path: within the file system.

    Raises:
      UserError: another part than the last one is a pattern.
    """
    if file_system.isdir(inner_path):
        return _Tree(inner_path, sorted(file_system.find(inner_path)))
    folder, _, last = inner_path.rpartition("/")
    is_listed = not str(path).startswith(("http://", "https://"))  # where ? begins a query
    if is_listed and cards.is_pattern(folder) and not file_system.isdir(folder):
        raise UserError(
            f"{path}: no such file or folder, and only the last part of a path may be a pattern; a "
            "folder, in which all files are read, or a source for each one, would work"
        )
    if not (is_listed and cards.is_pattern(last)) or file_system.exists(inner_path):
        return None
    names: set[str] = set()
    for entry in file_system.ls(folder, detail=True) if file_system.isdir(folder) else ():
        name = entry["name"].rstrip("/")
        # Some stores list the folder itself too.
        if name != folder and fnmatchcase(name.rpartition("/")[2], last):
            names |= {name} if entry["type"] == "file" else {*file_system.find(name)}
    file_system.invalidate_cache(folder)  # files that come later, such as a run's, are seen
    return _Tree(folder, sorted(names), is_pattern=True)


def _listed(
    file_system: fsspec.AbstractFileSystem, path: str | Path, tree: _Tree
) -> list[cards.Configuration] | None:
    """Returns the configurations that the card in a folder lists and whose files are there; None if
    it cannot be read, such as a link out of the folder."""
    name = f"{tree.folder.rstrip('/')}/{cards.NAME}"
    if name not in tree.names:
        return []
    try:
        if not (is_remote(path) or file_within(tree.folder, cards.NAME)):
            return None
    except UserError:
        return None
    with file_system.open(name, "rb") as file:
        listed = cards.configurations(file.read(cards.MAX_BYTES + 1))
    return listed and cards.with_files(listed, [*map(tree.below, tree.names)])


def _sorted_out(tree: _Tree, suffixes: Sequence[str], of_hub: bool) -> tuple[list[str], list[str]]:
    """Returns which files of a tree hold records and which are in SourceFiles.unread.

    Args:
      suffixes: those of files to read.
      of_hub: whether they are in the cache of a Hugging Face data set.
    """
    not_records = hub.NOT_RECORDS if of_hub else ()
    names, unread = [], []
    for name in tree.names:
        is_hidden = any(part.startswith(".") for part in tree.below(name).split("/"))
        if _is_of_records(name, suffixes, not_records):
            if is_hidden:  # such as .ipynb_checkpoints; the library datasets leaves these out too
                unread.append(name)
            else:
                names.append(name)
        elif not is_hidden and _may_hold_records(name, suffixes):
            unread.append(name)
    return names, unread


def _may_hold_records(name: str, suffixes: Sequence[str]) -> bool:
    """Returns whether a file with another suffix may nevertheless be expected to be read."""
    return File(name).suffix not in suffixes and not _ABOUT_DATA.fullmatch(PurePosixPath(name).name)


def _is_of_records(name: str, suffixes: Sequence[str], not_records: Sequence[str]) -> bool:
    """Returns whether a file has the name of one with records."""
    last = PurePosixPath(name).name
    return (
        File(name).suffix in suffixes
        and last not in not_records
        and not _CACHE_OF_DATASETS.fullmatch(last)
    )


def _files_of(
    file_system: fsspec.AbstractFileSystem, path: str | Path, names: Sequence[str]
) -> list[File]:
    """Returns the files of these names in a file system, with the store's prefix if it is one."""
    return [File(file_system.unstrip_protocol(name) if is_remote(path) else name) for name in names]


def _without_folders(
    files: Collection[File], top: Path | None, left_out: Sequence[str | Path]
) -> list[File]:
    """Returns the files outside of the folders `left_out` and of folders that we wrote.

    Args:
      top: the local folder that they are in, if it is one; it may itself be one that we wrote.
      left_out: folders, local or in a store.
    """
    folders = [_whole_path(folder) for folder in left_out]
    ours = {
        folder: _is_ours(folder)
        for folder in {parent for file in files for parent in _folders_between(top, file)}
    }
    return [
        file
        for file in files
        if not any(ours[parent] for parent in _folders_between(top, file))
        and not any(_whole_path(file.path).startswith(f"{folder}/") for folder in folders)
    ]


def _whole_path(path: str | Path) -> str:
    """Returns a canonical path, equal for two names of the same file or folder."""
    return str(path).rstrip("/") if is_remote(path) else os.path.realpath(expanded(path))


def _folders_between(top: Path | None, file: File) -> list[Path]:
    """Returns the local folders between a folder and a file in it."""
    if top is None:
        return []
    return [
        parent for parent in Path(file.path).parents if parent.is_relative_to(top) and parent != top
    ]


def _is_ours(folder: Path) -> bool:
    """Returns whether a folder is of prepared data, complete or unfinished, or a run's."""
    if (folder / "lock").exists() and (is_unfinished(folder) or (folder / "config.yaml").exists()):
        return True
    return all((folder / name).exists() for name in ("documents", "index.npz", "report.json"))
