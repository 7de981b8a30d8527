r"""Finds which characters of a rendered conversation are trained on.

An assistant's turn is trained on from the end of the generation prompt to the end of the token that
ends the turn. Published templates differ in where these are (⟦ and ⟧ mark what is trained on):

  Qwen 3   <|im_start|>assistant\n⟦<think>\nHm.\n</think>\n\nSix.<|im_end|>⟧\n
           The generation prompt may end with an empty <think> block, which earlier answers lack.
  GLM      <|user|>\nHi<|assistant|>⟦Hello<|user|>⟧\nBye<|assistant|>⟦...
           Nothing ends a turn but the next turn's header, at whose token the model stops.
  Gemma 4  <|turn>model\n⟦<|tool_call>...<tool_call|><|tool_response>⟧response...⟦Sunny.<turn|>⟧\n
           The result of a call is within the assistant's turn, whose text may follow it.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import takewhile
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from data.conversation import Message
from data.templates.encoder import Control, find_controls, overlapping
from data.templates.errors import TemplateError
from data.templates.rendering import Rendered, Template
from data.tokenizer import Tokenizer

MAX_CALL_TURNS = 1_000  # most turns of a conversation with calls, which is rendered again for each
# Notes, as the report counts them.
NO_END = "no token that ends an answer is in the loss: the template writes none"
UNMARKED = "an answer outside the template's {% generation %} blocks, which alone are in the loss"
GUESSED = "the beginning of an answer guessed: the template's generation prompt is not before it"

Range = tuple[int, int]


class Written(NamedTuple):
    """A conversation and what its template made of it."""

    rendered: Rendered
    controls: Sequence[Control]
    messages: Sequence[Message]
    template: Template
    tokenizer: Tokenizer
    tools: Sequence[dict[str, Any]] = ()


class Trained(NamedTuple):
    """What is trained on."""

    ranges: list[Range]
    """Ranges of the text, in order."""
    notes: frozenset[str] = frozenset()
    """What is uncertain or missing, as the report counts it."""


class _Part(NamedTuple):
    """The position of a turn's text, or of a part of it between texts of other turns.

    Gemma 4's template writes an answer's text after the results of its calls.
    """

    start: int
    end: int
    previous_end: int
    """Where the text of other turns before it ends."""
    next_start: int
    """Where the text of other turns after it begins."""
    last_start: int
    """Where its last text begins, such as the last argument of a call."""
    last_field: str
    """The field of that text."""


def trained_ranges(written: Written) -> Trained:
    """Returns the ranges of the text that are trained on.

    With {% generation %} blocks in the template these are the blocks. Otherwise they are everything
    the assistant has to write in its turns: from the end of the generation prompt to the token that
    ends the turn. Turns whose `train` is False are excluded.
    """
    rendered, messages = written.rendered, written.messages
    answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
    trained = {number for number in answers if messages[number].train}
    if not trained:
        return Trained([])
    turns = _turns(rendered)
    if rendered.generated is not None:
        return _marked(rendered.generated, turns, trained, all_answers=len(trained) == len(answers))
    boundaries = _TurnBoundaries(written, turns)
    ranges: list[Range] = []
    is_ended = False
    for number in sorted(trained & turns.keys()):
        first, *others = turns[number]
        ranges.append((boundaries.start_of(number, first), boundaries.end_of(number, first)))
        ranges += [(part.start, boundaries.usual_end_of(part)) for part in others]
        is_ended |= ranges[-1][1] > turns[number][-1].end
    if ranges and not is_ended:
        boundaries.notes.add(NO_END)
    return Trained(sorted(ranges), frozenset(boundaries.notes))


def excluded_ranges(written: Written) -> Trained:
    """Returns the ranges of the text that are left out of a loss on everything: those of turns
    whose `train` is False.

    For an assistant's turn this is what `trained_ranges` would include; for others, their own text.
    """
    messages = written.messages
    excluded = {number for number, message in enumerate(messages) if not message.train}
    opposite = [replace(message, train=not message.train) for message in messages]
    left_out = trained_ranges(written._replace(messages=opposite)).ranges
    for number, parts in _turns(written.rendered).items() if excluded else ():
        if number in excluded and messages[number].role != "assistant":
            left_out = [*left_out, *((part.start, part.end) for part in parts)]
    return Trained(sorted(left_out))


def _marked(
    blocks: list[Range], turns: dict[int, list[_Part]], trained: set[int], all_answers: bool
) -> Trained:
    """Returns a template's {% generation %} blocks with text of the turns that are trained on; all
    blocks, if these are all answers."""
    ordered = sorted(blocks)
    covering = {
        number: {
            block for part in turns[number] for block in overlapping(ordered, part.start, part.end)
        }
        for number in trained & turns.keys()
    }
    ranges = blocks if all_answers else sorted(set().union(*covering.values()))
    return Trained(ranges, frozenset(() if all(covering.values()) else {UNMARKED}))


def _turns(rendered: Rendered) -> dict[int, list[_Part]]:
    """Returns the turns' positions in the text, by number; turns without text are absent.

    Parts of a call that are repeated after it, such as its name in the header of the result, do not
    count as the assistant's.
    """
    texts: list[tuple[int, int, str]] = []  # (start, end, field) of turns' texts, in order
    parts: list[tuple[int, list[int]]] = []  # turn, numbers of consecutive texts of it
    written: set[tuple] = set()  # parts of calls written so far
    repeated: set[int] = set()  # positions of text written before
    at = 0
    for length, source, offset in rendered.runs:
        if source is not None:
            text = (id(source), offset, length)
            if source.field == "tool_calls" and text in written:
                repeated.add(len(texts))
            written.add(text)
            if not parts or parts[-1][0] != source.turn:
                parts.append((source.turn, []))
            parts[-1][1].append(len(texts))
            texts.append((at, at + length, source.field))
        at += length
    turns: dict[int, list[_Part]] = {}
    for turn, numbers in parts:
        first, following = numbers[0], numbers[-1] + 1
        while numbers and numbers[-1] in repeated:
            numbers.pop()
        if not numbers:
            continue
        start, (last_start, end, field) = texts[first][0], texts[numbers[-1]]
        previous_end = texts[first - 1][1] if first else 0
        next_start = texts[following][0] if following < len(texts) else at
        part = _Part(start, end, previous_end, next_start, last_start, field)
        turns.setdefault(turn, []).append(part)
    return turns


class _TurnBoundaries:
    """Finds where the assistant's part of a turn begins and ends."""

    def __init__(self, written: Written, turns: dict[int, list[_Part]]):
        rendered, controls, messages, template, tokenizer, tools = written
        self._written = written
        self._text = rendered.text
        self._controls = controls
        self._messages = messages
        self._template = template
        self._tokenizer = tokenizer
        self._tools = tools
        self._turns = turns
        self.notes: set[str] = set()
        """What is uncertain, as the report counts it."""
        self._prompt: _GenerationPrompt | None = None
        self._texts = _template_texts(
            template.source,
            template.specials,
            template.date,
            json.dumps(template.variables, sort_keys=True, default=str),
            template.in_parts,
        )
        self._opening = _opening_of(self._texts, tokenizer)
        self._ending = _ending_of(self._texts, self._opening, tokenizer)
        self._first_of_user = _first_control(self._texts.user_header, tokenizer)
        self._end_token = _first_control(self._texts.after_last_answer, tokenizer)
        after = self._texts.after_last_answer.lstrip()
        self._is_last_ended = bool(self._end_token) and after.startswith(self._end_token)
        if len(messages) > MAX_CALL_TURNS and any(message.tool_calls for message in messages):
            raise TemplateError(
                f"a conversation with tool calls of more than {MAX_CALL_TURNS} turns"
            )

    def start_of(self, number: int, turn: _Part) -> int:
        """Returns where the generation prompt before a turn ends, or else where the turn's text
        begins."""
        gap = self._text[turn.previous_end : turn.start]
        if not number or not gap:
            return turn.start
        prompt = self._prompt_before(number)
        if gap == prompt.tail:
            return turn.start
        # Harmony writes an answer's empty reasoning as a message of its own, so two prompts precede
        # the text: the answer begins after the first. After a turn without text this may be that
        # turn's own prompt.
        length = prompt.end_in(gap, last=number - 1 not in self._turns)
        if length is not None:
            return turn.previous_end + length
        start = None
        if self._messages[number - 1].role == "tool":
            start = self._start_after_result(number, turn)
        if start is None:
            if gap.strip():  # more than a separator
                self.notes.add(GUESSED)
            start = self._start_as_of_text(number, turn)
        return start

    def _start_after_result(self, number: int, turn: _Part) -> int | None:
        """Returns where the generation prompt after a tool's result ends, which may be empty; None
        if it is not known.

        Apertus' template writes a prompt there that the turn itself lacks, since the assistant's
        turn goes on after a result; it begins after what ends the result.
        """
        gap = self._text[turn.previous_end : turn.start]
        for with_prompt in (True, False):
            try:
                prompt = self._template.render(self._messages[:number], self._tools, with_prompt)
            except TemplateError:
                continue
            tail = tail_of(prompt)
            known = tail.rstrip() or tail  # other white space may follow a header
            if gap.startswith(known) and (tail or self._text.startswith(prompt.text)):
                return turn.previous_end + _common_length(gap, tail)
        return None

    def _start_as_of_text(self, number: int, turn: _Part) -> int:
        """Returns where a turn begins, given that its header is what the generation prompt would
        write too, or what would precede an answer of text alone: the rest opens a call, or
        reasoning."""
        message, before = self._messages[number], self._messages[:number]
        if not message.tool_calls and message.reasoning is None:
            return turn.start
        starts = []
        for messages, with_prompt in (
            (before, True),
            ([*before, Message("assistant", "a")], False),
        ):
            try:
                rendered = self._template.render(messages, self._tools, with_prompt)
            except TemplateError:
                continue
            if with_prompt:
                starts.append(self._end_of_common(turn, tail_of(rendered)))
            elif parts := _turns(rendered).get(number):
                header = rendered.text[parts[0].previous_end : parts[0].start]
                starts.append(self._end_of_common(turn, header))
        return max(starts, default=turn.start)

    def _end_of_common(self, turn: _Part, header: str) -> int:
        """Returns where what precedes a turn ceases to equal a header, outside control tokens."""
        gap = self._text[turn.previous_end : turn.start]
        end = turn.previous_end + _common_length(gap, header)
        following = self._first_after(end)
        for control in self._controls[max(following - 1, 0) : following]:
            if control.token_end > end:  # both begin with other control tokens
                return control.token_start
        return end

    def _prompt_before(self, number: int) -> "_GenerationPrompt":
        """Returns the template's generation prompt, which is rendered before the first answer that
        needs it."""
        if self._prompt is None:
            self._prompt = _GenerationPrompt(self._written, number)
        return self._prompt

    def _opening_before(self, number: int) -> int | None:
        """Returns the id of the control token that opens turns: a user's, or if the template
        refuses conversations that show it, that of the answer with this number."""
        if self._opening is not None:
            return self._opening
        return self._prompt_before(number).opening

    def end_of(self, number: int, turn: _Part) -> int:
        """Returns the end of the token that ends a turn, or else of the turn's text."""
        if turn.last_field != "content":
            return self._end_of_call(number, turn)
        if (end := self.usual_end_of(turn)) > turn.end:
            return end
        return self._end_of_stop(turn.end, number, turn)

    def _end_of_call(self, number: int, turn: _Part) -> int:
        """Returns the end of the token that ends a call, or else of the call's text."""
        following = self._text[turn.end : turn.next_start]
        if number + 1 < len(self._messages):
            following = following[: _common_length(following, self._after_call(number, turn))]
        # The turn ends with a control token, after which the template may write more: a newline, or
        # the next turn's header if it always writes a generation prompt, as Command R7B's does.
        end = text_end = turn.end + len(following)
        for control in self._controls[self._first_after(turn.end) :]:
            if control.token_end > text_end:
                break
            if control.id == self._opening_before(number):
                end = min(end, control.token_start)
                break
            end = control.token_end
            if control.id == self._tokenizer.eos_id:  # nothing is generated after it
                break
        return self._end_of_stop(end, number, turn) if self._texts.has_no_end else end

    def _after_call(self, number: int, turn: _Part) -> str:
        """Returns what the template writes after a call, whatever turn follows it."""
        fallback: str | None = None
        for messages in self._cuts_after_call(number):
            try:
                cut = self._template.render(messages, self._tools)
            except TemplateError:
                continue
            parts = _turns(cut).get(number)
            rest = cut.text[parts[-1].end :] if parts else ""
            if parts and _last_text(cut.text, parts[-1]) == _last_text(self._text, turn):
                return rest
            if fallback is None:
                fallback = rest
        if fallback is not None:
            return fallback
        # The template refuses a call without a result.
        following = self._text[turn.end : turn.next_start]
        ended = self._end_token and self._end_token in following
        return following.partition(self._end_token)[0] + self._end_token if ended else ""

    def _cuts_after_call(self, number: int) -> Iterator[list[Message]]:
        """Yields conversations that show what a template writes after a call, the surest first."""
        *before, call = self._messages[: number + 1]
        yield [*before, call]
        if call.content:  # Gemma 4's writes it after the call, or after the results
            yield [*before, replace(call, content="")]
        # Apriel's writes the last turn's calls without their ids. The other turn differs from the
        # following one, whose header is not the call's.
        role = "assistant" if self._messages[number + 1].role == "user" else "user"
        yield [*before, call, Message(role, "a")]

    def _first_after(self, offset: int) -> int:
        """Returns the number of the first control token at or after an offset of the text."""
        return bisect_left(self._controls, offset, key=attrgetter("token_start"))

    def _end_of_stop(self, end: int, number: int, turn: _Part) -> int:
        """Returns the end of the control token after an answer at which a model stops.

        Args:
          end: where the answer's text ends, which is returned if there is none.
          number: the answer's number.
          turn: the answer.
        """
        following = self._messages[number + 1 : number + 2]
        if self._texts.has_no_end and following and following[0].role not in ("user", "tool"):
            return end  # a model stops at the headers of those who answer it
        first = self._first_after(end)
        if first == len(self._controls):
            return end
        control = self._controls[first]
        if control.start >= turn.next_start or self._text[end : control.start].strip():
            return end
        return end if self._opens_next_turn(first, turn) else control.token_end

    def _opens_next_turn(self, number: int, turn: _Part) -> bool:
        """Returns whether the control token after an answer begins the next turn's header.

        If a template ends an answer with nothing but the next header, as GLM-4's does, the model
        stops at that header's token. Training on it would be wrong if the token opens answers too,
        or if another token ends the last answer.
        """
        control, *later = self._controls[number : number + 2]
        header = self._text[control.token_start : turn.next_start]
        texts, first = self._texts, self._first_of_user
        if first and first in texts.answer_header and header.startswith(first):
            return True
        if later and not self._text[control.token_end : later[0].token_start].strip():
            return False  # an end token, with the header's first token after it
        token = self._text[control.token_start : control.token_end]
        if texts.answer_header.endswith(header) and token != self._tokenizer.eos_token:
            return True
        return self._is_last_ended and (
            texts.user_header.endswith(header) or texts.system_header.endswith(header)
        )

    def usual_end_of(self, turn: _Part) -> int:
        """Returns the end of what ends every answer, or else of the turn's text.

        Before the control tokens that end answers a template may write a text, or the end of the
        answer in other words.
        """
        at, first = turn.end, self._first_after(turn.end)
        if self._ending.is_token and first < len(self._controls):
            at = self._controls[first].token_start
        follows = self._text.startswith(self._ending.text, at, turn.next_start)
        return at + len(self._ending.text) if follows and self._ending.text else turn.end


