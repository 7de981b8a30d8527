"""Finds which characters of a rendered conversation are trained on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from data.conversation import Message
from data.templates.encoder import Control, find_controls
from data.templates.errors import TemplateError
from data.templates.rendering import Rendered, Template
from data.tokenizer import Tokenizer

MAX_CALL_TURNS = (
    1_000  # turns of a conversation with calls, which is rendered once more for each of them
)

Range = tuple[int, int]


class _Turn(NamedTuple):
    """Where a turn is in the text."""

    start: int
    end: int
    whole: bool
    """Whether no other turn's text stands between its own."""
    own: list[Range]
    previous_end: int
    """Where the text of turns before it ends."""
    next_start: int
    """Where the text of turns after it begins."""
    last_field: str
    """The field of its last character."""


def trained_ranges(
    rendered: Rendered,
    controls: Sequence[Control],
    messages: Sequence[Message],
    template: Template,
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] = (),
) -> list[Range]:
    """Returns the ranges of the text that are trained on, in order.

    With {% generation %} blocks in the template these are the blocks. Without them, they are all
    that the assistant has to write in its turns: from where the generation prompt ends to the token
    that ends the turn. Turns whose `train` is False are left out.
    """
    answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
    trained = {number for number in answers if messages[number].train}
    if not trained:
        return []
    turns = _turns(rendered)
    if rendered.generated is not None:
        return [
            block
            for block in rendered.generated
            if _block_is_trained(block, turns, answers, trained)
        ]
    finder = _Borders(rendered, controls, messages, template, tokenizer, tools)
    ranges: list[Range] = []
    for number in answers:
        turn = turns.get(number)
        if turn is None or number not in trained:
            continue
        if not turn.whole:
            ranges += turn.own
            continue
        ranges.append((finder.start_of(number, turn), finder.end_of(number, turn)))
    return sorted(ranges)


def _block_is_trained(
    block: Range, turns: dict[int, _Turn], answers: list[int], trained: set[int]
) -> bool:
    if len(trained) == len(answers):
        return True
    inside = [
        number
        for number, turn in turns.items()
        if any(s < block[1] and block[0] < e for s, e in turn.own)
    ]
    return bool(trained & set(inside))


def _turns(rendered: Rendered) -> dict[int, _Turn]:
    """Returns where turns are in the text, by number; turns without text are absent.

    What a template writes of a call once more after it, such as its name in the heading of the
    result, is not the assistant's.
    """
    places: list[
        tuple[int, int, int, str]
    ] = []  # (start, end, turn, field) of the text of turns, in order
    own: dict[int, list[int]] = {}  # turn -> numbers of its places
    written: set[tuple] = set()  # what of calls has been written
    repeated: set[int] = set()  # places of what has been written before
    at = 0
    for length, source, offset in rendered.runs:
        if source is not None:
            part = (id(source), offset, length)
            if source.field == "tool_calls" and part in written:
                repeated.add(len(places))
            written.add(part)
            own.setdefault(source.turn, []).append(len(places))
            places.append((at, at + length, source.turn, source.field))
        at += length
    turns = {}
    for turn, numbers in own.items():
        following = numbers[-1] + 1
        while numbers[-1] in repeated:
            numbers.pop()
        first, last = numbers[0], numbers[-1]
        turns[turn] = _Turn(
            places[first][0],
            places[last][1],
            last - first + 1 == len(numbers),
            [places[n][:2] for n in numbers],
            places[first - 1][1] if first else 0,
            places[following][0] if following < len(places) else at,
            places[last][3],
        )
    return turns


