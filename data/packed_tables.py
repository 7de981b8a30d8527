"""The unpacked sizes of Parquet pages and Arrow buffers, read from a file before unpacking it.

Parquet's metadata may claim any size. The header of a page is a reliable bound: Arrow unpacks into
as many bytes, and fails if the page does not have exactly that size. The same is true of the length
that precedes each compressed buffer in Arrow's own format. Both are read here as Arrow reads them,
and nothing is accepted that Arrow would not accept.
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
# Arrow may read this many bytes past a column's end, for old writers that recorded too short a
# length.
_FORGOTTEN = 100
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # kinds of pages
_DELTA_BYTE_ARRAY = 7  # texts share a prefix with the text before
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
ARROW_FILE = b"ARROW1"
"""The first bytes of Arrow's file format, which its stream format lacks."""
# Marks an experimental format of Arrow 0.17 that Arrow still reads.
_EXPERIMENTAL = b"ARROW:experimental_compression"
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


@dataclass
class Chunk:
    """The unpacked size of a column in a row group.

    Attributes:
      path: the column's name, preceded by those of its parents.
      unpacked: bytes of its pages.
      values: the number of values, including nulls.
      in_lists: whether a row may have any number of values.
      width: bytes of a value; for texts, of an offset.
      longest: an upper bound on the bytes of a text that the file stores once and lists may repeat.
      refers_back: whether texts may share a prefix with the text before, so that only reading them
        tells their size.
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
        """Bytes as an array, except for texts repeated more often than in the file."""
        return max(self.unpacked, self.values * self.width if self.in_lists else 0)

    @property
    def at_most(self) -> int:
        """Bytes as an array if each text in a list were the longest."""
        return self.values * self.longest if self.in_lists else 0


def parquet_chunks(opened: BinaryIO, metadata: "parquet.FileMetaData") -> list[list[Chunk]]:
    """Returns the unpacked size of each column of each row group.

    Raises:
      ValueError, EOFError: a page's header is damaged, or columns share pages.
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
    """Reads the headers of a column's pages, over the same range as Arrow."""
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
    if chunk.refers_back:  # also across pages
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
    """Returns what the header of the page at a position says, and where the page ends."""
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
    details = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, -1), {})
    values = encoding = 0
    if kind in (_DATA, _DATA_V2):
        values, encoding = _int32(details, 1), _int32(details, 2 if kind == _DATA else 4)
    if min(unpacked, packed, values) < 0:
        raise ValueError("a page has a negative size")
    return _Page(kind, unpacked, values, encoding, position + header.at + packed)


def _int32(fields: Any, number: int) -> int:
    value = fields.get(number) if isinstance(fields, dict) else None
    if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
        raise ValueError("a page's header lacks a 32-bit number")
    return value


class _Compact:
    """Reads a struct in Thrift's compact protocol, which Parquet uses for its headers.

    Numbers whose width is not Parquet's, and repeated fields, are refused: readers differ in how
    they interpret them.
    """

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def structure(self, depth: int = 0) -> dict[int, Any]:
        """Returns the 32-bit numbers and structs by field number; skips other fields."""
        fields: dict[int, Any] = {}
        number = 0
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._zigzag()
            if number in fields:
                raise ValueError("a field of a page's header is repeated")
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
            return (self._zigzag(),)  # a tuple, so that it is not taken for a 32-bit number
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
    """Yields the unpacked bytes of each batch and dictionary in a file.

    Args:
      opened: a file in Arrow's file or stream format.

    Raises:
      ValueError, EOFError, struct.error: a message or the footer is damaged.
    """
    opened.seek(0)
    if opened.read(len(ARROW_FILE)) == ARROW_FILE:
        for block in _blocks(opened):
            yield _message(opened, *block)[0]
        return
    size, position = opened.seek(0, os.SEEK_END), 0
    while position >= 0 and position + 4 <= size:  # -1 after the end-of-stream marker
        unpacked, position = _message(opened, position)
        yield unpacked


def _blocks(opened: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Yields the position, metadata bytes and body bytes of each batch listed in the footer."""
    end = opened.seek(0, os.SEEK_END) - len(ARROW_FILE) - 4
    opened.seek(end)
    (length,) = struct.unpack("<i", opened.read(4))
    if not 0 < length <= end:
        raise ValueError("its footer is damaged")
    opened.seek(end - length)
    footer = opened.read(length)
    root = _Table(footer, struct.unpack_from("<I", footer)[0])
    form = [("offset", "<i8"), ("head", "<i4"), ("unused", "<i4"), ("body", "<i8")]
    blocks = [block for number in (2, 3) for block in root.structures(number, form).tolist()]
    if sum(head + body for _, head, _, body in blocks) > end:
        raise ValueError("its batches are larger than the file")
    for offset, head, _, body in blocks:
        if min(offset, head, body) < 0:
            raise ValueError("a batch has a negative size or offset")
        yield offset, head, body


def _message(
    opened: BinaryIO, position: int, head: int | None = None, body: int | None = None
) -> tuple[int, int]:
    """Returns the unpacked bytes of a message's buffers, and the position after it, or -1.

    Args:
      head, body: bytes of its metadata and its body, if a footer states them.
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
        raise ValueError("the length of a message is not the one in the footer")
    metadata = _exactly(opened, length)
    message = _Table(metadata, struct.unpack_from("<I", metadata)[0])
    start = position + (prefix + length if head is None else head)
    body_length = message.number(3, "<q")
    if body_length < 0 or (body is not None and body != body_length):
        raise ValueError("the length of a body is negative or not the one in the footer")
    kind = message.number(1, "<B")
    batch = message.table(2) if kind in (_RECORD_BATCH, _DICTIONARY_BATCH) else None
    if batch is not None and kind == _DICTIONARY_BATCH:
        batch = batch.table(1)
    unpacked = 0
    if batch is not None:
        buffers = batch.structures(2, [("offset", "<i8"), ("length", "<i8")])
        unpacked = sum(buffers["length"].tolist())
        if batch.table(3) is not None or _EXPERIMENTAL in metadata:
            unpacked = sum(_lengths(opened, start, buffers))
    return unpacked, start + body_length


def _lengths(opened: BinaryIO, start: int, buffers: np.ndarray) -> Iterator[int]:
    """Yields the unpacked lengths that precede compressed buffers; -1 marks uncompressed ones."""
    for offset, length in zip(buffers["offset"].tolist(), buffers["length"].tolist(), strict=True):
        if length > 0:
            if offset < 0 or length < 8:
                raise ValueError("a buffer is outside its body")
            opened.seek(start + offset)
            (unpacked,) = struct.unpack("<q", _exactly(opened, 8))
            yield length - 8 if unpacked == -1 else max(unpacked, 0)


def _exactly(opened: BinaryIO, count: int) -> bytes:
    if len(data := opened.read(count)) < count:
        raise EOFError("it ends within a message")
    return data


class _Table:
    """A table in a FlatBuffer; Arrow verifies all offsets before following them."""

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
        """Returns a number, or 0 if it is absent."""
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
        """Returns an array of structs, empty if it is absent."""
        target = self._target(field)
        if target is None:
            return np.zeros(0, form)
        (count,) = struct.unpack_from("<I", self._data, target)
        return np.frombuffer(self._data, np.dtype(form), count, target + 4)
