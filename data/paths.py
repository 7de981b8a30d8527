"""Files and folders, local or in a store (gs://, s3://, hf://, ... through fsspec)."""

import errno
import io
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from data.compression import ENDINGS, decompressed
from data.errors import TransientError, UserError, first_line, is_refusal, is_transient
from data.folders import building
from data.printable import printable

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
# What a store says about a file that changes with every change of its content.
_VERSIONS = dict.fromkeys(("gs", "gcs"), "generation")
_VERSIONS |= dict.fromkeys(("s3", "s3a"), "ETag") | dict.fromkeys(("az", "abfs", "abfss"), "etag")
_STORE = re.compile(rf"({'|'.join(STORES)}):/", re.IGNORECASE)


def is_remote(path: str | Path) -> bool:
    """Returns whether the path is in a remote store."""
    return "://" in str(path)


def on_this_machine(path: str | Path) -> Path:
    """Returns a path that must be local or mounted, with the home folder for a leading ~.

    Raises:
      UserError: as `refuse_store` and `expanded`.
    """
    refuse_store(path)
    return expanded(path)


def refuse_store(path: str | Path) -> None:
    """Raises UserError if a path names a store, such as gs:// or s3://.

    Otherwise gs://bucket/folder would be written to as a local folder named `gs:`.
    """
    # pathlib has made one slash of two.
    if match := _STORE.match(str(path)):
        raise UserError(
            f"{path}: {match[1]}:// is not supported here; a local path, or the bucket's mount "
            "point, would work"
        )


def expanded(path: str | Path) -> Path:
    """Returns a local path with the home folder for a leading ~ or ~USER.

    Raises:
      UserError: that folder is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0].removeprefix("~")
        found = f"there is no user {user} here" if user else "HOME is not set"
        raise UserError(
            f"{path}: {found}, so ~{user} is no folder; a full path would work"
        ) from None


def require_utf8(path: Path) -> None:
    """Raises UserError if a path is not UTF-8, the only names that libraries in C++ take.

    In Python's ASCII mode (PYTHONUTF8=0 under LC_ALL=C) that is each path with other letters.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{printable(str(path))}: is not UTF-8, which the formats of checkpoints and prepared "
            "data need; another path, or a link to this folder, would work"
        ) from None


@contextmanager
def open_file_system(path: str | Path) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """Yields the file system of a path and the path within it.

    Raises:
      UserError: an access to a remote store within the context fails; the stores' libraries raise
        their own types for missing credentials or an unreachable network.
    """
    # Not through url_to_fs, which would take :: for a chain of file systems.
    if not is_remote(path):
        yield fsspec.filesystem("file"), os.path.abspath(expanded(path))
        return
    protocol = str(path).split("://", 1)[0]
    # fsspec has others, such as github:// and data:, which are not stores.
    if protocol not in STORES:
        raise UserError(f"{path}: {protocol}:// is not a supported store; {', '.join(STORES)} are")
    with _named_errors(path):
        store = fsspec.get_filesystem_class(protocol)  # not through url_to_fs, as above
        yield store(**store._get_kwargs_from_urls(str(path))), store._strip_protocol(str(path))


@contextmanager
def _named_errors(path: str | Path) -> Iterator[None]:
    """Makes an error of a store's library one line that begins with the path in the store."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # also for a missing gcsfs or s3fs, whose message says so
        of_a_store = (ConnectionError, TimeoutError)
        # s3fs gives its own errors numbers too, with botocore's error as their cause.
        is_numbered = getattr(error, "errno", None) is not None and error.__cause__ is None
        if is_numbered and not isinstance(error, of_a_store):
            raise  # of this machine's disk
        kind = TransientError if is_transient(error) else UserError
        raise kind(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Returns what a store's library says, or means: it may name only the URL of its request."""
    if is_refusal(error):
        return f"no permission ({first_line(error)}); an account that may use it would work"
    if isinstance(error, FileNotFoundError) and not is_transient(error):
        return "no such file"
    return first_line(error)


