"""Chat templates: which ids a conversation has, and which of them are trained on.

A Jinja template is rendered with marks in place of the turns' contents. The result is cut at the marks, so that it is known
which characters come from the template and which from a turn; only then are control tokens looked for, and only in the
template's own text.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from data.conversation import Message
from data.errors import UserError
from data.tokenizer import Tokenizer
from data.tool_calls import map_texts

if TYPE_CHECKING:
    from jinja2 import Template

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


def _literal(text: str) -> str:
    """Returns a text as a string literal in a Jinja expression."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


_BOS = "{% if bos_token %}{{ bos_token }}{% endif %}"


def _two_role_template(name: str, system: str, user: str, answer: str, before_first: str = "") -> str:
    """Returns a template in FastChat's style ADD_COLON_TWO: a system text, then turns with headings, EOS after each answer.

    Args:
        name: the template's name, for messages.
        system: the system text of a conversation without a system turn.
        user: heading of a user's turn.
        answer: heading of an assistant's turn.
        before_first: what stands between the system text and the first turn.
    """
    return (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
        "{% else %}{% set system = " + _literal(system) + " %}{% set turns = messages %}{% endif %}"
        + _BOS + "{{ system }}"
        "{% for message in turns %}{% if message['role'] == 'user' %}"
        "{{ (" + _literal(before_first) + " if loop.first else '') + " + _literal(user) + " + message['content'] }}"
        "{% elif message['role'] == 'assistant' %}{{ " + _literal(answer) + " + message['content'] + eos_token }}"
        "{% else %}{{ raise_exception('" + name + " has no ' + message['role'] + ' turn') }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + _literal(answer.rstrip()) + " }}{% endif %}"
    )


def _control_token_template(bos: str, heading: str, end: str) -> str:
    """Returns a template in which control tokens mark the heading and the end of every turn, in any role.

    Args:
        bos: what the conversation begins with, in Jinja.
        heading: heading of a turn, in which ROLE stands for its role.
        end: what ends a turn; begins with a control token.
    """
    before, after = (_literal(part) for part in heading.split("ROLE"))
    return (
        bos + "{% for message in messages %}{{ " + before + " + message['role'] + " + after
        + " + message['content'] + " + _literal(end) + " }}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + _literal(heading.replace("ROLE", "assistant")) + " }}{% endif %}"
    )


_LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}{% for message in turns %}"
    "{% if message['role'] == 'user' %}" + _BOS +
    "{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('llama-2 has no ' + message['role'] + ' turn') }}{% endif %}{% endfor %}"
)
_PLAIN = (
    _BOS + "{% for message in messages %}{{ ('' if loop.first else '\\n\\n') + message['content'] }}{% endfor %}"
    "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)

# All are Jinja: training, evaluation and an exported model use the same text.
BUILT_IN = {
    # FastChat's, with the separators " " and "</s>".
    "vicuna_v1.1": _two_role_template("vicuna_v1.1", VICUNA_SYSTEM, "USER: ", " ASSISTANT: ", " "),
    "koala": _two_role_template("koala", "BEGINNING OF CONVERSATION:", "USER: ", " GPT: ", " "),
    # Meta's, as in transformers: BOS before each exchange, a space before EOS.
    "llama-2": _LLAMA_2,
    "llama-3": _control_token_template(_BOS, "<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"),
    "chatml": _control_token_template("", "<|im_start|>ROLE\n", "<|im_end|>\n"),
    # As in Stanford's train.py, without a space after the colon; further exchanges continue in the same way.
    "alpaca": _two_role_template("alpaca", ALPACA_SYSTEM, "\n\n### Instruction:\n", "\n\n### Response:"),
    # No names of roles: turns are separated by an empty line, EOS ends the conversation.
    "plain": _PLAIN,
}
VICUNA = BUILT_IN["vicuna_v1.1"]
NAMES = (*BUILT_IN, "tokenizer")
# Control tokens that a template writes besides the tokenizer's BOS and EOS.
GUARDED = "\ufdd2"  # a noncharacter within texts that are not to be found as control tokens
_MARKS = re.compile("[\ufdd0-\ufdd2]")
CONTROLS = {
    "llama-3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
}
TRAIN_ON = ("all", "last")
# Iterations that a template may make for one conversation; those of published models make a few for each turn.
STEPS = 1_000_000
STEPS_PER_TURN = 1_000
MAX_CALL_TURNS = 1_000  # turns of a conversation with tools, whose template is rendered for each answer


class TemplateError(UserError):
    """A conversation does not fit a template, such as one with a tool turn; `prepare` drops it."""


@dataclass(frozen=True)
class Segment:
    """Consecutive ids that are all trained on, or all not."""

    ids: tuple[int, ...]
    train: bool
    """Whether these ids, as targets, count in the loss."""


def jinja_template(template: str, tokenizer: Tokenizer) -> str:
    """Returns the chat template of this name in Jinja, as an exported model needs it.

    Raises:
        UserError: the name is unknown; the tokenizer has no chat template of its own (for the name `tokenizer`), or lacks the
            EOS token or the control tokens that the template writes.
    """
    if template == "tokenizer":
        if not tokenizer.chat_template:
            raise UserError("template `tokenizer`: this tokenizer has no chat template; vicuna_v1.1 would work")
        return tokenizer.chat_template
    if template not in BUILT_IN:
        raise UserError(f"template {template!r} is unknown; {', '.join(NAMES)} would work")
    missing = missing_controls(template, tokenizer)
    if missing:
        raise UserError(
            f"template {template} writes the control tokens {', '.join(missing)}, which the tokenizer lacks; "
            "data.add_control_tokens: true adds them with new embedding rows, template vicuna_v1.1 needs none"
        )
    if "eos_token" in BUILT_IN[template] and tokenizer.eos_token is None:
        raise UserError(f"template {template} writes EOS, and the tokenizer names no eos_token")
    return BUILT_IN[template]


def missing_controls(template: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the control tokens that a template needs and the tokenizer lacks; `Tokenizer.with_controls` adds them."""
    return tuple(token for token in CONTROLS.get(template, ()) if token not in tokenizer.controls)


def end_ids(template: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the id of the control token that ends an answer; empty if the template ends answers with text only."""
    try:
        segments = render([Message("user", "a"), Message("assistant", "a")], template, tokenizer)
    except TemplateError:  # the template needs more than these two turns
        return ()
    last = [segment.ids[-1] for segment in segments if segment.train][-1:]
    return tuple(token for token in last if token in {control.id for control in tokenizer.controls.values()})


def render(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    train_on: str = "all",
    tools: Sequence[dict[str, Any]] = (),
) -> list[Segment]:
    """Returns the ids of a conversation, in segments that are trained on or not.

    For clean text (no white space at the ends of turns, no control tokens in them) the ids equal those of transformers'
    apply_chat_template; a control token that is typed in a turn remains text. BOS is added only where the template writes it.

    Trained on are the assistant's texts, what the generation prompt leaves for the assistant to write before a text (such as
    a space), and the end token that follows it; except in turns whose Message.train is False. Of a turn with tool calls,
    everything is trained on that the template writes between the generation prompt and the turn's end token, with both calls
    and their marks.

    Args:
        messages: the turns.
        template: the name of a chat template, one of NAMES.
        tokenizer: the tokenizer.
        add_generation_prompt: whether the heading of an assistant's turn follows the conversation.
        train_on: `all` turns of the assistant, or only its `last` one.
        tools: descriptions of tools for the template; see `writes_tools`.

    Raises:
        TemplateError: the conversation does not fit the template, such as one with tool calls that it does not write.
        UserError: see `jinja_template`; or `train_on` is unknown.
    """
    if train_on not in TRAIN_ON:
        raise UserError(f"train_on {train_on!r} is unknown; {', '.join(TRAIN_ON)} would work")
    source = jinja_template(template, tokenizer)
    roles = tuple(message.role for message in messages)
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    trained_turns = {number for number in (answers if train_on == "all" else answers[-1:]) if messages[number].train}
    specials = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    encoder = _ConversationEncoder(tokenizer)
    if tools or any(message.tool_calls for message in messages):
        layout = _tool_layout(source, messages, tools, specials, add_generation_prompt, tokenizer)
    else:
        layout = _layout(source, roles, specials, add_generation_prompt)
    for piece in layout:
        if isinstance(piece, _Content):
            content = messages[piece.turn].content
            text = json.dumps(content, ensure_ascii=False) if piece.as_json else content
            encoder.add_content(text, piece.turn in trained_turns)
        else:
            encoder.add_template_text(piece, trained_turns)
    return _segments(encoder.finish())


class _ConversationEncoder:
    """Encodes a conversation from texts of the template and contents of turns.

    All text between two control tokens is encoded at once, because tokens form across the border of template and contents
    ("USER:" + " hello"). The offsets of the tokens then tell which of them are trained on.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[tuple[int, bool]] = []  # (id, is it trained on)
        self._texts: list[tuple[str, bool]] = []  # texts since the last control token; are they trained on
        self._beginning = True
        self._train_end_token = False  # whether the next control token ends an answer that is trained on

    def add_content(self, text: str, train: bool) -> None:
        """Adds the content of a turn."""
        self._add(text, train)
        self._train_end_token = train

    def add_template_text(self, piece: "_TemplateText", trained_turns: set[int]) -> None:
        """Adds text of the template, of which the parts that the assistant writes in these turns are trained on."""
        text, offset = piece.text, 0
        written = [part for part in piece.written if part.turn in trained_turns]
        for match in self._tokenizer.control_pattern.finditer(text):
            before = text[offset : match.start()]
            self._add_parts(text, offset, match.start(), written)
            self._train_end_token = self._train_end_token and not before.strip()
            if self._train_end_token:
                self._train_text_before_end_token(before)
            self._encode_texts()
            start = match.start(match.lastindex)
            in_call = any(part.start <= start < part.end for part in written if part.is_call)
            self._ids.append((self._tokenizer.controls[match.group(match.lastindex)].id, self._train_end_token or in_call))
            self._train_end_token = False
            offset = match.end()
        self._add_parts(text, offset, len(text), written)
        self._train_end_token = False

    def finish(self) -> list[tuple[int, bool]]:
        """Returns the ids of the conversation, each with whether it is trained on."""
        self._encode_texts()
        return self._ids

    def _add(self, text: str, train: bool) -> None:
        text = text.replace(GUARDED, "")
        if text:
            self._texts.append((text, train))

    def _add_parts(self, text: str, offset: int, end: int, trained: Sequence["_Written"]) -> None:
        """Adds text[offset:end], of which the given parts, which are in order, are trained on."""
        for part in trained:
            if offset < part.end and part.start < end:
                start = max(part.start, offset)
                self._add(text[offset:start], False)
                offset = min(part.end, end)
                self._add(text[start:offset], True)
        self._add(text[offset:end], False)

    def _train_text_before_end_token(self, text: str) -> None:
        # llama-2 writes a space between the answer and EOS: without it, the model would not get to EOS.
        if text and self._texts and self._texts[-1][0] == text:
            self._texts[-1] = (text, True)

    def _encode_texts(self) -> None:
        """Encodes the texts since the last control token; a token is trained on if any of its characters are."""
        trained_ranges, length = [], 0
        for text, train in self._texts:
            if train:
                trained_ranges.append((length, length + len(text)))
            length += len(text)
        spans = self._tokenizer.encode_spans("".join(text for text, _ in self._texts), self._beginning)
        self._texts, self._beginning = [], False
        index = 0  # of the first range that does not end before the token
        for token, start, end in spans:
            while index < len(trained_ranges) and trained_ranges[index][1] <= start:
                index += 1
            # A token without characters of its own lies where the next one begins.
            last = end if end > start else start + 1
            self._ids.append((token, index < len(trained_ranges) and trained_ranges[index][0] < last))


def _segments(ids: list[tuple[int, bool]]) -> list[Segment]:
    return [Segment(tuple(token for token, _ in group), train) for train, group in groupby(ids, key=itemgetter(1))]


class _Content(NamedTuple):
    """The content of a turn, in a rendered template."""

    turn: int
    as_json: bool
    """Whether the template writes it in quotes and escaped, as Llama 3.1's writes tool turns."""


class _TemplateText(NamedTuple):
    """Text between two contents, in a rendered template."""

    text: str
    written: tuple["_Written", ...] = ()
    """The parts of the text that the assistant has to write itself, in order."""


class _Written(NamedTuple):
    """Part of a template's text that the assistant has to write itself, since the generation prompt lacks it."""

    start: int
    end: int
    turn: int
    is_call: bool = False
    """Whether it belongs to a turn with tool calls, of which control tokens are trained on too."""


def _layout(
    source: str, roles: tuple[str, ...], specials: tuple[str | None, ...], add_generation_prompt: bool
) -> tuple[_Content | _TemplateText, ...]:
    """Returns the result of `_make_layout`, remembered for conversations of up to 64 turns: longer ones are rarely alike."""
    make = _remembered_layout if len(roles) <= 64 else _make_layout
    return make(source, roles, specials, add_generation_prompt)


def _make_layout(
    source: str, roles: tuple[str, ...], specials: tuple[str | None, ...], add_generation_prompt: bool
) -> tuple[_Content | _TemplateText, ...]:
    """Renders a template for turns of these roles.

    Args:
        source: the template in Jinja.
        roles: the role of each turn.
        specials: texts of BOS, EOS and the padding token.
        add_generation_prompt: whether the heading of an assistant's turn follows.
    """
    if not roles:
        raise TemplateError("a conversation without turns")
    parts = _rendered_parts(source, roles, specials, add_generation_prompt)
    prompt = _generation_prompt(source, roles, specials)
    layout: list[_Content | _TemplateText] = []
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(part, _Content):
            layout.append(part)
            continue
        answer = following.turn if isinstance(following, _Content) and roles[following.turn] == "assistant" else None
        written = answer is not None and prompt and len(prompt) < len(part) and part.startswith(prompt)
        layout.append(_TemplateText(part, (_Written(len(prompt), len(part), answer),) if written else ()))
    return tuple(layout)


# Jinja runs once for each sequence of roles.
_remembered_layout = lru_cache(maxsize=4096)(_make_layout)


def _generation_prompt(source: str, roles: tuple[str, ...], specials: tuple[str | None, ...]) -> str | None:
    """Returns what the template writes before the first answer when it asks for one; None if there is no such text."""
    first_answer = roles.index("assistant") if "assistant" in roles else 0
    if not first_answer:
        return None
    try:
        tail = _rendered_parts(source, roles[:first_answer], specials, True)[-1]
    except TemplateError:  # the template accepts complete conversations only
        return None
    return tail if isinstance(tail, str) else None


def writes_tools(template: str, tokenizer: Tokenizer) -> bool:
    """Returns whether a chat template reads descriptions of tools; those of the built-in ones are for text alone."""
    return re.search(r"\btools\b", jinja_template(template, tokenizer)) is not None


def _tool_layout(
    source: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], specials: tuple[str | None, ...],
    add_generation_prompt: bool, tokenizer: Tokenizer,
) -> list[_Content | _TemplateText]:
    """Renders a template for a conversation with tools.

    Calls and tools are rendered as they are, since templates look into them; only contents have marks. What the assistant
    writes in a turn is found by two more renderings: it begins where the generation prompt before it ends, and a turn with
    calls ends where the conversation up to it does.
    """
    if len(messages) > MAX_CALL_TURNS:
        raise TemplateError(f"a conversation with tools of more than {MAX_CALL_TURNS} turns")
    guard = partial(_guarded, tokenizer)
    fields = [_fields(message, guard) for message in messages]
    descriptions = map_texts(list(tools), guard) or None
    roles = tuple(message.role for message in messages)

    def parts_of(turns: int, prompt: bool) -> list[str | _Content]:
        return _rendered_parts(source, roles[:turns], specials, prompt, fields[:turns], descriptions)

    parts = parts_of(len(messages), add_generation_prompt)
    written: dict[int, list[_Written]] = {}  # by the number of the part
    for turn, message in enumerate(messages):
        if message.role != "assistant" or not turn:
            continue
        before = _after(parts_of(turn, True), turn - 1)
        if len(before) > 1:
            raise TemplateError(f"the chat template writes other turns after turn {turn - 1}")
        prompt, first = "".join(map(str, before)), _number_after(parts, turn - 1)
        if not message.tool_calls:
            text = parts[first]
            if isinstance(text, str) and text.startswith(prompt) and len(prompt) < len(text):
                written.setdefault(first, []).append(_Written(len(prompt), len(text), turn))
            continue
        alone = _after(parts_of(turn + 1, False), turn - 1)
        for number, (start, end) in _call_parts(parts[first:], alone, prompt, message, guard, tokenizer).items():
            written.setdefault(first + number, []).append(_Written(start, end, turn, is_call=True))
    return [
        part if isinstance(part, _Content) else _TemplateText(part, tuple(written.get(number, ())))
        for number, part in enumerate(parts)
    ]


def _call_parts(
    parts: Sequence[str | _Content], alone: Sequence[str | _Content], prompt: str, message: Message,
    guard: Callable[[str], str], tokenizer: Tokenizer,
) -> dict[int, tuple[int, int]]:
    """Returns what the assistant writes in a turn with tool calls: by the number of the part, (start, end).

    Args:
        parts: the rendered conversation after the turn before.
        alone: the same of the conversation that ends with the turn.
        prompt: what the generation prompt writes after the turn before.
        message: the turn.
        guard: see `_guarded`.
        tokenizer: the tokenizer.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for number, (part, other) in enumerate(zip(parts, alone, strict=False)):
        if isinstance(part, str) and isinstance(other, str):
            ranges[number] = (len(prompt) if number == 0 else 0, _common_length(part, other))
        if part != other:
            break
    last = max(ranges, default=0)
    text = parts[last] if ranges else ""
    call = "".join(parts[number][start:end] for number, (start, end) in ranges.items())
    names = [guard(call["function"]["name"]) for call in message.tool_calls]
    if not isinstance(parts[0], str) or not parts[0].startswith(prompt) or not all(name in call for name in names):
        raise TemplateError("the chat template does not write a turn's `tool_calls`; one that does, such as the model's own "
                            "(template: tokenizer), would work")
    start, end = ranges[last]
    # The turn ends with a control token, after which the template may write more, such as a line's end.
    ends = [match.end(match.lastindex) for match in tokenizer.control_pattern.finditer(text[:end])]
    ranges[last] = (start, ends[-1] if ends and ends[-1] > start else end)
    return ranges


def _common_length(first: str, second: str) -> int:
    """Returns how many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))


