"""Reads compressed files, up to a plausible size of real text."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from data.errors import UserError, first_line

ENDINGS = (".gz", ".zst", ".bz2", ".xz")
MOST_TIMES = 200
"""How many times its file's size a text may have. With gzip a text has some 3 to 30 times, and a
decompression bomb 1,000 times."""
_UNLIMITED = 1 << 24  # bytes that any file may unpack to
_BUFFER = 1 << 18


def most_unpacked(size: int) -> int:
    """Returns the bytes that a file of `size` bytes may unpack to."""
    return max(_UNLIMITED, MOST_TIMES * size)


def decompressed(file: BinaryIO, ending: str, name: str) -> BinaryIO:
    """Returns a stream of a compressed file's content.

    Reading it raises UserError where that is more than MOST_TIMES the bytes read of the file, and
    for a file that is truncated or of another kind.

    Args:
      file: the compressed file.
      ending: one of ENDINGS.
      name: the file's name, for messages.
    """
    if ending == ".zst":
        import pyarrow

        content = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    else:
        openers: dict[str, Callable[..., Any]] = {
            ".gz": gzip.open,
            ".bz2": bz2.open,
            ".xz": lzma.open,
        }
        content = openers[ending](file, "rb")
    return io.BufferedReader(_Bounded(content, file, name, ending), _BUFFER)


class _Bounded(io.RawIOBase):
    """The content of a compressed file, until it is out of proportion."""

    def __init__(self, content: BinaryIO, file: BinaryIO, name: str, ending: str):
        self._content, self._file, self._name, self._ending = content, file, name, ending
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self._content.read(len(buffer))
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if getattr(error, "errno", None) is not None:  # of the disk
                raise
            raise UserError(
                f"{self._name}: cannot be decompressed ({first_line(error)}); a whole "
                f"{self._ending} file would work"
            ) from None
        buffer[: len(block)] = block
        self._unpacked += len(block)
        if self._unpacked > most_unpacked(self._file.tell()):
            raise UserError(
                f"{self._name}: unpacks to more than {MOST_TIMES} times its size; text that does "
                "so would work unpacked"
            )
        return len(block)