def is_file(file_system: fsspec.AbstractFileSystem, path: str) -> bool:
    """Returns whether a file exists.

    fsspec's isfile() would also return False when a store refuses or does not answer.
    """
    try:
        return file_system.info(path)["type"] == "file"
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_refusal(error) or is_transient(error):
            raise
        return False


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
        return self._asked(is_file)

    def size(self) -> int:
        """Returns the size in bytes."""
        return self._asked(lambda file_system, path: file_system.size(path))

    def version(self) -> str | None:
        """Returns what changes with the content of a file in a store; None if nothing does."""
        field = _VERSIONS.get(self.path.split("://", 1)[0])
        if field is None:
            return None
        version = self._asked(lambda file_system, path: file_system.info(path).get(field))
        return str(version) if version else None

    def open(self) -> BinaryIO:
        """Opens the file for reading bytes."""
        file = self._asked(lambda file_system, path: file_system.open(path, "rb"))
        return io.BufferedReader(_StoredFile(file, self.path)) if is_remote(self.path) else file

    def _asked(self, question: Callable[[fsspec.AbstractFileSystem, str], _Result]) -> _Result:
        """Returns a file system's answer about the file; asks a store again if that may help."""

        def ask() -> _Result:
            with open_file_system(self.path) as (file_system, path):
                return question(file_system, path)

        return retried(ask) if is_remote(self.path) else ask()

    @contextmanager
    def open_decompressed(self) -> Iterator[BinaryIO]:
        """Opens the file for reading bytes, decompressed if its name ends in one of ENDINGS.

        Raises:
          UserError: a compressed file is truncated, of another kind, or out of proportion.
        """
        with self.open() as file:
            yield decompressed(file, self.compression, str(self)) if self.compression else file


class _StoredFile(io.RawIOBase):
    """An open file in a store; errors while it is read name it."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def readinto(self, buffer: Any) -> int:
        with _named_errors(self._path):
            return cast(Any, self._file).readinto(buffer)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def on_disk(file: File) -> Iterator[Path]:
    """Yields a local path of a file within the context; a file in a store is copied to the cache.

    An open or memory-mapped copy stays usable beyond the context.
    """
    if not is_remote(file.path):
        yield expanded(file.path)
        return
    folder = cache_folder("downloads")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as copy:  # unlinked: nothing is left of it
        with file.open() as opened:
            shutil.copyfileobj(opened, copy, COPIED_BYTES)
        copy.flush()
        yield Path(f"/dev/fd/{copy.fileno()}")


def cache_folder(name: str) -> Path:
    """Returns a folder for reproducible files, in $LONGSTRIPE_CACHE or ~/.cache/longstripe.

    Raises:
      UserError: $LONGSTRIPE_CACHE names a store, or there is neither it nor a home folder.
    """
    try:
        return on_this_machine(os.environ.get("LONGSTRIPE_CACHE") or "~/.cache/longstripe") / name
    except UserError as error:
        raise UserError(f"LONGSTRIPE_CACHE, the folder of caches: {error}") from None


def local_folder(path: str | Path) -> Path:
    """Returns the local folder for prepared data: `path`, or one in the cache for a store.

    array_record reads local files only.

    Raises:
      UserError: as `require_utf8`.
    """
    folder = cache_folder("prepared") if is_remote(path) else expanded(path)
    require_utf8(folder.absolute())
    return folder


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
    with open_file_system(remote) as (file_system, path):
        if not is_file(file_system, f"{path}/{last}"):
            return []
        return [str(PurePosixPath(name).relative_to(path)) for name in file_system.find(path)]


def upload_missing(local: Path, remote: str, last: str) -> None:
    """Uploads a folder as `upload` does, unless the store has its file `last`: it may lack a folder
    that this machine has, after a failed upload or in another bucket."""
    if not File(f"{remote}/{last}").exists():
        upload(local, remote, last)


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
        with open_file_system(target) as (file_system, path):
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
        with open_file_system(source) as (file_system, path):
            file_system.get_file(path, str(local))

    retried(get)


def remove_tree(path: str | Path) -> None:
    """Removes a local folder or one in a store, if it exists."""

    def remove() -> None:
        with open_file_system(path) as (file_system, name), suppress(FileNotFoundError):
            file_system.rm(name, recursive=True)

    retried(remove)
