"""Reads JSON records one at a time, from a list or from lines, complete or truncated."""

import codecs
import itertools
import json
from collections.abc import Callable, Iterator
from typing import BinaryIO

from data.errors import UserError
from data.hub import on_hub
from data.paths import File
from data.report import SourceReport
from data.turn_lists import role_in

CHUNK = 1 << 20  # bytes read at a time
WHITE_SPACE = " \t\r\n"
_LONG_LINE = 64 << 20  # characters of a list that may be a record
CUT_OFF = "cut off or malformed JSON"
MAX_BYTES = 1 << 30  # of one record or text file; a small .gz may exceed memory
LONG_NUMBER = "a number with more digits than Python reads"
WOULD_WORK = "a JSON list of records, or one JSON record a line, would work"

BEGINNING = 512  # bytes that `kind_of` needs
TAR = "a tar archive; unpack it first"
# Beginnings of files that are not text.
_KINDS = {
    b"\x1f\x8b": "compressed with gzip; its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; its name must end in .zst",
    b"BZh": "compressed with bzip2; its name must end in .bz2",
    b"\xfd7zXZ": "compressed with xz; its name must end in .xz",
    b"PAR1": "a Parquet table; its name must end in .parquet",
    b"ARROW1": "an Arrow table; its name must end in .arrow",
    b"\x93NUMPY": "a NumPy array; format: tokens and a name that ends in .npy would work",
    b"PK\x03\x04": "a ZIP archive; unpack it first",
    b"SQLite": "an SQLite database",
    b"%PDF": "a PDF document",
    b"\xff\xfe": "text in UTF-16, not UTF-8",
    b"\xfe\xff": "text in UTF-16, not UTF-8",
}


def no_such_file(path: File, would_work: str) -> UserError:
    """Returns the error for a source's file that does not exist."""
    is_list = "," in str(path)
    meant = "; each of several paths is an entry of data.sources" if is_list else on_hub(path)
    return UserError(f"{path}: no such file{meant}; {would_work}")


def kind_of(beginning: bytes) -> str | None:
    """Returns what a file that is not JSON is by its first bytes, for a message; None if unknown.

    A text may begin with some of these words, but not like a tar archive, whose header has zeros.
    """
    if beginning[257:262] == b"ustar" and b"\0" in beginning:
        return TAR
    return next((kind for start, kind in _KINDS.items() if beginning.startswith(start)), None)


class EmptyFile(UserError):
    """A file has nothing but white space."""


class OnlyObject(dict):
    """The only object of a `.json` file, which may be a record or hold a list of records."""


Advance = Callable[[int], object]
"""Called with the number of bytes just read, to advance a progress bar."""


def would_fit(parts: str) -> str:
    """Returns advice for a text too large to be a document."""
    return f"{parts}, each of which becomes a document, would work"


class _Window:
    """A window on the file's text; at most one record and one chunk are in memory."""

    def __init__(self, path: File, file: BinaryIO, advance: Advance | None):
        self.path = path
        self.text = ""
        self.offset = 0
        """Offset in `text` of the next character to parse."""
        self.beginning = b""
        """The file's first bytes."""
        self._file = file
        self._advance = advance
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
        self._bytes_read = 0

    def grow(self, size: int) -> bool:
        """Drops the text before `offset` and appends `size` bytes of the file; False at the end."""
        if len(self.text) - self.offset + size > MAX_BYTES:
            raise UserError(
                f"{self.path}: a record of more than {MAX_BYTES >> 20} MiB; "
                f"{would_fit('several records')}"
            )
        block = self._file.read(size)
        if not block:
            return False
        self.beginning = self.beginning or block[:BEGINNING]
        try:
            # The bytes of a character split at the file's end stay in the decoder: such a file is
            # truncated, not in another encoding.
            self.text = self.text[self.offset :] + self._decoder.decode(block)
        except UnicodeDecodeError as error:
            kind = kind_of(self.beginning)
            position = self._bytes_read + error.start
            problem = f"is {kind}" if kind else f"byte {position} is not UTF-8 text"
            raise UserError(f"{self.path}: {problem}; {WOULD_WORK}") from None
        self.offset = 0
        self._bytes_read += len(block)
        if self._advance:
            self._advance(len(block))
        return True

    def peek(self) -> str:
        """Skips white space and returns the next character, or '' at the end of the file."""
        while True:
            while self.offset < len(self.text) and self.text[self.offset] in WHITE_SPACE:
                self.offset += 1
            if self.offset < len(self.text):
                return self.text[self.offset]
            if not self.grow(CHUNK):
                return ""


class _MalformedJson(Exception):
    """The window's text, up to the end of the file, does not begin with a complete JSON value."""

    def __init__(self, problem: str, offset: int):
        super().__init__(problem)
        self.problem = problem
        self.offset = offset

    def is_cut_off(self, text: str) -> bool:
        """Returns whether the value is malformed only because the text ends within it: within a
        string, or at most an escape or a word such as `false` after the problem's offset.
        """
        longest_word = len("-Infinity")
        return self.problem.startswith("Unterminated string") or (
            self.offset >= len(text.rstrip(WHITE_SPACE)) - longest_word
        )


