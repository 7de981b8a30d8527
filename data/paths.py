"""Files of this machine or of a store (gs://, s3://, hf://, ... by fsspec), read alike; folders of a store kept here too."""

import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import fsspec

from data.errors import UserError


def is_remote(path: str | Path) -> bool:
    """Whether the path names a store."""
    return "://" in str(path)


@contextmanager
def _system(path: str | Path) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """The file system and the path in it. What goes wrong in a store is a UserError: its libraries raise errors of their own
    for missing credentials or a network that is down."""
    if not is_remote(path):  # as it stands: fsspec would take :: for a chain of file systems
        yield fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(path))
        return
    try:
        yield fsspec.core.url_to_fs(str(path))
    except (UserError, OSError):
        raise
    except Exception as error:  # also: no gcsfs or s3fs, an unknown protocol; the message names it
        raise UserError(f"{path}: {(str(error) or type(error).__name__).splitlines()[0]}") from error


@dataclass(frozen=True)
class File:
    """A file that may or may not be there; str() is its path as the user wrote it."""

    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def suffix(self) -> str:
        """The name's end, in small letters, such as .json; also of x.json.gz."""
        return PurePosixPath(self.path.lower().removesuffix(".gz")).suffix

    def exists(self) -> bool:
        with _system(self.path) as (system, path):
            return system.isfile(path)

    def size(self) -> int:
        """Bytes."""
        with _system(self.path) as (system, path):
            return system.size(path)

    def open(self) -> BinaryIO:
        """For reading bytes."""
        with _system(self.path) as (system, path):
            return system.open(path, "rb")

    @contextmanager
    def unpacked(self) -> Iterator[BinaryIO]:
        """As open, a .gz file's contents instead of its bytes; UserError for a .gz that is cut off or none."""
        packed = self.path.lower().endswith(".gz")
        with self.open() as opened:
            try:
                yield gzip.GzipFile(fileobj=opened) if packed else opened
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UserError(f"{self}: cannot be unpacked ({error}); a whole .gz file would work") from None


def find(path: str | Path, suffixes: Sequence[str]) -> list[File]:
    """The file itself, or all files in the folder, and in those below it, whose name ends so; sorted by path."""
    with _system(path) as (system, inside):
        if not system.isdir(inside):
            return [File(str(path))]
        found = sorted(name for name in system.find(inside) if File(name).suffix in suffixes)
        return [File(system.unstrip_protocol(name) if is_remote(path) else name) for name in found]


def output_folder(path: str | Path) -> Path:
    """Makes the folder that a command will write its results to. Called before the work, which may take hours: UserError
    where it cannot be made or written to."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UserError(f"{path}: cannot be a folder for results ({error.strerror}); name another one") from None
    return Path(path)


def output_file(path: str | Path) -> Path:
    """As output_folder, of a file that will be written or overwritten: makes the folder that it goes to."""
    if Path(path).is_dir():
        raise UserError(f"{path}: is a folder; name a file, such as {path}/result.json")
    output_folder(Path(path).parent)
    return Path(path)


def new_folder(path: str | Path) -> Path:
    """As output_folder, of a folder that is made whole at the end: UserError if there is anything at `path` by now."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: exists and is not an empty folder; name another one or remove it")
    output_folder(path.parent)
    return path


def no_pattern(path: str | Path, field: str) -> Path:
    """The absolute path of a folder for checkpoints. UserError that names `field` where Orbax, which looks for what it wrote by
    a pattern that begins with this path, would not find it, or would find another folder's files too."""
    path = Path(path).expanduser().absolute()
    if characters := [character for character in "*?[\\" if character in str(path)]:
        raise UserError(f"{field}: {path} has {' and '.join(characters)} in it, and Orbax cannot save checkpoints in such a "
                        "path; one without *, ?, [ and backslash would work, such as that of a link to this folder")
    return path


def local_folder(path: str | Path) -> Path:
    """The folder itself, or, of a store's, the one in the cache that stands for it: array_record reads local files only."""
    if not is_remote(path):
        return Path(path).expanduser()
    root = Path(os.environ.get("LONGSTRIPE_CACHE") or Path.home() / ".cache" / "longstripe")
    return root / "prepared"


def download(remote: str, local: Path, last: str) -> None:
    """Brings a store's folder here, whole or not at all, if it has the file `last`, which was put there last."""
    with _system(remote) as (system, path):
        if not system.isfile(f"{path}/{last}"):
            return
        local.parent.mkdir(parents=True, exist_ok=True)
        arriving = Path(tempfile.mkdtemp(prefix=f".{local.name}-", dir=local.parent))
        try:
            for name in system.find(path):
                target = arriving / PurePosixPath(name).relative_to(path)
                target.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(name, str(target))
            with suppress(OSError):  # another process was quicker
                os.rename(arriving, local)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)


def upload(local: Path, remote: str, last: str) -> None:
    """Puts a folder's files into a store, the file `last` when all others are there."""
    names = sorted((file.relative_to(local).as_posix() for file in local.rglob("*") if file.is_file()), key=lambda n: n == last)
    with _system(remote) as (system, path):
        for name in names:
            system.makedirs(f"{path}/{name}".rsplit("/", 1)[0], exist_ok=True)
            system.put_file(str(local / name), f"{path}/{name}")
