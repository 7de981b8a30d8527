"""Compressed files are read until their content is out of proportion to their size."""

import errno
import gzip
import io
import lzma
import random

import pyarrow
import pytest

from data.compression import decompressed
from data.errors import UserError
from data.paths import File

PACK = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda text: pyarrow.compress(text, codec="zstd", asbytes=True),
}


def unpacked(path):
    with File(str(path)).open_decompressed() as file:
        return sum(len(block) for block in iter(lambda: file.read(1 << 20), b""))


@pytest.mark.parametrize("ending", PACK)
def test_a_file_that_unpacks_to_over_200_times_its_size_is_refused(ending, tmp_path):
    path = tmp_path / f"a.json{ending}"
    text = b"[" + b"1234567," * (3 << 20)  # 24 MiB
    path.write_bytes(PACK[ending](text))
    assert len(text) > 200 * path.stat().st_size
    with pytest.raises(UserError, match=rf"^{path}: unpacks to more than 200 times its size"):
        unpacked(path)


@pytest.mark.parametrize("ending", PACK)
def test_a_small_repetitive_text_and_a_normal_one_are_read(ending, tmp_path):
    path = tmp_path / f"a.json{ending}"
    for text in (b"a" * (1 << 20), random.Random(0).randbytes(1 << 18).hex().encode()):
        path.write_bytes(PACK[ending](text))
        assert unpacked(path) == len(text)


@pytest.mark.parametrize("ending", PACK)
def test_a_truncated_or_other_file_is_named(ending, tmp_path):
    path = tmp_path / f"a.json{ending}"
    for content in (PACK[ending](random.Random(0).randbytes(1 << 18))[:-9], b"plain text" * 99):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"^{path}: cannot be decompressed \(.* would work"):
            unpacked(path)


@pytest.mark.parametrize("ending", PACK)
def test_errors_of_disks_are_not_the_compressed_files(ending, tmp_path):
    """Those of reading it, and those of the caller."""
    path = tmp_path / f"a.json{ending}"
    path.write_bytes(PACK[ending](random.Random(0).randbytes(1 << 18)))

    class Failing(io.RawIOBase):
        def __init__(self):
            self.file = path.open("rb")

        def readable(self):
            return True

        def tell(self):
            return self.file.tell()

        def read(self, size=-1):
            if self.file.tell():
                raise OSError(errno.EIO, "Input/output error")
            return self.file.read(min(size, 1000) if size > 0 else 1000)

    with pytest.raises(OSError, match="Input/output error"):
        decompressed(Failing(), ending, "a").read()
    with pytest.raises(OSError, match="No space left"), File(str(path)).open_decompressed():
        raise OSError(errno.ENOSPC, "No space left on device")
