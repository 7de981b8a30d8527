"""One training at a time in a run's folder: a lock that ends with the process that holds it,
however that process ends."""

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

# A network file system keeps the lock of a dead host for a while (NFSv4 for 90 seconds). A run that
# was preempted and goes on on another host waits for so long.
LEASE_SECONDS = 120


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock file `path`, which names the process that holds it and stays when that process
    is gone.

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
    """Raises TransientError, naming the holder, if a process holds the lock file `path`. One
    elsewhere gets time to end."""
    if path.exists():
        with open(path, "a+", encoding="utf-8") as file:
            _lock(file)


def _lock(file: TextIO) -> None:
    """Locks the open file until it is closed, waiting for a holder on another host."""
    deadline = None
    while not _try_lock(file):
        file.seek(0)
        folder, holder = (
            pathlib.Path(file.name).parent,
            file.read() or "another process is training there",
        )
        if f" on {socket.gethostname()} " in holder:
            raise TransientError(
                f"{folder}: {holder}; wait for its end, stop it, or give another --run_dir"
            )
        if deadline is None:
            deadline = time.monotonic() + LEASE_SECONDS
            print(f"{folder}: {holder}; waiting for its end", file=sys.stderr)
        if time.monotonic() > deadline:
            raise TransientError(
                f"{folder}: {holder}; stop it, or delete {file.name} where that host is gone"
            )
        time.sleep(1)


def _try_lock(file: TextIO) -> bool:
    """Whether the file is now locked by this process, or lies on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # stores mounted as folders and some Lustre have no locks: go on without
    return True
