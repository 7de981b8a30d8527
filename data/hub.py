"""Data sets and models of the Hugging Face hub, in the hub's own cache.

A data set is hf://datasets/OWNER/NAME[@REVISION][/FILE OR FOLDER].
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import glob
import os
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from data.errors import UserError, first_line
from data.printable import printable
from data.within import MAX_JSON_BYTES

T = TypeVar("T")
PREFIX = "hf://datasets/"
ABANDONED_SECONDS = 3600
WOULD_WORK = f"{PREFIX}OWNER/NAME[@REVISION][/FILE] would work"
NOT_RECORDS = (
    "README.md",
    "dataset_infos.json",
    "dataset_info.json",
)  # files of the hub about a data set
_OTHER_SPLIT = re.compile(
    r"(?<![a-z])(validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])", re.IGNORECASE
)


def is_hub_dataset(path: str | Path) -> bool:
    """Returns whether a path names a data set of the hub."""
    return str(path).startswith(PREFIX)


def local_path(path: str, suffixes: Sequence[str]) -> Path:
    """Downloads files of a data set that are not in the local cache; returns where they are there.

    Files of the hub about a data set, NOT_RECORDS, are downloaded only if the path names them.
    Without a network, what an earlier call has downloaded is used.

    Args:
      path: begins with PREFIX; a file, a folder or a whole data set.
      suffixes: of a folder or data set, the files with one of these endings are downloaded, also
        with .gz and the like behind.

    Raises:
      UserError: the path is malformed, or the hub has no such data set, file or revision for this
        user.
    """
    repository, revision, inner = _parts(path)

    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    escaped = glob.escape(inner)
    folder = f"{escaped}/" if inner else ""
    endings = [
        f"{folder}*{suffix}{packed}"
        for suffix in suffixes
        for packed in ("", ".gz", ".zst", ".bz2", ".xz")
    ]
    left_out = () if os.path.basename(inner) in NOT_RECORDS else NOT_RECORDS
    try:
        snapshot = Path(
            _download(
                repository,
                repo_type="dataset",
                revision=revision,
                allow_patterns=[escaped, *endings] if inner else endings,
                ignore_patterns=[*left_out, *(f"*/{name}" for name in left_out)],
            )
        )
    except HFValidationError as error:
        raise UserError(
            f"{path}: names no data set of the hub ({first_line(error)}); {WOULD_WORK}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{path}: {constants.ENDPOINT} shows no data set {repository}; another name, or `hf "
            "auth login` for one that is private, would work"
        ) from None
    except RevisionNotFoundError:
        raise UserError(
            f"{path}: the data set {repository} has no revision {revision}; another one would work"
        ) from None
    except UserError:
        raise
    except Exception as error:  # also what the hub's library makes of an answer that is no hub's
        raise UserError(
            printable(
                f"{path}: cannot be downloaded from {constants.ENDPOINT}, and is not in the cache "
                f"({first_line(error)}); a network, or a local file, would work"
            )
        ) from None
    local = snapshot / inner
    if not local.exists():
        raise UserError(
            f"{path}: the data set {repository} has no {inner or ' or '.join(suffixes) + ' file'}; "
            f"{WOULD_WORK}"
        )
    return local


def _parts(path: str) -> tuple[str, str | None, str]:
    """Returns the repository, the revision, and the file or folder (may be empty) of a path.

    Raises:
      UserError: the path names none.
    """
    revisions = r"refs/convert/\w+|refs/pr/\d+|[^/]+"  # the hub's own have slashes in them
    match = re.fullmatch(
        rf"([^/@]+/[^/@]+)(?:@({revisions}))?(?:/(.*?))?/*", path.removeprefix(PREFIX)
    )
    if not match:
        raise UserError(f"{path}: names no data set of the hub; {WOULD_WORK}")
    return match[1], match[2] and urllib.parse.unquote(match[2]), match[3] or ""


def other_splits(files: Sequence[str]) -> list[str]:
    """Returns files named as a split other than the training one, relative to their common folder.

    Args:
      files: paths of all files that are read.

    Returns:
      Those whose name or folder is `test`, `validation` or another such word; none if all are.
    """
    common = os.path.commonpath([os.path.dirname(file) for file in files])
    names = [os.path.relpath(file, common) for file in files]
    others = [name for name in names if _OTHER_SPLIT.search(name)]
    return others if len(others) < len(names) else []


def no_downloads() -> None:
    """Makes this process use what is in the hub's cache, as HF_HUB_OFFLINE=1 does."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "huggingface_hub.constants" in sys.modules:  # which has read the environment already
        vars(sys.modules["huggingface_hub.constants"])["HF_HUB_OFFLINE"] = True