def _number_after(parts: Sequence[str | _Content], turn: int) -> int:
    """Returns the number of the part that follows the content of a turn.

    Raises:
        TemplateError: there is no such part, or no such content.
    """
    for number, part in enumerate(parts[:-1]):
        if isinstance(part, _Content) and part.turn == turn:
            return number + 1
    raise TemplateError(f"the chat template writes nothing after turn {turn}")


def _after(parts: Sequence[str | _Content], turn: int) -> Sequence[str | _Content]:
    """Returns the parts that follow the content of a turn."""
    number = next((number for number, part in enumerate(parts) if isinstance(part, _Content) and part.turn == turn), None)
    return parts[number + 1 :] if number is not None else ()


def _guarded(tokenizer: Tokenizer, text: str) -> str:
    """Returns a text of a call or a tool in which no control token is found: each has GUARDED after its first letter."""
    return tokenizer.guard_controls(_MARKS.sub("\ufffd", text), GUARDED)


def _fields(message: Message, guard: Callable[[str], str]) -> dict[str, Any]:
    """Returns the fields of a turn that a template sees, besides its content."""
    fields = {"tool_call_id": message.tool_call_id, "name": message.name}
    fields = {name: guard(text) for name, text in fields.items() if text is not None}
    if message.tool_calls:
        fields["tool_calls"] = map_texts(message.tool_calls, guard)
        if not message.content:  # templates ask whether there is any
            fields["content"] = ""
    return fields


