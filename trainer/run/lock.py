"""One training at a time in a run's folder: a lock that vanishes with the process that holds it, however that ends."""

import contextlib
import fcntl
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator

from data.errors import UserError

# A network file system keeps the lock of a host that is gone for so long (NFSv4 for 90 seconds): a run that was preempted
# and goes on elsewhere waits for it.
LEASE_SECONDS = 120


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock file `path`, which says by whom and stays when they are gone; UserError as require_free's."""
    with open(path, "a+", encoding="utf-8") as file:
        _take(file)
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        file.write(f"process {os.getpid()} on {socket.gethostname()} is training there since {since}")
        file.flush()
        yield


def require_free(path: pathlib.Path) -> None:
    """UserError that names who holds the lock file `path`; one on another host is given time to end."""
    if path.exists():
        with open(path, "a+", encoding="utf-8") as file:
            _take(file)


def _take(file) -> None:
    """Locks the open file until it is closed."""
    patience = None
    while not _taken(file):
        file.seek(0)
        folder, holder = pathlib.Path(file.name).parent, file.read() or "another process is training there"
        if f" on {socket.gethostname()} " in holder:
            raise UserError(f"{folder}: {holder}; wait for its end, stop it, or give another --run_dir")
        if patience is None:
            patience = time.monotonic() + LEASE_SECONDS
            print(f"{folder}: {holder}; waiting for its end", file=sys.stderr)
        if time.monotonic() > patience:
            raise UserError(f"{folder}: {holder}; stop it, or delete {file.name} where that host is gone")
        time.sleep(1)


def _taken(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks (stores mounted as folders, some Lustre): go on without
    return True
