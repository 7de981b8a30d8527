"""Allows one training run at a time in a folder, by a lock that ends with its process, however that
ends."""

import contextlib
import fcntl
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from data.errors import TransientError

# A network file system keeps a dead host's lock for a while (NFSv4 for 90 seconds). A preempted run
# that continues on another host waits that long.
LEASE_SECONDS = 120
_without_locks: set[str] = set()  # lock files for which `_warn_without_locks` has warned


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock file `path`, which names its process and stays when that is gone.

    Raises:
      TransientError: another process holds it, as in `require_free`.
    """
    with open(path, "a+", encoding="utf-8") as file:
        _lock(file)
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        file.write(
            f"process {os.getpid()} on {socket.gethostname()} is training there since {since}"
        )
        file.flush()
        yield


def require_free(path: pathlib.Path) -> None:
    """Raises TransientError, naming the holder, if a process holds the lock file `path`. A holder
    on another host gets time to end."""
    if path.exists():
        with open(path, "a+", encoding="utf-8") as file:
            _lock(file)


def _lock(file: TextIO) -> None:
    """Locks the open file until it is closed, waiting for a holder on another host."""
    deadline = None
    while not _try_lock(file):
        file.seek(0)
        folder = pathlib.Path(file.name).parent
        holder = file.read() or "another process is training there"
        if f" on {socket.gethostname()} " in holder:
            raise TransientError(
                f"{folder}: {holder}; wait for its end, stop it, or give another --run_dir"
            )
        if deadline is None:
            deadline = time.monotonic() + LEASE_SECONDS
            print(f"{folder}: {holder}; waiting for its end", file=sys.stderr)
        if time.monotonic() > deadline:
            raise TransientError(
                f"{folder}: {holder}; stop it, or delete {file.name} if that host is gone"
            )
        time.sleep(1)


def _try_lock(file: TextIO) -> bool:
    """Whether this process now holds the lock, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # stores mounted as folders and some Lustre have no locks
        _warn_without_locks(file, error)
    return True


def _warn_without_locks(file: TextIO, error: OSError) -> None:
    """Says once that two trainings of a folder would not notice each other."""
    if file.name in _without_locks:
        return
    _without_locks.add(file.name)
    file.seek(0)
    last = file.read()
    print(
        f"warning: {pathlib.Path(file.name).parent}: has no file locks ({error.strerror}), so a "
        "second start there is not refused" + (f"; its lock file says: {last}" if last else ""),
        file=sys.stderr,
    )