def is_offline() -> bool:
    """Returns whether HF_HUB_OFFLINE forbids the network."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in (
        "1",
        "ON",
        "YES",
        "TRUE",
    )


def download_model(name: str, revision: str | None, files: Sequence[str], needed: str = "") -> Path:
    """Downloads missing files of a model, after saying their size; returns the folder in the cache.

    Of several processes of a machine one downloads and the others wait. Files that have arrived
    whole are not downloaded again.

    Args:
      files: patterns of the files' names.
      needed: what the name of one of them has to end with.

    Raises:
      UserError: the hub has no such model for this user, or cannot be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(**options: Any) -> Any:
        try:
            return _download(name, revision=revision, allow_patterns=list(files), **options)
        except DryRunError as error:
            raise error.__cause__ or error from None  # what the hub answered

    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    hub = constants.ENDPOINT
    try:
        with (cache / f".longstripe-{name.replace('/', '--')}.lock").open(
            "a", encoding="utf-8"
        ) as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_abandoned(_in_cache(name, "model") / "blobs")
            listed = fetch(dry_run=True)
            if needed and not any(file.filename.endswith(needed) for file in listed):
                raise UserError(
                    f"{name}: has no {needed.removeprefix('.')} on the hub; pickled weights can "
                    "run code when they are loaded and are refused, another name would work"
                )
            missing = [file for file in listed if file.will_download]
            if missing:
                # Some hubs tell the size of no file that is elsewhere.
                size = sum(file.file_size or 0 for file in missing)
                unknown = any(file.file_size is None for file in missing)
                print(
                    printable(
                        f"{name}: downloading {'at least ' if unknown else ''}{size:,} bytes "
                        f"in {len(missing)} file{'s' if len(missing) > 1 else ''} from {hub} to "
                        f"{cache}"
                    ),
                    file=sys.stderr,
                    flush=True,
                )
            return Path(fetch())
    except GatedRepoError:
        raise UserError(
            f"{name}: its owner has to grant access: ask for it at {hub}/{name}, then `hf auth "
            "login`"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name}: neither a folder nor a model that {hub} shows; another name, or for a "
            f"private model `hf auth login`, then `hf download {name}`, would work"
        ) from None
    except RevisionNotFoundError:
        raise UserError(
            f"{name}: has no revision {revision} at {hub}; another one would work"
        ) from None
    except UserError:
        raise
    except Exception as error:  # disk errors, and those of whichever HTTP library the hub uses
        raise _not_downloaded(name, hub, error) from None


class _BadAnswer(Exception):
    """A hub's answer that the hub's library would follow, and must not."""


def _download(name: str, **options: Any) -> Any:
    """Returns what snapshot_download returns; a hub can lie, but it writes no file outside the
    cache, fills neither memory nor disk, and no file stays that is not the one it has announced.

    Raises:
      UserError: the contents of a file are not those of its digest.
      _BadAnswer: an answer is refused.
    """
    from huggingface_hub import constants, get_session, snapshot_download

    from data.arrivals import checked, remove_damaged  # a start that downloads nothing has no use

    hooks = get_session().event_hooks
    if _check_answer not in hooks["response"]:
        get_session().event_hooks = {**hooks, "response": [*hooks["response"], _check_answer]}
    repository = _in_cache(name, options.get("repo_type", "model"))
    remove_damaged(repository)
    writes_nothing = options.get("dry_run") or is_offline()
    with contextlib.nullcontext() if writes_nothing else checked(repository):
        return _interruptible(
            lambda: snapshot_download(
                name,
                # Imported libraries know the hub's address as a constant, which HF_ENDPOINT sets.
                endpoint=constants.ENDPOINT,
                tqdm_class=_bounded_bar(),
                **options,
            )
        )