def read_records(
    path: File, report: SourceReport, advance: Advance | None = None
) -> Iterator[object]:
    """Yields every complete JSON value of the file's list or lines.

    A malformed line, and a record cut off by the end of a list, are dropped; earlier records are
    used.

    Args:
      report: receives dropped records and notes; kept records are counted by the caller.
      advance: called with the number of bytes of each read.

    Raises:
      EmptyFile: the file is empty.
      UserError: the file is missing, not UTF-8, or neither a list nor lines of JSON; a record
        within a list is malformed, so that all later records would be lost; or text follows a list.
    """
    if not path.exists():
        raise no_such_file(path, WOULD_WORK)
    with path.open_decompressed() as file:
        window = _Window(path, file, advance)
        first = window.peek()
        if first == "":
            raise EmptyFile(
                f"{path}: the file is empty ({path.size()} bytes, no text); {WOULD_WORK}"
            )
        if (first == "[" and _has_lists(window)) or (first == '"' and _has_texts(window)):
            yield from _read_lines(window, report)
        elif first == "[":
            window.offset += 1
            yield from _read_list(window, report)
        elif first == "{":
            read = _read_values if _spans_lines(window) else _read_lines
            objects = read(window, report)
            yield from _with_only_object(objects, report) if path.suffix == ".json" else objects
        elif kind := kind_of(window.beginning):
            raise UserError(f"{path}: is {kind}; {WOULD_WORK}")
        else:
            raise UserError(
                f"{path}: begins with {first!r}, so it is not JSON; {WOULD_WORK} (a plain text "
                "with format: text, a table of separated values under a name that ends in .csv or "
                ".tsv)"
            )


def _with_only_object(objects: Iterator[object], report: SourceReport) -> Iterator[object]:
    """Yields objects, a single one as an `OnlyObject`."""
    for record, is_alone in with_whether_alone(objects, report):
        yield OnlyObject(record) if is_alone and isinstance(record, dict) else record


def with_whether_alone(
    records: Iterator[object], report: SourceReport
) -> Iterator[tuple[object, bool]]:
    """Yields the records of a file, each with whether it is the only one."""
    for first in records:
        line = report.line
        second = list(itertools.islice(records, 1))
        next_line, report.line = report.line, line
        yield first, not second
        report.line = next_line
        for record in itertools.chain(second, records):
            yield record, False


def _has_lists(window: _Window) -> bool:
    """Returns whether a file has a line per list: of a conversation's turns, or of token ids.

    A list of other objects is one of records, which nothing may follow.
    """
    end = window.text.find("\n", window.offset)
    # A `.json` file of one line is a list.
    while end < 0 and window.path.suffix != ".json" and len(window.text) < _LONG_LINE:
        if not window.grow(len(window.text)):
            break
        end = window.text.find("\n", window.offset)
    if end < 0:
        return False
    try:
        values = json.loads(window.text[window.offset : end])
    except (ValueError, RecursionError):
        return False
    if not values or any(isinstance(value, dict) and role_in(value) is None for value in values):
        return False
    length = end - window.offset
    while not window.text[window.offset + length :].strip(WHITE_SPACE):
        if not window.grow(CHUNK):
            return False
    return True


def _has_texts(window: _Window) -> bool:
    """Returns whether a file begins with a line that is a text in JSON, not a field of a CSV."""
    try:
        _read_value(window, advance=False)
    except _MalformedJson:
        return False
    _, end = _decode(window.text, window.offset)
    return window.text[end:].lstrip(" \t\r")[:1] in ("", "\n")


def _spans_lines(window: _Window) -> bool:
    """Returns whether the file begins with a JSON object that spans several lines."""
    end = window.text.find("\n", window.offset)
    if end < 0:  # a long line, or the file's only one
        return False
    try:
        json.loads(window.text[window.offset : end])
        return False
    except (ValueError, RecursionError):
        pass
    try:
        _read_value(window, advance=False)
    except _MalformedJson:
        return False
    return True


def _read_values(window: _Window, report: SourceReport) -> Iterator[object]:
    """Yields the JSON objects of a file, each spanning any number of lines."""
    count = 0
    while window.peek():
        report.line = count + 1
        try:
            value = _read_value(window)
        except _MalformedJson as error:
            if not error.is_cut_off(window.text):
                raise UserError(
                    f"{window.path}: record {count + 1} is malformed ({error.problem}), and all "
                    f"after it would be lost; {WOULD_WORK}"
                ) from None
            _drop_cut_off(window, report, error)
            return
        count += 1
        yield from _readable(value, report)


def _readable(value: object, report: SourceReport) -> Iterator[object]:
    """Yields a value; drops and counts it if it contains a number that is too long to be read."""
    if isinstance(value, _LongNumber):
        report.drop(LONG_NUMBER)
    else:
        yield value


