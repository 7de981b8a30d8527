"""The files of a source: those of a folder that hold records, and those that are passed over."""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import fsspec

from data import hub
from data.folders import is_unfinished
from data.paths import File, is_remote, open_file_system
from data.within import check_within

# Caches that the library datasets keeps in a data folder, such as a filtered copy of the data.
_CACHE_OF_DATASETS = re.compile(r"cache-[0-9a-f]{16}(?:_\d+_of_\d+)?\.arrow")
# Usual companions of data, which nobody expects to be read.
_ABOUT_DATA = re.compile(
    r"(?:readme|licen[cs]e|copying|notice|changelog|citation|_success)(?:\.\w+)?", re.IGNORECASE
)


def find_files(
    path: str | Path, suffixes: Sequence[str], left_out: Sequence[str | Path] = ()
) -> list[File]:
    """Returns the file at `path`, or all files of a tree with one of the suffixes, sorted.

    For a Hugging Face data set, these are files in the local cache, without those about the data
    set. None is hidden, from a folder in `left_out`, or a folder of prepared data or a run.
    """
    path, not_records = _local_dataset(path, suffixes)
    with open_file_system(path) as (file_system, inner_path):
        if not file_system.isdir(inner_path):
            return [File(str(path))]
        names = sorted(
            name
            for name in file_system.find(inner_path)
            if _is_of_records(name, suffixes, not_records) and not _is_hidden(name, inner_path)
        )
        for name in () if is_remote(path) else names:
            check_within(inner_path, name)
        files = _files_of(file_system, path, names)
    return _without_folders(files, path, left_out)


def unread_files(
    path: str | Path, suffixes: Sequence[str], left_out: Sequence[str | Path] = ()
) -> list[str]:
    """Returns the files of a tree that `find_files` passes over and that may hold records, sorted,
    as their names below `path`.

    These have another suffix, or one of these and a hidden name. Files about the data, such as
    README, and others in the cache of a Hugging Face data set are not among them.
    """
    is_cached = hub.is_hub_dataset(path)
    path, not_records = _local_dataset(path, suffixes)
    with open_file_system(path) as (file_system, inner_path):
        if not file_system.isdir(inner_path):
            return []
        names = sorted(
            name
            for name in file_system.find(inner_path)
            if (
                _is_of_records(name, suffixes, not_records)
                if _is_hidden(name, inner_path)
                else File(name).suffix not in suffixes
                and not is_cached
                and not _ABOUT_DATA.fullmatch(PurePosixPath(name).name)
            )
        )
        files = _files_of(file_system, path, names)
        below = {file: _below(name, inner_path) for file, name in zip(files, names, strict=True)}
    return [below[file] for file in _without_folders(files, path, left_out)]


def _local_dataset(path: str | Path, suffixes: Sequence[str]) -> tuple[str | Path, Sequence[str]]:
    """Returns the local path of a Hugging Face data set and the names of files about it; of any
    other path, itself."""
    if hub.is_hub_dataset(path):
        return hub.local_path(str(path), suffixes), hub.NOT_RECORDS
    return path, ()


def _is_of_records(name: str, suffixes: Sequence[str], not_records: Sequence[str]) -> bool:
    """Returns whether a file has the name of one with records."""
    last = PurePosixPath(name).name
    return (
        File(name).suffix in suffixes
        and last not in not_records
        and not _CACHE_OF_DATASETS.fullmatch(last)
    )


def _below(name: str, folder: str) -> str:
    return name.removeprefix(folder).lstrip("/")


def _is_hidden(name: str, folder: str) -> bool:
    """Returns whether a part of the name below a folder begins with a dot, such as
    .ipynb_checkpoints; the library datasets leaves these out too."""
    return any(part.startswith(".") for part in _below(name, folder).split("/"))


def _files_of(
    file_system: fsspec.AbstractFileSystem, path: str | Path, names: Sequence[str]
) -> list[File]:
    """Returns the files of these names in a file system, with the store's prefix if it is one."""
    return [File(file_system.unstrip_protocol(name) if is_remote(path) else name) for name in names]


def _without_folders(
    files: Sequence[File], path: str | Path, left_out: Sequence[str | Path]
) -> list[File]:
    """Returns the files outside of the folders `left_out` and of folders that we wrote."""
    folders = [_whole_path(folder) for folder in left_out]
    ours = {
        folder: _is_ours(folder)
        for folder in {parent for file in files for parent in _folders_between(path, file)}
    }
    return [
        file
        for file in files
        if not any(ours[parent] for parent in _folders_between(path, file))
        and not any(_whole_path(file.path).startswith(f"{folder}/") for folder in folders)
    ]


def _whole_path(path: str | Path) -> str:
    """Returns a canonical path, equal for two names of the same file or folder."""
    return str(path).rstrip("/") if is_remote(path) else os.path.realpath(os.path.expanduser(path))


def _folders_between(path: str | Path, file: File) -> list[Path]:
    """Returns the local folders between `path` and a file in it."""
    if is_remote(path):
        return []
    top = Path(os.path.abspath(os.path.expanduser(path)))
    return [
        parent for parent in Path(file.path).parents if parent.is_relative_to(top) and parent != top
    ]


def _is_ours(folder: Path) -> bool:
    """Returns whether a folder is of prepared data, complete or unfinished, or a run's."""
    if (folder / "lock").exists() and (is_unfinished(folder) or (folder / "config.yaml").exists()):
        return True
    return all((folder / name).exists() for name in ("documents", "index.npz", "report.json"))
