"""The origin of each character of a text, as runs of characters with the same source."""

from collections.abc import Iterable, Sequence


class Source:
    """A text that a conversation passes to the template, such as a turn's content."""

    __slots__ = ("field", "found", "needles", "text", "turn")

    def __init__(self, turn: int, field: str, text: str):
        """Args: the turn's number (-1 for descriptions of tools), its field, and the text."""
        self.turn, self.field, self.text = turn, field, text
        self.needles: set[str] = set()
        """The template's texts that it looked for anywhere in this one."""
        self.found: list[tuple[int, int]] = []
        """Ranges where it found texts that it looked for only in one place, such as the
        beginning."""


Run = tuple[int, Source | None, int | None]
"""(number of characters, their source or None for the template's own text, offset in the source).

The offset is None where characters were escaped on the way."""


def of_turns(runs: Iterable[Run]) -> bool:
    """Returns whether any character is a turn's rather than the template's."""
    return any(source for _, source, _ in runs)


def joined(texts: Iterable[Sequence[Run]]) -> list[Run]:
    """Returns the runs of concatenated texts."""
    runs: list[Run] = []
    last: Run | None = None
    for text in texts:
        for run in text:
            if last is not None and last[1] is run[1] and _continues(last, run):
                last = runs[-1] = (last[0] + run[0], run[1], last[2])
            else:
                runs.append(run)
                last = run
    return runs


def _continues(before: Run, run: Run) -> bool:
    """Returns whether a run of the same text continues the one before it."""
    if run[1] is None or (before[2] is None and run[2] is None):
        return True
    return before[2] is not None and before[2] + before[0] == run[2]


def cut(runs: Sequence[Run], ranges: Iterable[tuple[int, int]]) -> list[list[Run]]:
    """Returns the runs of each range (start, end). Ranges are in order and do not overlap."""
    cuts = []
    number = at = 0  # the first run that may overlap the range, and its start
    for start, end in ranges:
        within: list[Run] = []
        while number < len(runs) and at + runs[number][0] <= start:
            at += runs[number][0]
            number += 1
        following, begin = number, at
        while following < len(runs) and begin < end:
            length, source, offset = runs[following]
            low, high = max(start, begin), min(end, begin + length)
            if low < high:
                shifted = None if offset is None else offset + low - begin
                within.append((high - low, source, shifted))
            begin += length
            following += 1
        cuts.append(within)
    return cuts