def _read_list(window: _Window, report: SourceReport) -> Iterator[object]:
    count = 0
    while True:
        character = window.peek()
        if character == "]":
            _check_end(window, count)
            return
        if character == "," and count:
            window.offset += 1
            character = window.peek()
        if character == "":
            # `[ {..}, {..}` and then nothing: every record is complete, only the closing bracket is
            # missing.
            report.notes.append(
                f"the JSON list has no end after record {count}: the file was cut there"
            )
            return
        report.line = count + 1
        try:
            value = _read_value(window)
        except _MalformedJson as error:
            if not error.is_cut_off(window.text):
                near = window.text[max(error.offset - 20, window.offset) : error.offset + 20]
                raise UserError(
                    f"{window.path}: record {count + 1} is malformed ({error.problem} near "
                    f"{near!r}), and all after it would be lost; mending it, or one record a line "
                    "(only bad lines are dropped), would work"
                ) from None
            _drop_cut_off(window, report, error)
            return
        count += 1
        yield from _readable(value, report)


def _drop_cut_off(window: _Window, report: SourceReport, error: _MalformedJson) -> None:
    """Drops the last record of a file, within which it ends."""
    report.notes.append(
        f"the file is cut off in record {report.line} ({error.problem}): only the records before "
        "that one are used"
    )
    report.drop(CUT_OFF, window.text[window.offset : window.offset + CHUNK])


def _check_end(window: _Window, count: int) -> None:
    """Raises UserError if anything but white space follows the list, such as a second list."""
    window.offset += 1
    if window.peek():
        raise UserError(
            f"{window.path}: text follows the JSON list after record {count}, and all of it would "
            "be lost; one list, or one JSON record a line, would work"
        )


class _LongNumber:
    """Represents a record with an integer of over 4,300 digits, which Python does not convert."""


_DECODER = json.JSONDecoder()
_WITHOUT_INTEGERS = json.JSONDecoder(parse_int=lambda digits: 0)


def _decode(text: str, offset: int) -> tuple[object, int]:
    """Parses the JSON value at an offset; returns it and the offset after it.

    Raises:
      json.JSONDecodeError: there is no complete value.
      RecursionError: the value is nested too deeply.
    """
    try:
        return _DECODER.raw_decode(text, offset)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # An integer that is too long; reads the record again, without integers, to find its end.
        _, end = _WITHOUT_INTEGERS.raw_decode(text, offset)
        return _LongNumber(), end


def _read_value(window: _Window, advance: bool = True) -> object:
    """Parses the JSON value at the window's offset, growing the window until it has the whole
    value.

    Args:
      advance: whether to move its offset past the value.

    Raises:
      _MalformedJson: the value is malformed, or not complete at the end of the file.
    """
    size = CHUNK
    while True:
        malformed, value, end = None, None, len(window.text)
        try:
            value, end = _decode(window.text, window.offset)
        except json.JSONDecodeError as error:
            malformed = _MalformedJson(error.msg, error.pos)
        except RecursionError:
            malformed = _MalformedJson("nested too deeply", window.offset)
        # More of the file, which may be large, would not help.
        if malformed and not malformed.is_cut_off(window.text):
            raise malformed
        # A value that ends with the window may be a number that continues in the next chunk.
        if end == len(window.text) and window.grow(size):
            size *= 2  # so that work is linear in a long record's length
            continue
        if malformed:
            raise malformed
        if advance:
            window.offset = end
        return value


def _read_lines(window: _Window, report: SourceReport) -> Iterator[object]:
    line_number, valid = 0, 0
    malformed: list[int] = []
    at_end = False
    while not at_end:
        end = window.text.find("\n", window.offset)
        if end < 0 and window.grow(max(CHUNK, len(window.text) - window.offset)):
            continue
        at_end = end < 0
        line = window.text[window.offset :] if at_end else window.text[window.offset : end]
        window.offset = len(window.text) if at_end else end + 1
        line_number += 1
        report.line = line_number
        if line.strip(WHITE_SPACE):
            try:
                value, end = _decode(line, len(line) - len(line.lstrip(WHITE_SPACE)))
                if line[end:].strip(WHITE_SPACE):
                    raise json.JSONDecodeError("Extra data", line, end)
            except (json.JSONDecodeError, RecursionError):
                malformed.append(line_number)
                report.drop(CUT_OFF, line)
                continue
            valid += 1
            if isinstance(value, _LongNumber):
                report.drop(LONG_NUMBER, line)
            else:
                yield value
    if malformed:
        shown = ", ".join(map(str, malformed[:5])) + (", ..." if len(malformed) > 5 else "")
        report.notes.append(f"lines that are cut off or not JSON: {shown}")
    if malformed and not valid:
        raise UserError(
            f"{window.path}: none of its {line_number} lines is a JSON value by itself; "
            f"{WOULD_WORK}"
        )