class _TemplateTexts(NamedTuple):
    """What a template writes around turns; empty if it refuses the conversations that show them."""

    user_header: str = ""
    """Before a user's turn that is the first."""
    answer_header: str = ""
    """Between a user's turn and the answer."""
    after_any_answer: str = ""
    after_last_answer: str = ""
    system_header: str = ""
    has_no_end: bool = False
    """Whether nothing ends an answer but the header of the user's turn that follows."""


def _first_control(text: str, tokenizer: Tokenizer) -> str:
    """Returns the text of the first control token in a template's text; "" without one."""
    controls = find_controls(_plain(text), tokenizer).controls
    return text[controls[0].token_start : controls[0].token_end] if controls else ""


def _opening_of(texts: _TemplateTexts, tokenizer: Tokenizer) -> int | None:
    """Returns the id of the control token that opens a user's turn, and often any turn.

    Some templates write the next header after every answer. It begins as the conversation does.
    """
    bos = tokenizer.controls.get(tokenizer.bos_token or "")
    ids = (control.id for control in find_controls(_plain(texts.user_header), tokenizer).controls)
    return next((token for token in ids if bos is None or token != bos.id), None)


class _Ending(NamedTuple):
    """What ends every answer: control tokens, or else a text."""

    text: str = ""
    """Empty if there is neither."""
    is_token: bool = False


