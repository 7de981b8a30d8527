"""What Parquet's pages and Arrow's buffers unpack to, told by the file before they are unpacked.

Parquet's metadata may say anything about sizes. Of a page, its own header is the bound: Arrow
unpacks into so many bytes, and fails if they are not all of the page. The same is true of the
length in front of each compressed buffer of Arrow's own format. Both are read here as Arrow reads
them, with no more than Arrow accepts.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from pyarrow import parquet

_WINDOW, _LONGEST_HEADER = 1 << 10, 1 << 24  # bytes of a page's header
# Arrow reads so much further where a column's length is that of an old writer, which forgot some.
_FORGOTTEN = 100
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # kinds of pages
_DELTA_BYTE_ARRAY = 7  # texts that begin as the one before
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
ARROW_FILE = b"ARROW1"
"""What Arrow's format for files begins with, and that for streams does not."""
# Of a format that Arrow 0.17 tried, and still reads.
_EXPERIMENTAL = b"ARROW:experimental_compression"
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


@dataclass
class Chunk:
    """What a column of a group of rows unpacks to.

    Attributes:
      path: the column's name, with those of what it is in.
      unpacked: bytes of its pages.
      values: their number, with those that are null.
      in_lists: a row may have any number of them.
      width: bytes of a value; of a text those of its offset.
      longest: bytes at most of a text that the file holds once and a list may hold often.
      refers_back: whether texts may be what those before them begin with, which only reading tells.
    """

    path: str
    in_lists: bool
    width: int
    unpacked: int = 0
    values: int = 0
    longest: int = 0
    refers_back: bool = False

    @property
    def in_memory(self) -> int:
        """Bytes as an array, but for texts that are in it more often than in the file."""
        return max(self.unpacked, self.values * self.width if self.in_lists else 0)

    @property
    def at_most(self) -> int:
        """Bytes as an array, if each text of a list were the longest."""
        return self.values * self.longest if self.in_lists else 0


def parquet_chunks(opened: BinaryIO, metadata: "parquet.FileMetaData") -> list[list[Chunk]]:
    """Returns what each column of each group of rows unpacks to.

    Raises:
      ValueError, EOFError: a page's header is damaged, or columns share their pages.
    """
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    if sum(column.total_compressed_size for column in columns) > opened.seek(0, os.SEEK_END):
        raise ValueError("its columns are larger than the file")
    return [
        [_chunk(opened, metadata, group, column) for column in range(metadata.num_columns)]
        for group in range(metadata.num_row_groups)
    ]


def _chunk(opened: BinaryIO, metadata: "parquet.FileMetaData", group: int, number: int) -> Chunk:
    """Reads the headers of a column's pages, from where Arrow reads them and as far."""
    column, form = metadata.row_group(group).column(number), metadata.schema.column(number)
    is_text = column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
    width = max(4, form.length or 0) if is_text else _WIDTHS[column.physical_type]
    chunk = Chunk(column.path_in_schema, form.max_repetition_level > 0, width)
    position = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < position:
        position = column.dictionary_page_offset
    end = position + column.total_compressed_size + _FORGOTTEN
    while chunk.values < column.num_values and position < end:
        page = _page(opened, position)
        position = page.end
        chunk.unpacked += page.unpacked
        chunk.values += page.values
        if column.physical_type == "BYTE_ARRAY":
            if page.kind == _DICTIONARY:
                chunk.longest = max(chunk.longest, page.unpacked)
            chunk.refers_back |= page.encoding == _DELTA_BYTE_ARRAY
    if chunk.refers_back:  # also to a page before
        chunk.longest = chunk.unpacked
    return chunk


@dataclass
class _Page:
    kind: int
    unpacked: int
    values: int
    encoding: int
    end: int


def _page(opened: BinaryIO, position: int) -> _Page:
    """Returns what the header of the page at a position tells, and where the page ends."""
    window = _WINDOW
    while True:
        opened.seek(position)
        header = _Compact(opened.read(window))
        try:
            fields = header.structure()
            break
        except (IndexError, EOFError):
            window *= 16
            if len(header.data) < window // 16 or window > _LONGEST_HEADER:
                raise EOFError("a page's header has no end") from None
    kind, unpacked, packed = (_int32(fields, number) for number in (1, 2, 3))
    about = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, -1), {})
    values = encoding = 0
    if kind in (_DATA, _DATA_V2):
        values, encoding = _int32(about, 1), _int32(about, 2 if kind == _DATA else 4)
    if min(unpacked, packed, values) < 0:
        raise ValueError("a page of a negative size")
    return _Page(kind, unpacked, values, encoding, position + header.at + packed)


def _int32(fields: Any, number: int) -> int:
    value = fields.get(number) if isinstance(fields, dict) else None
    if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
        raise ValueError("a page's header lacks a number")
    return value


