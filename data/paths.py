"""Files and folders, local or in a store (gs://, s3://, hf://, ... through fsspec)."""

import errno
import hashlib
import json
import lzma
import os
import re
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

import fsspec

from data import hub
from data.compression import ENDINGS, decompressed
from data.errors import UserError, first_line, is_transient
from data.folders import building, is_unfinished
from data.within import check_within

STORES = (
    "gs",
    "gcs",
    "s3",
    "s3a",
    "hf",
    "az",
    "abfs",
    "abfss",
    "adl",
    "oss",
    "oci",
    "hdfs",
    "webhdfs",
    "sftp",
    "http",
    "https",
    "file",
    "memory",
)

_Result = TypeVar("_Result")
_ATTEMPTS, _FIRST_WAIT = 7, 0.1  # between accesses to a store; seconds, doubled each time
COPIED_BYTES = 1 << 22  # at a time
LARGE_BYTES = 1 << 24
"""Digests of files of at least this size are cached."""
_SETTLED_SECONDS = 2.0  # resolution of file system times
# Caches that the library datasets keeps in a data folder, such as a filtered copy of the data.
_CACHE_OF_DATASETS = re.compile(r"cache-[0-9a-f]{16}(?:_\d+_of_\d+)?\.arrow")
# Usual companions of data, which nobody expects to be read.
_ABOUT_DATA = re.compile(
    r"(?:readme|licen[cs]e|copying|notice|changelog|citation|_success)(?:\.\w+)?", re.IGNORECASE
)
_STORE = re.compile(rf"({'|'.join(STORES)}):/", re.IGNORECASE)


def is_remote(path: str | Path) -> bool:
    """Returns whether the path is in a remote store."""
    return "://" in str(path)


def on_this_machine(path: str | Path) -> Path:
    """Returns a path that must be local or mounted.

    Without this, gs://bucket/folder would be written to as a local folder named `gs:`.

    Raises:
      UserError: it names a store, such as gs:// or s3://.
    """
    # pathlib has made one slash of two.
    if match := _STORE.match(str(path)):
        raise UserError(
            f"{path}: {match[1]}:// is not supported here; a local path, or the bucket's mount "
            "point, would work"
        )
    return Path(path)


@contextmanager
def _open_file_system(path: str | Path) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """Yields the file system of a path and the path within it.

    Raises:
      UserError: an access to a remote store within the context fails; the stores' libraries raise
        their own types for missing credentials or an unreachable network.
    """
    # Not through url_to_fs, which would take :: for a chain of file systems.
    if not is_remote(path):
        yield fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(path))
        return
    protocol = str(path).split("://", 1)[0]
    # fsspec has others, such as github:// and data:, which are not stores.
    if protocol not in STORES:
        raise UserError(f"{path}: {protocol}:// is not a supported store; {', '.join(STORES)} are")
    try:
        store = fsspec.get_filesystem_class(protocol)  # not through url_to_fs, as above
        yield store(**store._get_kwargs_from_urls(str(path))), store._strip_protocol(str(path))
    except (UserError, OSError):
        raise
    except (
        Exception
    ) as error:  # also for a missing gcsfs or s3fs, or an unknown protocol; the message says which
        raise UserError(f"{path}: {first_line(error)}") from error


@dataclass(frozen=True)
class File:
    """A file that may not exist; str() returns its path as the user wrote it."""

    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def suffix(self) -> str:
        """The suffix in lower case, such as .json; also for x.json.gz."""
        path = PurePosixPath(self.path.lower())
        return (path.with_suffix("") if self.compression else path).suffix

    @property
    def compression(self) -> str:
        """The name's ending in ENDINGS, or ""."""
        suffix = PurePosixPath(self.path.lower()).suffix
        return suffix if suffix in ENDINGS else ""

    def exists(self) -> bool:
        """Returns whether the file exists."""
        return self._asked(lambda file_system, path: file_system.isfile(path))

    def size(self) -> int:
        """Returns the size in bytes."""
        return self._asked(lambda file_system, path: file_system.size(path))

    def open(self) -> BinaryIO:
        """Opens the file for reading bytes."""
        return self._asked(lambda file_system, path: file_system.open(path, "rb"))

    def _asked(self, question: Callable[[fsspec.AbstractFileSystem, str], _Result]) -> _Result:
        """Returns a file system's answer about the file; asks a store again if that may help."""

        def ask() -> _Result:
            with _open_file_system(self.path) as (file_system, path):
                return question(file_system, path)

        return retried(ask) if is_remote(self.path) else ask()

    @contextmanager
    def open_decompressed(self) -> Iterator[BinaryIO]:
        """Opens the file for reading bytes, decompressed if its name ends in one of ENDINGS.

        Raises:
          UserError: a compressed file is truncated, of another kind, or out of proportion.
        """
        with self.open() as file:
            if not self.compression:
                yield file
                return
            try:
                yield decompressed(file, self.compression, str(self))
            except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
                raise UserError(
                    f"{self}: cannot be decompressed ({first_line(error)}); a whole "
                    f"{self.compression} file would work"
                ) from None


