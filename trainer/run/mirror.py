"""The small files of a run in a bucket: kept locally during training, and copied to the bucket as
they change.

Logs, NAME.jsonl, are kept there as parts, NAME.jsonl/SERIES-OFFSET, each with the lines from that
byte on, since objects cannot be appended to. The first part of a series is the whole log at that
time and supersedes earlier series: a start that truncates a log, or finds many parts, begins
another series. All other files are copied whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.errors import TransientError, UserError
from trainer.run.bucket import Bucket
from trainer.run.logs import LOG, logs_and_others

PUSH_SECONDS = 30.0  # between copies; there is also one before each checkpoint and at the end
MOST_PARTS = 100  # of a log, from which the next start merges them
# Not mirrored: checkpoints, profiles and the lock, written to the bucket directly; and earlier
# stages, which are separate runs.
_APART = ("checkpoints/", "profile/", "stages/", "lock")


@dataclass
class _Log:
    """A log in the bucket: its newest series, that series' bytes and digest, and the parts."""

    series: int = 0
    size: int = 0
    digest: bytes = hashlib.sha256().digest()
    parts: tuple[str, ...] = ()


class Mirror:
    """A run's small files, in a local folder and in a bucket."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.bucket, self.folder = bucket, folder
        self._logs: dict[str, _Log] = {}
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of each other file
        self._writing = threading.Lock()

    def pull(self, only: str = "") -> None:
        """Replaces the local folder, or one of its files, with the bucket's."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._logs, self._copied = {}, {}
        files = self.bucket.read_all(only, _APART)
        logs, others = logs_and_others(files)
        for name, content in others.items():
            _write(self.folder / name, content)
            self._copied[name] = _state(self.folder / name)
        for name, (series, content) in logs.items():
            _write(self.folder / name, content)
            parts = tuple(part for part in files if part.startswith(f"{name}/"))
            self._logs[name] = _Log(series, len(content), _digest(content), parts)

    def push(self) -> None:
        """Copies to the bucket everything that changed since the last call.

        Raises:
          TransientError: the run's own files have been removed from the local folder.
        """
        with self._writing:
            files = {
                path.relative_to(self.folder).as_posix(): path
                for path in sorted(self.folder.rglob("*"))
                if path.is_file() and path.suffix != ".tmp"
            }
            for name in sorted({*self._copied, *self._logs} - set(files)):
                if "/" not in name:  # only folders, such as assets, are written anew
                    raise TransientError(
                        f"{self.folder / name}: was removed while the run in {self.bucket.url} "
                        "writes it there; the same command resumes"
                    )
            for name, path in files.items():
                if name.endswith(LOG):
                    self._push_log(name, path)
                    continue
                with contextlib.suppress(FileNotFoundError):  # a board's temporary file
                    if self._copied.get(name) != (state := _state(path)):
                        self.bucket.write(name, path.read_bytes())
                        self._copied[name] = state
            for name in set(self._copied) - set(files):
                self.bucket.write(name, None)
                del self._copied[name]

    def _push_log(self, name: str, path: Path) -> None:
        """Writes the lines since the last push as a part, or the whole log as a new series."""
        log, content = self._logs.get(name, _Log()), path.read_bytes()
        series, start, parts = log.series, log.size, log.parts
        if _digest(content[:start]) != log.digest or len(parts) > MOST_PARTS:
            series, start, parts = series + 1, 0, ()
        if start < len(content) or series > log.series:
            part = f"{name}/{series:06}-{start:015}"
            self.bucket.write(part, content[start:])
            parts += (part,)
        for old in set(log.parts) - set(parts):
            self.bucket.write(old, None)
        self._logs[name] = _Log(series, len(content), _digest(content), parts)


@contextlib.contextmanager
def mirrored(mirror: Mirror) -> Iterator[None]:
    """Pushes every PUSH_SECONDS within the context, and at its end. The next push makes up for a
    failed one."""
    ended = threading.Event()

    def push() -> None:
        while not ended.wait(PUSH_SECONDS):
            with contextlib.suppress(UserError):
                mirror.push()

    thread = threading.Thread(target=push, name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        mirror.push()
        shutil.rmtree(mirror.folder, ignore_errors=True)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