class _Compact:
    """Reads a structure of Thrift's compact protocol, in which Parquet's headers are.

    Numbers of another width than Parquet's, and fields that come twice, are refused: readers differ
    in what they take of them.
    """

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def structure(self, depth: int = 0) -> dict[int, Any]:
        """Returns 32-bit numbers and structures by their fields' numbers, and skips the rest."""
        fields: dict[int, Any] = {}
        number = 0
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._zigzag()
            if number in fields:
                raise ValueError("a field of a page's header comes twice")
            fields[number] = self._value(byte & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > 8:
            raise ValueError("a page's header is nested too deeply")
        if kind in (1, 2):
            return kind == 1
        if kind == 5:
            return self._zigzag()
        if kind in (4, 6):
            return (self._zigzag(),)  # not taken for a number of 32 bits
        if kind in (3, 7, 8):
            self._skip(1 if kind == 3 else 8 if kind == 7 else self._varint())
            return None
        if kind in (9, 10):
            return self._list(depth)
        if kind == 12:
            return self.structure(depth + 1)
        raise ValueError("a page's header has a field of an unknown kind")

    def _list(self, depth: int) -> None:
        byte = self._byte()
        count = byte >> 4 if byte >> 4 < 15 else self._varint()
        for _ in range(count):
            if byte & 15 in (1, 2):
                self._skip(1)
            else:
                self._value(byte & 15, depth + 1)

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise EOFError

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number of a page's header has no end")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


def arrow_unpacked(opened: BinaryIO) -> Iterator[int]:
    """Yields the bytes that each batch and dictionary of a file unpacks to.

    Args:
      opened: in Arrow's format for files or that for streams.

    Raises:
      ValueError, EOFError, struct.error: a message or the footer is damaged.
    """
    opened.seek(0)
    if opened.read(len(ARROW_FILE)) == ARROW_FILE:
        for block in _blocks(opened):
            yield _message(opened, *block)[0]
        return
    size, position = opened.seek(0, os.SEEK_END), 0
    while position >= 0 and position + 4 <= size:  # -1 behind the mark of the end
        unpacked, position = _message(opened, position)
        yield unpacked


def _blocks(opened: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Yields position, bytes of metadata and of body of each batch that a footer names."""
    end = opened.seek(0, os.SEEK_END) - len(ARROW_FILE) - 4
    opened.seek(end)
    (length,) = struct.unpack("<i", opened.read(4))
    if not 0 < length <= end:
        raise ValueError("its footer is damaged")
    opened.seek(end - length)
    footer = opened.read(length)
    root = _Table(footer, struct.unpack_from("<I", footer)[0])
    form = [("at", "<i8"), ("head", "<i4"), ("unused", "<i4"), ("body", "<i8")]
    blocks = [block for number in (2, 3) for block in root.structures(number, form).tolist()]
    if sum(head + body for _, head, _, body in blocks) > end:
        raise ValueError("its batches are larger than the file")
    for at, head, _, body in blocks:
        if min(at, head, body) < 0:
            raise ValueError("a batch of a negative size")
        yield at, head, body


def _message(
    opened: BinaryIO, position: int, head: int | None = None, body: int | None = None
) -> tuple[int, int]:
    """Returns the bytes that a message's buffers unpack to, and the position behind it, or -1.

    Args:
      head, body: bytes of its metadata and of its body, as a footer tells.
    """
    opened.seek(position)
    (length,) = struct.unpack("<i", _exactly(opened, 4))
    prefix = 4
    if length == -1:  # since Arrow 0.15
        (length,) = struct.unpack("<i", _exactly(opened, 4))
        prefix = 8
    if length == 0:
        return 0, -1
    if length < 0 or (head is not None and not prefix < length + prefix <= head):
        raise ValueError("a message of another length than its file tells")
    metadata = _exactly(opened, length)
    message = _Table(metadata, struct.unpack_from("<I", metadata)[0])
    start = position + (prefix + length if head is None else head)
    whole = message.number(3, "<q")
    if whole < 0 or (body is not None and body != whole):
        raise ValueError("a body of another length than its file tells")
    kind = message.number(1, "<B")
    batch = message.table(2) if kind in (_RECORD_BATCH, _DICTIONARY_BATCH) else None
    if batch is not None and kind == _DICTIONARY_BATCH:
        batch = batch.table(1)
    unpacked = 0
    if batch is not None:
        buffers = batch.structures(2, [("at", "<i8"), ("length", "<i8")])
        unpacked = sum(buffers["length"].tolist())
        if batch.table(3) is not None or _EXPERIMENTAL in metadata:
            unpacked = sum(_lengths(opened, start, buffers))
    return unpacked, start + whole


def _lengths(opened: BinaryIO, start: int, buffers: np.ndarray) -> Iterator[int]:
    """Yields the lengths in front of compressed buffers; -1 stands for one that is not."""
    for at, length in zip(buffers["at"].tolist(), buffers["length"].tolist(), strict=True):
        if length > 0:
            if at < 0 or length < 8:
                raise ValueError("a buffer outside of its body")
            opened.seek(start + at)
            (unpacked,) = struct.unpack("<q", _exactly(opened, 8))
            yield length - 8 if unpacked == -1 else max(unpacked, 0)


def _exactly(opened: BinaryIO, count: int) -> bytes:
    if len(data := opened.read(count)) < count:
        raise EOFError("it ends within a message")
    return data


class _Table:
    """A table of a FlatBuffer; Arrow checks all of its positions before it follows them."""

    def __init__(self, data: bytes, at: int):
        self._data, self._at = data, at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        (self._size,) = struct.unpack_from("<H", data, self._fields)

    def _position(self, number: int) -> int | None:
        entry = 4 + 2 * number
        if entry >= self._size:
            return None
        (offset,) = struct.unpack_from("<H", self._data, self._fields + entry)
        return self._at + offset if offset else None

    def number(self, field: int, form: str) -> int:
        """Returns a number, 0 if it is left out."""
        position = self._position(field)
        return 0 if position is None else struct.unpack_from(form, self._data, position)[0]

    def _target(self, field: int) -> int | None:
        position = self._position(field)
        if position is None:
            return None
        return position + struct.unpack_from("<I", self._data, position)[0]

    def table(self, field: int) -> "_Table | None":
        target = self._target(field)
        return None if target is None else _Table(self._data, target)

    def structures(self, field: int, form: list) -> np.ndarray:
        """Returns an array of structures, empty if it is left out."""
        target = self._target(field)
        if target is None:
            return np.zeros(0, form)
        (count,) = struct.unpack_from("<I", self._data, target)
        return np.frombuffer(self._data, np.dtype(form), count, target + 4)
