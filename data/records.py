"""Raw JSON records of a file, one at a time: a JSON list or JSON lines, whole or cut off."""

import codecs
import json
from collections.abc import Callable, Iterator
from typing import BinaryIO

from data.errors import UserError
from data.paths import File
from data.report import SourceReport

CHUNK = 1 << 20  # bytes read at a time
SPACE = " \t\r\n"
CUT = "cut off or malformed JSON"
WOULD_WORK = "a JSON list of records, or one JSON record a line, would work"


class _Text:
    """A window of the file's text that grows on demand, so that memory is one record plus one chunk."""

    def __init__(self, path: File, file: BinaryIO, advance: Callable[[int], None] | None):
        self.path = path
        self.file = file
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
        self.advance = advance
        self.text, self.at, self.ended, self.bytes_read = "", 0, False, 0

    def more(self, size: int = CHUNK) -> bool:
        """Appends another chunk; False at the end of the file."""
        block = self.file.read(size)
        if not block:
            self.ended = True
            return False
        try:
            # A character cut in two at the very end stays in the decoder: such a file is cut, not of another encoding.
            self.text = self.text[self.at :] + self.decoder.decode(block)
        except UnicodeDecodeError as error:
            at = self.bytes_read + error.start
            raise UserError(f"{self.path}: byte {at} is not UTF-8 text; {WOULD_WORK}") from None
        self.at = 0
        self.bytes_read += len(block)
        if self.advance:
            self.advance(len(block))
        return True

    def peek(self) -> str:
        """The next character that is not white space, or '' at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in SPACE:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""


def read_records(
    path: File, account: SourceReport, advance: Callable[[int], None] | None = None
) -> Iterator[object]:
    """Yields every whole JSON value of the file's list (or lines). A malformed line, and the record in which a list is cut
    off, are dropped in `account`; the records before the cut are used.

    `advance(bytes)` is told what was read, for a progress bar. Raises UserError for a missing or empty file, for
    something that is neither a list nor lines of JSON, for text that is not UTF-8, and for a malformed record within a list:
    where the next one begins is not known, so that all that follows would be lost.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; {WOULD_WORK}")
    with path.unpacked() as opened:
        text = _Text(path, opened, advance)
        first = text.peek()
        if first == "":
            size = path.size()
            raise UserError(f"{path}: the file is empty ({size} bytes, no text); {WOULD_WORK}")
        if first == "[":
            text.at += 1
            yield from _list(text, account)
        elif first == "{":
            yield from _lines(text, account)
        else:
            raise UserError(f"{path}: begins with {first!r}, so it is no JSON; {WOULD_WORK} (a plain text with format: text)")


def _list(text: _Text, account: SourceReport) -> Iterator[object]:
    decoder = json.JSONDecoder()
    count = 0
    while True:
        mark = text.peek()
        if mark == "]":
            return
        if mark == "," and count:
            text.at += 1
            mark = text.peek()
        if mark == "":
            # `[ {..}, {..}` and then nothing: every record is whole, only the closing bracket is missing.
            account.notes.append(f"the JSON list has no end after record {count}: the file was cut there")
            return
        size = CHUNK
        while True:
            try:
                value, end = decoder.raw_decode(text.text, text.at)
                # A number at the window's end may go on in the next chunk; records are objects, so this is only care.
                if end < len(text.text) or text.ended:
                    break
            except json.JSONDecodeError as error:
                problem, place = error.msg, error.pos
            except RecursionError:
                problem, place = "nested too deeply", text.at
            if not text.more(size):
                if text.ended and _whole(decoder, text):
                    continue
                if not _cut(problem, place, text.text):
                    near = text.text[max(place - 20, text.at) : place + 20]
                    raise UserError(f"{text.path}: record {count + 1} is malformed ({problem} near {near!r}), and all after it "
                                    "would be lost; mending it, or one record a line (only bad lines are dropped), would work")
                account.notes.append(f"the file is cut off in record {count + 1} ({problem}): of it only the records before "
                                     "that one are used")
                account.drop(CUT, text.text[text.at : text.at + CHUNK])
                return
            size *= 2  # so that a very long record costs a linear number of retries
        text.at = end
        count += 1
        yield value


def _cut(problem: str, place: int, text: str) -> bool:
    """Whether a JSON value is malformed for no other reason than that the text ends in it: within a string, or at most an
    escape or a word such as `false` before the end."""
    return problem.startswith("Unterminated string") or place >= len(text.rstrip(SPACE)) - len("\\uD83D")


def _whole(decoder: json.JSONDecoder, text: _Text) -> bool:
    try:
        decoder.raw_decode(text.text, text.at)
        return True
    except (json.JSONDecodeError, RecursionError):
        return False


def _lines(text: _Text, account: SourceReport) -> Iterator[object]:
    number, whole, bad = 0, 0, []
    while True:
        end = text.text.find("\n", text.at)
        if end < 0 and text.more(max(CHUNK, len(text.text) - text.at)):
            continue
        last = end < 0
        line = text.text[text.at :] if last else text.text[text.at : end]
        text.at = len(text.text) if last else end + 1
        number += 1
        if line.strip(SPACE):
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                bad.append(number)
                account.drop(CUT, line)
            else:
                whole += 1
                yield value
        if last:
            break
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        account.notes.append(f"lines that are cut off or no JSON: {shown}")
    if bad and not whole:
        raise UserError(f"{text.path}: none of its {number} lines is JSON of its own; {WOULD_WORK}")