def _rendered_parts(
    source: str, roles: tuple[str, ...], specials: tuple[str | None, ...], add_generation_prompt: bool,
    fields: Sequence[dict[str, Any]] = (), tools: list | None = None,
) -> list[str | _Content]:
    """Renders a template with marks for contents and cuts it at them: texts and contents in the template's order.

    A mark is the turn's number between two Unicode noncharacters, which no other text contains.

    Args:
        source: the template in Jinja.
        roles: the role of each turn.
        specials: texts of BOS, EOS and the padding token.
        add_generation_prompt: whether the heading of an assistant's turn follows.
        fields: further fields of each turn, see `_fields`; a turn's `content` among them replaces its mark.
        tools: descriptions of tools.
    """
    messages = [{"role": role, "content": f"\ufdd0{number}\ufdd1"} for number, role in enumerate(roles)]
    for message, more in zip(messages, fields, strict=False):
        message.update(more)
    names = zip(("bos_token", "eos_token", "pad_token"), specials, strict=True)
    compiled = _compile(source)
    compiled.environment.steps_left = STEPS + STEPS_PER_TURN * len(roles)
    try:
        text = compiled.render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=None,
            **{name: token for name, token in names if token is not None},
        )
    except UserError:
        raise
    except Exception as error:  # Jinja's own errors and whatever a template's expressions raise
        turns = ", ".join(roles[:8]) + ", ..." * (len(roles) > 8)
        raise TemplateError(f"the chat template refuses turns {turns}: {str(error)[:200]}") from None
    parts: list[str | _Content] = []
    pieces = text.split("\ufdd0")
    if pieces[0]:
        parts.append(pieces[0])
    for piece in pieces[1:]:
        mark, _, following_text = piece.partition("\ufdd1")
        # A quote in the mark is put there by tojson, see _compile.
        parts.append(_Content(int(mark.rstrip('"')), as_json=mark.endswith('"')))
        if following_text:
            parts.append(following_text)
    turns = Counter(part.turn for part in parts if isinstance(part, _Content))
    for number, role in enumerate(roles):
        # Some templates leave out the text beside a call.
        if (times := turns[number]) != 1 and not (times == 0 and "tool_calls" in messages[number]):
            raise TemplateError(
                f"the chat template writes turn {number} ({role}) {times} times, not once and without changes"
            )
    return parts