def _ending_of(texts: _TemplateTexts, opening: int | None, tokenizer: Tokenizer) -> _Ending:
    """Returns the control tokens that a template writes after every answer, or else the text.

    Command R7B's writes two end tokens. There are none if answers in the middle end differently
    from the last one, as in Harmony.
    """
    common = texts.after_any_answer
    controls = find_controls(_plain(common), tokenizer).controls
    ends = list(takewhile(lambda control: control.id != opening, controls))
    if ends:
        return _Ending(common[ends[0].token_start : ends[-1].token_end], is_token=True)
    if common == texts.after_last_answer:  # plain text ends an answer
        return _Ending(common.rstrip())
    return _Ending()


@lru_cache(maxsize=256)
def _template_texts(
    source: str,
    specials: tuple[tuple[str, str], ...],
    date: datetime,
    variables: str,
    in_parts: Literal["", "content", "reasoning"],
) -> _TemplateTexts:
    """Returns a template's texts around the turns of two questions and answers."""
    options = json.loads(variables)
    template = Template(source, specials, date, options, in_parts=in_parts)
    roles = ("user", "assistant", "user", "assistant")
    try:
        rendered = template.render([Message(role, "a") for role in roles])
    except TemplateError:
        return _TemplateTexts()
    turns = _turns(rendered)
    if not {0, 1, 3} <= turns.keys():
        return _TemplateTexts()
    middle = rendered.text[turns[1][-1].end : turns[1][-1].next_start]
    last = rendered.text[turns[3][-1].end :]
    user = rendered.text[: turns[0][0].start]
    return _TemplateTexts(
        user_header=user,
        answer_header=rendered.text[turns[1][0].previous_end : turns[1][0].start],
        after_any_answer=last[: _common_length(last, middle)],
        after_last_answer=last,
        system_header=_before_system(template, roles),
        has_no_end=not last.strip() and bool(middle.strip()) and user.endswith(middle),
    )


