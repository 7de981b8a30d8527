"""Allows one training run at a time in a bucket folder, by a file that its holder rewrites every
few seconds.

A store has no locks that end with their holder. Others watch the file: if it changes, the holder
lives; if it does not for LEASE_SECONDS, by the watcher's clock, the holder is gone. Every write is
conditional on no write since, so of two that take the lease at once one gets it, and a holder that
was cut off too long finds that it has lost it, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from data.errors import TransientError, UserError
from data.printable import printable
from trainer.run.bucket import Bucket, Version
from trainer.run.cluster import end_now

LOCK = "lock"
LEASE_SECONDS = 60.0
BEAT_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_WAIT_OR_STOP = "wait for its end, stop it, or give another --run_dir"


class _Seen(NamedTuple):
    """The time since which this process has seen the lease unchanged."""

    mark: bytes
    since: float


_seen: dict[str, _Seen] = {}  # by the folder's address


class Lease:
    """The lease of a folder, from `take` to `release`."""

    def __init__(self, bucket: Bucket, on_loss: Callable[[str], object] | None = None) -> None:
        """Does not take it yet.

        Args:
          on_loss: called by a thread, with a message, when another has or may have the lease; by
            default all processes end.
        """
        self._bucket, self._on_loss = bucket, on_loss or end_now
        self._token = secrets.token_hex(8)
        self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._beats = 0
        self._mark = b""
        self._renewed = 0.0
        self._writing = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def take(self) -> None:
        """Takes the lease, from a holder that is gone after LEASE_SECONDS.

        Raises:
          TransientError: another process holds it.
        """
        watching = False
        while True:
            found = self._bucket.version(LOCK)
            seen = _seen.get(self._bucket.url)
            if found.content and (seen is None or seen.mark != found.mark):
                if watching:
                    raise TransientError(f"{_holder(self._bucket, found)}; {_WAIT_OR_STOP}")
                seen = _seen[self._bucket.url] = _Seen(found.mark, time.monotonic())
            if not found.content or (seen and time.monotonic() - seen.since > LEASE_SECONDS):
                if self._write(found.mark):
                    self._thread.start()
                    return
                continue
            if not watching:
                print(f"{_holder(self._bucket, found)}; waiting for its end", file=sys.stderr)
            watching = True
            time.sleep(_LOOK_SECONDS)

    def require(self) -> None:
        """Checks that this process still has the lease; call it before writing what two must not
        write.

        Raises:
          TransientError: another process has taken it, or the store does not answer.
        """
        if not self._write():
            raise TransientError(f"{self._bucket.url}: another process has taken the lock")

    def release(self) -> None:
        """Releases the lease, if this process still has it."""
        self._released.set()
        with self._writing, contextlib.suppress(UserError):
            # Not deleted, since S3 has no conditional delete: an empty file means free.
            self._bucket.write(LOCK, b"", self._mark)

    def _write(self, mark: bytes | None = None) -> bool:
        """Writes the lease on condition of `mark` (default: the last write's); returns whether it
        is ours now."""
        with self._writing:
            mark = self._mark if mark is None else mark
            self._beats += 1
            process = f"process {os.getpid()} on {socket.gethostname()}"
            holder = f"{process} is training there since {self._since}"
            text = json.dumps({"holder": holder, "token": self._token, "beat": self._beats})
            content, begun = text.encode(), time.monotonic()
            while not (written := self._bucket.write(LOCK, content, mark, LEASE_SECONDS / 3)):
                # Perhaps after a write of ours whose answer was lost, this one or an earlier one.
                found = self._bucket.version(LOCK, LEASE_SECONDS / 3)
                if self._token.encode() not in (found.content or b""):
                    return False
                mark = found.mark
                if found.content == content:
                    written = mark
                    break
            self._mark, self._renewed = written, begun
            return True

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            try:
                if not self._write() and not self._released.is_set():
                    self._on_loss(f"{self._bucket.url}: another process has taken the lock")
                    return
            except UserError as error:
                if time.monotonic() - self._renewed > LEASE_SECONDS - BEAT_SECONDS:
                    self._on_loss(
                        f"{error}; the lock could not be renewed, and another may take it"
                    )
                    return


@contextlib.contextmanager
def leased(bucket: Bucket) -> Iterator[Lease]:
    """Holds the lease of a folder; errors as in `Lease.take`."""
    lease = Lease(bucket)
    lease.take()
    try:
        yield lease
    finally:
        lease.release()


def require_unused(bucket: Bucket) -> None:
    """Returns if nobody renews the folder's lease for one beat, which shortens the wait of
    `Lease.take`; errors as there."""
    first = bucket.version(LOCK)
    begun = time.monotonic()
    while first.content and time.monotonic() < begun + BEAT_SECONDS + 2 * _LOOK_SECONDS:
        time.sleep(_LOOK_SECONDS)
        found = bucket.version(LOCK)
        if not found.content:
            return
        if found.mark != first.mark:
            raise TransientError(f"{_holder(bucket, found)}; {_WAIT_OR_STOP}")
    _seen[bucket.url] = _Seen(first.mark, begun)


def _holder(bucket: Bucket, found: Version) -> str:
    """Returns which process wrote the lease."""
    try:
        holder = json.loads(found.content or b"")["holder"]
    except (ValueError, KeyError, TypeError):
        holder = "another process is training there"
    return f"{bucket.url}: {printable(str(holder))}"
