"""Makes foreign text safe for a terminal, and the streams and consoles that commands print to."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

from data.errors import TransientError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Marks that reorder the text around them, which can make a line read as another; and line ends
# other than \n.
_REORDERING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_REPLACED = frozenset(_REORDERING + "\u2028\u2029")


def printable(text: str) -> str:
    """Replaces every character that a terminal would obey rather than show with U+FFFD.

    These are control characters other than line ends and tabs (escape sequences begin with one),
    marks that change the direction of writing, and halves of surrogate pairs, which cannot be
    written at all. All foreign text is printed through this function: data, file and field names, a
    hub's messages, other processes' messages.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        "\ufffd"
        if character in _REPLACED
        or (character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs"))
        else character
        for character in text
    )


class _Output:
    """A text stream that replaces what it cannot encode and drops what nobody reads.

    It fails only on a full disk: with a TransientError that names standard output.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes a text; returns its length."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        with self._dropped_where_nobody_reads():
            self.stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each of the lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes what has been written."""
        with self._dropped_where_nobody_reads():
            self.stream.flush()

    @contextlib.contextmanager
    def _dropped_where_nobody_reads(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            # A pipe without a reader, or a terminal that was closed.
            if not is_full and error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # Python would complain at exit about data left in the stream's buffer.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            if is_full and self.stream is not sys.__stderr__:  # which no message can reach
                raise TransientError(
                    f"standard output: {error.strerror}; with more room there, or another place "
                    "for it, the same command would work"
                ) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _PrintableOutput(_Output):
    """Such a stream that also lets nothing through that a terminal would obey."""

    def write(self, text: str) -> int:
        # Libraries' bars first return to the line's beginning; from there they can only overwrite
        # themselves.
        start = "\r" if text.startswith("\r") else ""
        super().write(start + printable(text[len(start) :]))
        return len(text)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Makes everything printed in the context printable and encodable, even if nobody reads it.

    To print colours or move the cursor, use `console` or `unfiltered`.
    """
    before = sys.stdout, sys.stderr
    # A stream is None if the process was started without it.
    out, err = (
        stream
        if stream is None or isinstance(stream, _Output)
        else cast(TextIO, _PrintableOutput(stream))
        for stream in before
    )
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        for stream in (out, err):
            if stream is not None:
                stream.flush()
        # Not if something else, such as a bar, has replaced the stream meanwhile and will restore
        # it.
        if sys.stdout is out:
            sys.stdout = before[0]
        if sys.stderr is err:
            sys.stderr = before[1]


def unfiltered(stream: TextIO) -> TextIO:
    """Returns the stream for output that moves the cursor, such as a bar; else as in `_Output`."""
    return cast(TextIO, _Output(stream.stream if isinstance(stream, _Output) else stream))


def console(stderr: bool = False, **settings: Any) -> Console:
    """Returns a console of rich that makes each text printable and keeps its own colours and moves.

    Args:
      stderr: whether it writes to standard error.
      settings: of rich's Console.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        """A console of printable text."""

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return PrintableConsole(file=unfiltered(sys.stderr if stderr else sys.stdout), **settings)


def plain_table(title: str | None = None) -> Table:
    """Returns a table of rich without lines, with its title at the left."""
    from rich.table import Table

    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
