"""Chat templates: which ids a conversation has, and which of them are trained on.

A Jinja template is rendered with marks in place of the turns' contents. The result is cut at the marks, so that it is known
which characters come from the template and which from a turn; only then are control tokens looked for, and only in the
template's own text.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from data.conversation import Message
from data.errors import UserError
from data.tokenizer import Tokenizer

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
CONTROLS = {
    "llama-3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
}
TRAIN_ON = ("all", "last")
# Iterations that a template may make for one conversation; those of published models make a few for each turn.
STEPS = 1_000_000
STEPS_PER_TURN = 1_000


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
) -> list[Segment]:
    """Returns the ids of a conversation, in segments that are trained on or not.

    For clean text (no white space at the ends of turns, no control tokens in them) the ids equal those of transformers'
    apply_chat_template; a control token that is typed in a turn remains text. BOS is added only where the template writes it.

    Trained on are the assistant's texts, what the generation prompt leaves for the assistant to write before a text (such as
    a space), and the end token that follows it; except in turns whose Message.train is False.

    Args:
        messages: the turns.
        template: the name of a chat template, one of NAMES.
        tokenizer: the tokenizer.
        add_generation_prompt: whether the heading of an assistant's turn follows the conversation.
        train_on: `all` turns of the assistant, or only its `last` one.

    Raises:
        TemplateError: the conversation does not fit the template.
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
    for piece in _layout(source, roles, specials, add_generation_prompt):
        if isinstance(piece, _Content):
            content = messages[piece.turn].content
            text = json.dumps(content, ensure_ascii=False) if piece.as_json else content
            encoder.add_content(text, piece.turn in trained_turns)
        else:
            encoder.add_template_text(piece, piece.answer in trained_turns)
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

    def add_template_text(self, piece: "_TemplateText", train_own: bool) -> None:
        """Adds text of the template; `train_own`: whether what of it the assistant has to write is trained on."""
        text, offset, border = piece.text, 0, len(piece.text) - piece.own
        for match in self._tokenizer.control_pattern.finditer(text):
            before = text[offset : match.start()]
            self._add_split(before, border - offset, train_own)
            self._train_end_token = self._train_end_token and not before.strip()
            if self._train_end_token:
                self._train_text_before_end_token(before)
            self._encode_texts()
            self._ids.append((self._tokenizer.controls[match.group(match.lastindex)].id, self._train_end_token))
            self._train_end_token = False
            offset = match.end()
        self._add_split(text[offset:], border - offset, train_own)
        self._train_end_token = False

    def finish(self) -> list[tuple[int, bool]]:
        """Returns the ids of the conversation, each with whether it is trained on."""
        self._encode_texts()
        return self._ids

    def _add(self, text: str, train: bool) -> None:
        if text:
            self._texts.append((text, train))

    def _add_split(self, text: str, border: int, train: bool) -> None:
        """Adds a text of which only what follows the offset `border` may be trained on."""
        border = max(border, 0)
        self._add(text[:border], False)
        self._add(text[border:], train)

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
    own: int
    """How many characters at the text's end the assistant has to write itself, since the generation prompt lacks them."""
    answer: int | None
    """The assistant's turn whose content follows the text, if one does."""


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
        own = len(part) - len(prompt) if answer is not None and prompt and part.startswith(prompt) else 0
        layout.append(_TemplateText(part, own, answer))
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


def _rendered_parts(
    source: str, roles: tuple[str, ...], specials: tuple[str | None, ...], add_generation_prompt: bool
) -> list[str | _Content]:
    """Renders a template with marks for contents and cuts it at them: texts and contents in the template's order.

    A mark is the turn's number between two Unicode noncharacters, which no other text contains.
    """
    messages = [{"role": role, "content": f"\ufdd0{number}\ufdd1"} for number, role in enumerate(roles)]
    names = zip(("bos_token", "eos_token", "pad_token"), specials, strict=True)
    compiled = _compile(source)
    compiled.environment.steps_left = STEPS + STEPS_PER_TURN * len(roles)
    try:
        text = compiled.render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
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
        if (times := turns[number]) != 1:
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

    def tojson(value: object, indent: int | None = None) -> str:
        # A mark in quotes becomes a mark that contains a quote; see _rendered_parts.
        return re.sub('"\ufdd0(\\d+)\ufdd1"', '\ufdd0\\1"\ufdd1', json.dumps(value, ensure_ascii=False, indent=indent))

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