class _Borders:
    """Finds where the assistant's part of a turn begins and ends."""

    def __init__(
        self,
        rendered: Rendered,
        controls: Sequence[Control],
        messages: Sequence[Message],
        template: Template,
        tokenizer: Tokenizer,
        tools: Sequence[dict[str, Any]],
    ):
        self._text = rendered.text
        self._controls = controls
        self._messages, self._template, self._tokenizer, self._tools = (
            messages,
            template,
            tokenizer,
            tools,
        )
        self._before: Sequence[Message] = ()
        self._prompt: Rendered | None = None
        """What the template writes before the first answer, with the generation prompt."""
        self._prompt_tail = ""
        """Of that, what follows the text of the last turn."""
        self._heading: _Heading | None = None
        self._number = 0  # of the first control token that may follow an answer
        if len(messages) > MAX_CALL_TURNS and any(message.tool_calls for message in messages):
            raise TemplateError(
                f"a conversation with tool calls of more than {MAX_CALL_TURNS} turns"
            )

    def start_of(self, number: int, turn: _Turn) -> int:
        """Returns where the generation prompt before a turn ends, or the turn's own text begins."""
        gap = self._text[turn.previous_end : turn.start]
        if not number or not gap:
            return turn.start
        if self._prompt is None and self._heading is None:
            self._prompt_before(number)
        if gap == self._prompt_tail:
            return turn.start
        if self._heading is None:
            self._heading = self._find_heading()
        length = self._heading.length_in(gap)
        return turn.start if length is None else turn.previous_end + length

    def _prompt_before(self, number: int) -> None:
        """Renders what precedes a turn, with the generation prompt."""
        self._before = self._messages[:number]
        try:
            self._prompt = self._template.render(self._before, self._tools, True)
            # Where just this stands before an answer, the generation prompt ends where the answer
            # begins: the usual case, for which nothing else has to be rendered.
            self._prompt_tail = _tail(self._prompt)
        except TemplateError:  # the template accepts complete conversations only
            self._heading = _Heading("")

    def _find_heading(self) -> "_Heading":
        """Returns the generation prompt that `_prompt_before` rendered."""
        before, prompt = self._before, self._prompt
        assert prompt is not None
        try:
            without = self._template.render(before, self._tools).text
        except TemplateError:
            without = ""
        heading = prompt.text[_common_length(prompt.text, without) :]
        if heading:
            controls = find_controls(_plain(heading), self._tokenizer).controls
            return _Heading(heading, [control.end for control in controls])
        # The template has no generation prompt: what stands before any answer is not the
        # assistant's.
        tail = self._prompt_tail
        try:
            answer = self._template.render([*before, Message("assistant", "a")], self._tools)
        except TemplateError:
            return _Heading("")
        turn = _turns(answer).get(len(before))
        usual = answer.text[turn.previous_end : turn.start] if turn else ""
        usual = usual[len(tail) :] if usual.startswith(tail) else ""
        return _Heading("", tail=tail, usual=usual if usual.strip() else "")

    def end_of(self, number: int, turn: _Turn) -> int:
        """Returns where the token that ends a turn ends, or the turn's own text."""
        text, controls = self._text, self._controls
        if turn.last_field == "content":
            while self._number < len(controls) and controls[self._number].token_start < turn.end:
                self._number += 1
            following = controls[self._number] if self._number < len(controls) else None
            ends = (
                following
                and following.start < turn.next_start
                and not text[turn.end : following.start].strip()
            )
            return following.token_end if following and ends else turn.end
        after = text[turn.end : turn.next_start]
        if number + 1 < len(self._messages):
            try:
                alone = self._template.render(self._messages[: number + 1], self._tools)
            except TemplateError:
                return turn.end
            place = _turns(alone).get(number)
            rest = alone.text[place.end :] if place else ""
            after = after[: _common_length(after, rest)]
        # The turn ends with a control token, after which the template may write more, such as a
        # line's end.
        end = turn.end + len(after)
        after_it = [
            control.token_end
            for control in controls
            if turn.end <= control.token_start and control.token_end <= end
        ]
        return after_it[-1] if after_it else end


class _Heading:
    """What a template writes before the assistant's part of a turn."""

    def __init__(self, text: str, ends: Sequence[int] = (), tail: str = "", usual: str = ""):
        """Args:
        text: the generation prompt, or "". ends: where control tokens in it end. tail: without a
        generation prompt, what is written between the text of the turn before and the answer's
        heading. usual: without a generation prompt, the heading of an answer.
        """
        self._text, self._ends, self._tail, self._usual = text, ends, tail, usual

    def length_in(self, gap: str) -> int | None:
        """Returns where the heading ends in the text before a turn; None if it is not there."""
        if not self._text:
            if not self._tail or not gap.startswith(self._tail):
                return None
            return len(self._tail) + _common_length(gap[len(self._tail) :], self._usual)
        place = gap.rfind(self._text)
        if place >= 0:
            return place + len(self._text)
        # Earlier answers may lack a part of the prompt, such as an empty block of reasoning.
        if not self._ends or (place := gap.rfind(self._text[: self._ends[0]])) < 0:
            return None
        common = _common_length(gap[place:], self._text)
        line = self._text[:common].rfind("\n") + 1
        return place + max(line, *(end for end in self._ends if end <= common))


def _common_length(first: str, second: str) -> int:
    """Returns how many characters two texts have in common at their beginning."""
    if first.startswith(second):
        return len(second)
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))


def _plain(text: str) -> Rendered:
    return Rendered(text, ((len(text), None, 0),), [])


def _tail(rendered: Rendered) -> str:
    """Returns what follows the last text of a turn."""
    length = 0
    for run_length, source, _ in reversed(rendered.runs):
        if source is not None:
            break
        length += run_length
    return rendered.text[len(rendered.text) - length :]
