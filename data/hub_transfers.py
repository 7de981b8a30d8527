"""Transfers from the Hugging Face hub by its own library, which trusts the hub: here they are
bounded, end with Ctrl-C, and cannot write outside the cache."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from data.errors import UserError
from data.untrusted_files import MAX_JSON_BYTES

T = TypeVar("T")
ABANDONED_SECONDS = 3600
# Seconds that the hub may be silent, where its library would wait without end.
_LONGEST_WAITS = {"connect": 10, "read": 30}


class BadAnswer(Exception):
    """An answer from the hub that its library would act on, but must not."""


def bounded_snapshot(name: str, writes: bool, **options: Any) -> Any:
    """Calls snapshot_download, but distrusts the hub: it can neither write outside the cache, nor
    fill memory or disk, nor leave a file that does not match its announced digest.

    Args:
      writes: whether it may write to the cache: neither offline nor in a dry run.

    Raises:
      UserError: a file does not match its digest, or this user may not write to the cache.
      BadAnswer: an answer is refused.
    """
    from huggingface_hub import constants, snapshot_download

    from data.download_checks import checked, remove_damaged  # only downloads need it

    check_answers()
    repository = in_cache(name, options.get("repo_type", "model"))
    remove_damaged(repository)
    with cache_errors(), checked(repository) if writes else contextlib.nullcontext():
        return _interruptible(
            lambda: snapshot_download(
                name,
                # Once imported, the library has HF_ENDPOINT as a constant.
                endpoint=constants.ENDPOINT,
                tqdm_class=_bounded_bar(),
                **options,
            )
        )


@contextlib.contextmanager
def cache_errors() -> Iterator[None]:
    """Translates errors of a cache that this user may not write, as in a container whose user has
    no home folder, into a UserError."""
    from huggingface_hub import constants

    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise UserError(
            f"{constants.HF_HUB_CACHE}: the hub's cache cannot be written ({error.strerror}); "
            "HF_HOME=FOLDER with another folder would work"
        ) from None


def in_cache(name: str, kind: str) -> Path:
    """Returns a repository's folder in the cache; it may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"


def check_answers() -> None:
    """Makes the hub's library call `_limit_waits` and `_check_answer`."""
    from huggingface_hub import get_session

    hooks = get_session().event_hooks
    if _check_answer not in hooks["response"]:
        get_session().event_hooks = {
            "request": [*hooks["request"], _limit_waits],
            "response": [*hooks["response"], _check_answer],
        }


def _limit_waits(request: Any) -> None:
    """Limits the waits for the hub that its library leaves unlimited, see _LONGEST_WAITS.

    Args:
      request: from the HTTP library that the hub's library uses.
    """
    waits = request.extensions.setdefault("timeout", {})
    waits.update({kind: most for kind, most in _LONGEST_WAITS.items() if waits.get(kind) is None})


def _check_answer(response: Any) -> None:
    """Refuses an answer whose ETag is a path out of the cache, and limits the size of answers about
    a repository.

    The hub's library names the file that it writes by the ETag, wherever that leads.

    Args:
      response: from the HTTP library that the hub's library uses.
    """
    for header in ("X-Linked-ETag", "ETag"):
        tag = response.headers.get(header)
        name = tag and tag.lstrip("W/").strip('"')
        if name and not os.path.normpath(os.path.join("blobs", name)).startswith("blobs/"):
            raise BadAnswer(f"its {header} leads out of the cache: {tag}")
    if response.request.url.path.startswith("/api/"):
        response.iter_bytes = functools.partial(_bounded, response.iter_bytes)


def _bounded(parts: Callable[..., Iterator[bytes]], *arguments: Any) -> Iterator[bytes]:
    """Yields the decompressed parts of an answer that will be read into memory, up to a limit."""
    received = 0
    for part in parts(*arguments):
        received += len(part)
        if received > MAX_JSON_BYTES:
            raise BadAnswer(f"an answer of more than {MAX_JSON_BYTES:,} bytes")
        yield part


@functools.cache
def _bounded_bar() -> type:
    """Returns a progress bar for the hub's library that stops a download larger than announced."""
    from huggingface_hub.utils import tqdm

    class BoundedBar(tqdm):
        """Counts bytes itself, because a hidden bar counts nothing."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.received = 0.0
            self.is_bytes = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            """As in tqdm; raises BadAnswer."""
            self.received += n or 0
            if self.is_bytes and self.received > (self.total or 0):
                raise BadAnswer(f"more than the {self.total or 0:,} bytes announced")
            return super().update(n)

    return BoundedBar


def _interruptible(download: Callable[[], T]) -> T:
    """Returns what `download` returns; Ctrl-C interrupts it immediately.

    The hub's library downloads in threads and joins them even after Ctrl-C, which takes hours if a
    large file is being downloaded. Here they end with the process. Partial files are removed, since
    the library never reads them again.
    """
    import concurrent.futures  # here, since it takes a tenth of the time to import train.py

    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(download())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="download", daemon=True).start()
    try:
        # Some libraries make system calls resume after a signal, so wait with a timeout.
        while not concurrent.futures.wait([outcome], timeout=0.2).done:
            pass
        return outcome.result()
    except KeyboardInterrupt:
        for descriptor in Path("/proc/self/fd").glob("*"):  # none without Linux
            with contextlib.suppress(OSError):
                if (path := descriptor.readlink()).suffix == ".incomplete":
                    path.unlink()
        raise


def remove_abandoned(blobs: Path) -> None:
    """Removes partial files to which no process has written for an hour: it was killed, and the
    hub's library never reads them again."""
    for part in blobs.glob("*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > ABANDONED_SECONDS:
                part.unlink()
