"""A folder in a bucket, such as gs://bucket/runs/mine or s3://bucket/runs/mine: its files by name,
through TensorStore.

TensorStore retries when a store is busy, and writes on condition that nobody has written since. Its
errors become one line that names the folder.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore

from data.errors import TransientError, UserError, first_line, is_transient
from trainer.config.schema import BUCKETS, GCS

_SECONDS = 600.0  # in which a request must be answered, including retries
_LISTINGS = 5
_EXPIRED = re.compile(r"ExpiredToken|UNAUTHENTICATED")


class Version(NamedTuple):
    """A file's content when read, and its mark (TensorStore's storage generation), by which a later
    write can require that the file is unchanged."""

    content: bytes | None
    mark: bytes


def in_bucket(path: str | Path) -> bool:
    """Returns whether a path is in a bucket that can hold runs."""
    return str(path).startswith(BUCKETS)


def store_spec(url: str) -> str | dict[str, Any]:
    """Returns a folder in a bucket as TensorStore's `KvStore.open` takes it: a URL, or a spec.

    For s3:// the endpoint and region are taken from $AWS_ENDPOINT_URL_S3, $AWS_ENDPOINT_URL and
    $AWS_REGION, as in other programs; TensorStore does not read them.
    """
    if url.startswith(GCS):
        return f"{url}/"
    bucket, _, path = url.partition("://")[2].partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": f"{path}/" if path else ""}
    variables = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    for field, names in variables.items():
        if found := [os.environ[name] for name in names if os.environ.get(name)]:
            spec[field] = found[0]
    if os.environ.get("AWS_ACCESS_KEY_ID"):  # otherwise it first looks for files, and logs errors
        spec["aws_credentials"] = {"type": "environment"}
    # Otherwise TensorStore compares and writes in two requests, between which others may write.
    return {**spec, "use_conditional_write": True}


class Bucket:
    """The files of a folder in a bucket; each appears atomically, for everyone at once."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @functools.cached_property
    def _store(self) -> tensorstore.KvStore:
        return self._result(tensorstore.KvStore.open(store_spec(self.url)))

    def _result(self, future: Any, seconds: float = _SECONDS) -> Any:
        try:
            return future.result(timeout=seconds)
        except TimeoutError as error:
            raise TransientError(f"{self.url}: no answer within {seconds:g} s") from error
        except (ValueError, OSError, RuntimeError) as error:
            raise self._user_error(error) from error

    def _user_error(self, error: Exception) -> UserError:
        """Returns a library's error as one line."""
        reason = f"{self.url}: {first_line(error).partition(' [http_')[0]}"
        if is_transient(error):
            return TransientError(reason)
        if _EXPIRED.search(str(error)):
            return UserError(f"{reason.rstrip('.')}; new credentials would work")
        return UserError(
            f"{reason}; an existing bucket that this machine's account may read and write would "
            "work"
        )

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of all files that begin with `prefix`, sorted; not the empty objects
        that stand for folders made in a store's console."""
        if self.url.startswith(GCS):
            found = self._names_by_gcsfs(prefix)
        else:
            first = prefix.encode()
            wanted = tensorstore.KvStore.KeyRange(first, first + b"\xff") if first else None
            found = [name.decode() for name in self._result(self._store.list(wanted))]
        return sorted(name for name in found if name and not name.endswith("/"))

    def _names_by_gcsfs(self, prefix: str) -> list[str]:
        """`names` for gs://, where TensorStore 0.1.86 mistakes a refused listing for an empty one.
        Orbax needs gcsfs too."""
        root = self.url.removeprefix(GCS)
        try:
            import gcsfs

            store = gcsfs.GCSFileSystem(use_listings_cache=False)
            found = store.find(root, prefix=prefix)
        except ImportError as error:
            raise UserError(f"{self.url}: gs:// needs gcsfs; pip install gcsfs") from error
        except FileNotFoundError:
            return []
        except Exception as error:  # gcsfs, aiohttp and google.auth each raise their own types
            raise self._user_error(error) from error
        return [name.removeprefix(f"{root}/") for name in found]

    def version(self, name: str, seconds: float = _SECONDS) -> Version:
        """Returns a file's content (None if it is missing) and its mark."""
        read = self._result(self._store.read(name), seconds)
        return Version(read.value if read.state == "value" else None, read.stamp.generation)

    def read(self, name: str) -> bytes:
        """Returns a file's content.

        Raises:
          FileNotFoundError: there is no such file.
        """
        content = self.version(name).content
        if content is None:
            raise FileNotFoundError(2, "No such file", f"{self.url}/{name}")
        return content

    def read_all(self, prefix: str = "", apart: tuple[str, ...] = ()) -> dict[str, bytes]:
        """Returns the contents of all files by name, read concurrently.

        If one is deleted between listing and reading, as when a log's parts are merged, they are
        listed again.

        Args:
          prefix: of the names; apart: prefixes of files to leave out.
        """
        name = ""
        for _ in range(_LISTINGS):
            names = [name for name in self.names(prefix) if not name.startswith(apart)]
            reads = [(name, self._store.read(name)) for name in names]
            contents = {}
            for name, future in reads:
                read = self._result(future)
                if read.state != "value":
                    break
                contents[name] = read.value
            else:
                return contents
        raise TransientError(
            f"{self.url}/{name}: is listed, but not there; the same command may work a moment later"
        )

    def write(
        self, name: str, content: bytes | None, mark: bytes | None = None, seconds: float = _SECONDS
    ) -> bytes:
        """Writes a file, or deletes it if `content` is None, and returns its mark.

        Args:
          mark: write only if the file is unchanged since the `version` or `write` that returned
            this mark; otherwise b"" is returned.
        """
        return self._result(self._store.write(name, content, if_equal=mark), seconds).generation

    def require_conditions(self, name: str) -> None:
        """Checks, by writing and deleting a file, that the store is writable and enforces
        conditional writes.

        Raises:
          UserError: the store is not, or does not.
        """
        absent = self.write(name, b"") and self.write(name, None)
        self.write(name, b"1")
        try:
            if self.write(name, b"2", absent):
                raise UserError(
                    f"{self.url}: this store ignores write conditions, so two runs might write "
                    "one folder; one with conditional writes (If-Match, If-None-Match) "
                    "would work"
                )
        finally:
            self.write(name, None)

    def remove(self, prefix: str) -> None:
        """Deletes all files whose names begin with `prefix`."""
        deletes = [self._store.write(name, None) for name in self.names(prefix)]
        for delete in deletes:
            self._result(delete)
