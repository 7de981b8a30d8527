"""Downloads of large files over HTTP that resume where they were interrupted."""

import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from data.errors import TRANSIENT_HTTP, TransientError, UserError
from data.folders import named_errors, sync

CHUNK = 1 << 20  # bytes
TIMEOUT = 60  # seconds without a byte
LONGEST_WAIT = 60  # seconds between two attempts
# More digits cannot be a size.
_SIZE = re.compile(r"\d{1,18}", re.ASCII)
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18})", re.ASCII)


class _Interrupted(Exception):
    """The connection or the server failed in a way that a later attempt may not."""


def download_file(
    url: str,
    path: Path,
    attempts: int = 8,
    first_wait: float = 1.0,
    on_progress: Callable[[int, int | None], object] = lambda done, size: None,
    on_failure: Callable[[str], object] = lambda message: None,
) -> None:
    """Downloads a file to `path`, which appears when complete.

    Received bytes are kept in `path`.part, with the server's mark of the file's version in
    `path`.part.json. A later call requests the rest. It starts over if the server does not send
    parts of files, or if the file has changed there.

    Args:
      url: http:// or https://; the proxies of the environment are used.
      attempts: consecutive failures without progress (a byte more than before) before giving up.
      first_wait: seconds before the second attempt; doubled after each further failure, up to a
        minute.
      on_progress: called with the bytes on disk and the file's size, or None if the server does not
        say.
      on_failure: called with a sentence before each further attempt.

    Raises:
      UserError: the file does not exist, or the server refuses it.
      TransientError: the server cannot be reached, or the disk is full.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url}: is not a file's address; one that begins with https:// would work")
    part = path.with_name(f"{path.name}.part")
    failures, most = 0, _size(part)
    while True:
        try:
            with named_errors(path.parent):
                _fetch(url, part, on_progress)
            break
        except _Interrupted as error:
            has = _size(part)
            failures, most = (1, has) if has > most else (failures + 1, most)
            if failures >= attempts:
                raise TransientError(
                    f"{url}: {error}, after {failures} attempts without progress; {has:,} bytes "
                    "are kept, and the same command resumes from there"
                ) from None
            wait = min(first_wait * 2 ** (failures - 1), LONGEST_WAIT)
            on_failure(f"{error}; the next attempt is in {wait:g} s")
            time.sleep(wait)
    sync(part)
    os.replace(part, path)
    _version_file(part).unlink(missing_ok=True)
    sync(path.parent)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _fetch(url: str, part: Path, on_progress: Callable[[int, int | None], object]) -> None:
    """Appends the rest of the file to `part`.

    Raises:
      _Interrupted: it did not arrive completely.
      UserError: the server refuses it.
    """
    has = _size(part)
    version = _read_version(part) if has else None
    headers = {"Accept-Encoding": "identity"}
    if version is not None:
        # If-Range: if the file has changed, the server sends everything, not the rest.
        headers |= {"Range": f"bytes={has}-", "If-Range": version}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT
        ) as response:
            start, size = _extent(response)
            if start not in (0, has):
                raise _Interrupted(
                    f"the server sent the file from byte {start:,} on, not from {has:,}"
                )
            _write_version(part, response)
            with part.open("r+b" if start else "wb") as file:
                file.truncate(start)
                file.seek(start)
                arrived = _copy(response, file, start, size, on_progress)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and has:
            match = _CONTENT_RANGE.fullmatch(error.headers.get("Content-Range", ""))
            # All bytes had arrived before the last interruption.
            if match and int(match.group(2)) == has:
                return
            part.unlink()
            raise _Interrupted("the file has become shorter on the server") from None
        if error.code in TRANSIENT_HTTP:
            raise _Interrupted(f"the server answered {error.code} {error.reason}") from None
        raise UserError(f"{url}: the server answered {error.code} {error.reason}") from None
    except http.client.InvalidURL as error:
        raise UserError(f"{url}: is not an address ({error})") from None
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        ConnectionError,
        TimeoutError,
        ssl.SSLError,
    ) as error:
        reason = getattr(error, "reason", None) or error
        raise _Interrupted(
            f"the connection failed ({str(reason) or type(reason).__name__})"
        ) from None
    if size is not None and arrived != size:
        raise _Interrupted(f"the connection ended after {arrived:,} of {size:,} bytes")


def _extent(response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """Returns the offset of a response's first byte, and the file's size if known."""
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None or match.group(1) is None:
            raise _Interrupted("the server sent a part of the file without saying which")
        return int(match.group(1)), int(match.group(2))
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if _SIZE.fullmatch(length) else None


def _copy(
    response: http.client.HTTPResponse,
    file: BinaryIO,
    start: int,
    size: int | None,
    on_progress: Callable[[int, int | None], object],
) -> int:
    """Writes the response to the file; returns the file's size; UserError beyond `size`."""
    arrived = start
    on_progress(arrived, size)
    # read1 returns what has arrived, so an interruption loses nothing.
    while chunk := response.read1(CHUNK):
        arrived += len(chunk)
        if size is not None and arrived > size:
            raise UserError(
                f"{response.url}: the server sends more than the {size:,} bytes of the file"
            )
        file.write(chunk)
        on_progress(arrived, size)
    return arrived


def _read_version(part: Path) -> str | None:
    """Returns the recorded version of the file that `part` begins; None if it cannot be resumed."""
    try:
        return str(json.loads(_version_file(part).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_version(part: Path, response: http.client.HTTPResponse) -> None:
    """Records the version before the first byte is written; a weak ETag is not a version."""
    tag = response.headers.get("ETag", "")
    version = tag if tag.startswith('"') else response.headers.get("Last-Modified")
    if version is None:
        _version_file(part).unlink(missing_ok=True)
    else:
        _version_file(part).write_text(json.dumps({"version": version}), encoding="utf-8")