@contextmanager
def on_disk(file: File) -> Iterator[Path]:
    """Yields a local path of a file within the context; a file in a store is copied to the cache.

    An open or memory-mapped copy stays usable beyond the context.
    """
    if not is_remote(file.path):
        yield Path(file.path).expanduser()
        return
    folder = cache_folder("downloads")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as copy:  # unlinked: nothing is left of it
        with file.open() as opened:
            shutil.copyfileobj(opened, copy, COPIED_BYTES)
        copy.flush()
        yield Path(f"/dev/fd/{copy.fileno()}")


def find_files(
    path: str | Path, suffixes: Sequence[str], left_out: Sequence[str | Path] = ()
) -> list[File]:
    """Returns the file at `path`, or all files of a tree with one of the suffixes, sorted.

    For a Hugging Face data set, these are files in the local cache, without those about the data
    set. None is hidden, from a folder in `left_out`, or a folder of prepared data or a run.
    """
    path, not_records = _local_dataset(path, suffixes)
    with _open_file_system(path) as (file_system, inner_path):
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
    with _open_file_system(path) as (file_system, inner_path):
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


def cache_folder(name: str) -> Path:
    """Returns a folder for reproducible files, in $LONGSTRIPE_CACHE or ~/.cache/longstripe.

    Raises:
      UserError: $LONGSTRIPE_CACHE names a store.
    """
    folder = os.environ.get("LONGSTRIPE_CACHE") or "~/.cache/longstripe"
    return on_this_machine(folder).expanduser() / name


def file_digest(path: str | Path) -> str:
    """Returns the SHA-256 of a file's contents, in hexadecimal.

    A large file's digest is cached locally, and reused while the file, its size and times are the
    same. `os.utime` can set one of the times, but not the time of change. The digest of a
    just-changed file is not cached: the same clock tick may hold another change.
    """
    path = Path(path).resolve()
    status = path.stat()
    known = {
        "path": str(path),
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }
    kept = cache_folder("digests") / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
    try:
        record = json.loads(kept.read_text(encoding="utf-8"))
        if known.items() <= record.items():
            return record["sha256"]
    except (OSError, ValueError, KeyError, AttributeError):  # none, or one that was cut off
        pass
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if status.st_size >= LARGE_BYTES and time.time() - status.st_ctime > _SETTLED_SECONDS:
        with suppress(OSError):  # such as a cache that cannot be written to
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=kept.parent, delete=False, encoding="utf-8"
            ) as scratch:
                json.dump(known | {"sha256": sha256}, scratch)
            os.replace(scratch.name, kept)
    return sha256


def local_folder(path: str | Path) -> Path:
    """Returns the local folder for prepared data: `path`, or one in the cache for a store.

    array_record reads local files only.
    """
    if not is_remote(path):
        return Path(path).expanduser()
    return cache_folder("prepared")


def download(
    remote: str,
    local: Path,
    last: str,
    is_whole: Callable[[Path], bool],
    left_out: str | None = None,
) -> None:
    """Downloads a complete folder from a store; `local` appears complete, or not at all.

    Args:
      remote: the folder in the store.
      local: the folder to create.
      last: the file that `upload` writes last; does nothing if the store lacks it.
      is_whole: whether an existing folder can be used; see `building`.
      left_out: files with this in their names are not downloaded.
    """
    names = retried(lambda: _names_in(remote, last))
    if not names:
        return
    with building(local, is_whole) as scratch:
        for name in names:
            if left_out is None or left_out not in name:
                target = scratch / name
                target.parent.mkdir(parents=True, exist_ok=True)
                get_file(f"{remote}/{name}", target)


def _names_in(remote: str, last: str) -> list[str]:
    """Returns the files of a folder in a store; none if it lacks the one named `last`."""
    with _open_file_system(remote) as (file_system, path):
        if not file_system.isfile(f"{path}/{last}"):
            return []
        return [str(PurePosixPath(name).relative_to(path)) for name in file_system.find(path)]


def upload(local: Path, remote: str, last: str) -> None:
    """Uploads a folder's files to a store, the file named `last` after all others."""
    names = sorted(
        (file.relative_to(local).as_posix() for file in local.rglob("*") if file.is_file()),
        key=lambda name: name == last,
    )
    for name in names:
        put_file(local / name, f"{remote}/{name}")


def retried(action: Callable[[], _Result]) -> _Result:
    """Returns the result of an access to a store, retried if that may help."""
    for attempt in range(_ATTEMPTS):
        try:
            return action()
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or not is_transient(error) or attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_FIRST_WAIT * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def put_file(local: Path, target: str) -> None:
    """Copies a file to a local folder or a store, where it appears complete."""

    def put() -> None:
        with _open_file_system(target) as (file_system, path):
            file_system.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            if is_remote(target):
                file_system.put_file(str(local), path)
                return
            scratch = f"{path}.{secrets.token_hex(4)}"
            try:
                shutil.copyfile(local, scratch)
                os.replace(scratch, path)
            except BaseException:  # such as a full disk, which would stay full
                Path(scratch).unlink(missing_ok=True)
                raise

    retried(put)


def get_file(source: str, local: Path) -> None:
    """Copies a local or stored file to `local`."""

    def get() -> None:
        with _open_file_system(source) as (file_system, path):
            file_system.get_file(path, str(local))

    retried(get)


def remove_tree(path: str | Path) -> None:
    """Removes a local folder or one in a store, if it exists."""

    def remove() -> None:
        with _open_file_system(path) as (file_system, name):
            if file_system.exists(name):
                file_system.rm(name, recursive=True)

    retried(remove)