def _before_system(template: Template, roles: Sequence[str]) -> str:
    try:
        rendered = template.render([Message(role, "a") for role in ("system", *roles)])
    except TemplateError:
        return ""
    turns = _turns(rendered)
    return rendered.text[: turns[0][0].start] if 0 in turns else ""


class _GenerationPrompt:
    """A template's generation prompt; if it has none, the header of an answer."""

    def __init__(self, written: Written, number: int):
        """Renders what precedes an answer, given its number."""
        self._written = written
        self._before = written.messages[:number]
        self._whole: Rendered | None = None
        self.tail = ""
        """What follows the last turn's text, with the generation prompt. An answer after just this
        begins there: the usual case, which needs no other rendering."""
        try:
            self._whole = self._rendered(self._before, with_prompt=True)
            self.tail = tail_of(self._whole)
        except TemplateError:  # the template accepts complete conversations only
            pass

    @property
    def opening(self) -> int | None:
        """The id of its first control token."""
        return self._controls[0].id if self._controls else None

    def end_in(self, gap: str, last: bool) -> int | None:
        """Returns where it ends in the text between two turns, if it is there; None otherwise.

        Where it is there more than once, `last` selects the last one, otherwise it is the first.
        """
        # After a result, a template may leave out the prompt's first line end.
        text = self._text.lstrip() or self._text
        if not text:
            return self._header_end_in(gap)
        offset = gap.rfind(text) if last else gap.find(text)
        if offset >= 0:
            return offset + len(text)
        # Earlier answers may lack part of the prompt, such as an empty block of reasoning.
        removed = len(self._text) - len(text)
        ends = [control.end - removed for control in self._controls]
        if not ends or (offset := gap.rfind(text[: ends[0]])) < 0:
            return None
        common = _common_length(gap[offset:], text)
        line = text[:common].rfind("\n") + 1
        return offset + max(line, *(end for end in ends if end <= common))

    def _header_end_in(self, gap: str) -> int | None:
        """Returns where the header of an answer ends, as `end_in`."""
        if not self.tail or not gap.startswith(self.tail) or self._header is None:
            return None
        rest = gap[len(self.tail) :]
        common = _common_length(rest, self._header)
        is_other = bool(rest and self._header) and not common
        return None if is_other else len(self.tail) + common

    @cached_property
    def _text(self) -> str:
        """The generation prompt; "" if the template has none."""
        if self._whole is None:
            return ""
        try:
            without = self._rendered(self._before).text
        except TemplateError:
            without = ""
        return self._whole.text[_common_length(self._whole.text, without) :]

    @cached_property
    def _controls(self) -> Sequence[Control]:
        return find_controls(_plain(self._text), self._written.tokenizer).controls

    @cached_property
    def _header(self) -> str | None:
        """What a template without a generation prompt writes between `tail` and an answer's text;
        None if it refuses an answer."""
        try:
            answer = self._rendered([*self._before, Message("assistant", "a")])
        except TemplateError:
            return None
        parts = _turns(answer).get(len(self._before))
        gap = answer.text[parts[0].previous_end : parts[0].start] if parts else ""
        header = gap[len(self.tail) :] if gap.startswith(self.tail) else ""
        return header if header.strip() else ""

    def _rendered(self, messages: Sequence[Message], with_prompt: bool = False) -> Rendered:
        return self._written.template.render(messages, self._written.tools, with_prompt)


def _common_length(first: str, second: str) -> int:
    """Returns the length of two texts' common prefix."""
    if first.startswith(second):
        return len(second)
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))


def _last_text(text: str, part: _Part) -> str:
    """Returns the last of a turn's own texts in a part of it."""
    return text[part.last_start : part.end]


def _plain(text: str) -> Rendered:
    return Rendered(text, ((len(text), None, 0),), [])


def tail_of(rendered: Rendered) -> str:
    """Returns the text after a turn's last text."""
    length = 0
    for run_length, source, _ in reversed(rendered.runs):
        if source is not None:
            break
        length += run_length
    return rendered.text[len(rendered.text) - length :]