@lru_cache(maxsize=32)
def _compile(source: str) -> "Template":
    """Compiles a template in the same Jinja environment as transformers', without strftime_now.

    Templates that would print today's date then print their fixed one.
    """
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Counts iterations, calls and the sizes of texts, so that no template runs for ever or fills the memory."""

        intercepted_binops = frozenset(["+", "*", "**"])
        steps_left = 0

        def count(self, steps: int = 1) -> None:
            self.steps_left -= steps
            if self.steps_left < 0:
                raise TemplateError("the chat template goes on and on: too many iterations")

        def _parse(self, *arguments):
            template = super()._parse(*arguments)
            for loop in list(template.find_all(nodes.For)):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
            for concat in list(template.find_all(nodes.Concat)):
                concat.nodes = [nodes.Filter(node, "sized", [], [], None, None, lineno=node.lineno) for node in concat.nodes]
            return template

        def sized(self, value: object) -> object:
            if isinstance(value, str | list | tuple):
                self.count(len(value) // 100)
            return value

        def counted(self, values: Iterable[object]) -> Iterator[object]:
            for value in values:
                self.count()
                yield value

        def range(self, *arguments: int) -> range:
            numbers = range(*arguments)
            self.count(len(numbers))
            return numbers

        def call(self, context, function, *arguments, **options):
            self.count(20)  # a macro's call takes as long as many iterations
            return super().call(context, function, *arguments, **options)

        def call_binop(self, context, operator, left, right):
            both = isinstance(left, int) and isinstance(right, int)
            if both and operator != "+" and left.bit_length() * (right if operator == "**" else 1) > 10_000:
                raise TemplateError("the chat template computes a number of thousands of digits")
            for text, number in ((left, right), (right, left)):
                if operator == "*" and isinstance(text, str | list | tuple) and isinstance(number, int):
                    self.count(len(text) * max(number, 0) // 100)
            return self.sized(super().call_binop(context, operator, left, right))

    class Generation(Extension):
        """{% generation %}, which marks the assistant's text for transformers' masks, and has no effect here."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(f"the chat template refuses: {message}")

    def tojson(
        value: object, ensure_ascii: bool = False, indent: int | None = None,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        # A mark in quotes becomes a mark that contains a quote; see _rendered_parts.
        return re.sub('"\ufdd0(\\d+)\ufdd1"', '\ufdd0\\1"\ufdd1', text)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.filters.update(counted=environment.counted, sized=environment.sized)
    environment.globals["range"] = environment.range
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UserError(f"the tokenizer's chat template is not Jinja: line {error.lineno}: {error.message}") from None
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:  # of the compiler, or of constants
        raise UserError(f"the tokenizer's chat template cannot be compiled ({type(error).__name__})") from None