def cached_model(name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Returns the folder of a model in the cache, as the hub's library finds it there.

    What a killed download has left damaged is removed first.

    Raises:
      huggingface_hub.errors.LocalEntryNotFoundError, HFValidationError: it has none.
    """
    from huggingface_hub import snapshot_download

    from data.arrivals import remove_damaged

    remove_damaged(_in_cache(name, "model"))
    return Path(
        snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=list(files)
        )
    )


def _in_cache(name: str, kind: str) -> Path:
    """Returns a repository's folder in the cache, which may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"


def _check_answer(response: Any) -> None:
    """Refuses an answer of a hub whose marks are paths, and one about a repository without end.

    The hub's library names the file that it writes by the mark ETag, wherever that leads.

    Args:
      response: of the HTTP library that the hub's library uses.
    """
    for header in ("X-Linked-ETag", "ETag"):
        mark = response.headers.get(header)
        name = mark and mark.lstrip("W/").strip('"')
        if name and not os.path.normpath(os.path.join("blobs", name)).startswith("blobs/"):
            raise _BadAnswer(f"its {header} leads out of the cache: {mark}")
    if response.request.url.path.startswith("/api/"):
        response.iter_bytes = functools.partial(_bounded, response.iter_bytes)


def _bounded(parts: Callable[..., Iterator[bytes]], *arguments: Any) -> Iterator[bytes]:
    """Yields the parts of an answer, unpacked, which are read whole into memory."""
    arrived = 0
    for part in parts(*arguments):
        arrived += len(part)
        if arrived > MAX_JSON_BYTES:
            raise _BadAnswer(f"an answer of more than {MAX_JSON_BYTES:,} bytes")
        yield part


@functools.cache
def _bounded_bar() -> type:
    """Returns the bar of the hub's library, which ends a download of more bytes than announced."""
    from huggingface_hub.utils import tqdm

    class BoundedBar(tqdm):
        """Counts what arrives on its own, since a bar that is not shown counts nothing."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.arrived = 0.0
            self.is_bytes = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            """As tqdm; raises _BadAnswer."""
            self.arrived += n or 0
            if self.is_bytes and self.arrived > (self.total or 0):
                raise _BadAnswer(f"more than the {self.total or 0:,} bytes announced")
            return super().update(n)

    return BoundedBar


def _interruptible(download: Callable[[], T]) -> T:
    """Returns what `download` returns; Ctrl-C ends the wait for it at once.

    The hub's library downloads in threads, which it joins after Ctrl-C too: for hours, if a large
    file is on its way. Here they end with the process. The parts of files that it was writing are
    removed, since it never reads them again.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(download())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="download", daemon=True).start()
    try:
        # Some libraries let system calls go on after a signal, so that an endless wait would too.
        while not concurrent.futures.wait([outcome], timeout=0.2).done:
            pass
        return outcome.result()
    except KeyboardInterrupt:
        for descriptor in Path("/proc/self/fd").glob("*"):  # none without Linux
            with contextlib.suppress(OSError):
                if (path := descriptor.readlink()).suffix == ".incomplete":
                    path.unlink()
        raise


def _remove_abandoned(blobs: Path) -> None:
    """Removes parts of files to which no process has written for an hour: it was killed, and the
    hub's library never reads them again."""
    for part in blobs.glob("*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > ABANDONED_SECONDS:
                part.unlink()


def _not_downloaded(name: str, hub: str, error: Exception) -> UserError:
    return UserError(
        printable(
            f"{name}: neither a folder nor in the local Hugging Face cache, and not downloaded "
            f"from {hub} ({first_line(error)}); whole files that have arrived are kept, and the "
            f"same command or `hf download {name}` gets the rest"
        )
    )
