"""Conversations to ids: a Jinja chat template is rendered with marks in place of contents, cut there, and encoded."""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from data.conversation import Message
from data.errors import UserError
from data.tokenizer import Tokenizer

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


def _literal(text: str) -> str:
    """A text as Jinja writes it in an expression."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


_BOS = "{% if bos_token %}{{ bos_token }}{% endif %}"


def _dialogue(name: str, system: str, user: str, answer: str, lead: str = "") -> str:
    """A system text (the conversation's own instead, if it has one) and `lead`, then the turns, each under its heading and
    each answer ended by EOS: FastChat's style ADD_COLON_TWO."""
    return (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
        "{% else %}{% set system = " + _literal(system) + " %}{% set turns = messages %}{% endif %}"
        + _BOS + "{{ system }}"
        "{% for message in turns %}{% if message['role'] == 'user' %}"
        "{{ (" + _literal(lead) + " if loop.first else '') + " + _literal(user) + " + message['content'] }}"
        "{% elif message['role'] == 'assistant' %}{{ " + _literal(answer) + " + message['content'] + eos_token }}"
        "{% else %}{{ raise_exception('" + name + " has no ' + message['role'] + ' turn') }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + _literal(answer.rstrip()) + " }}{% endif %}"
    )


def _headed(bos: str, head: str, end: str) -> str:
    """Every role, tool turns too, under a heading of control tokens and closed by one; `end` begins with that one."""
    before, after = (_literal(part) for part in head.split("ROLE"))
    return (
        bos + "{% for message in messages %}{{ " + before + " + message['role'] + " + after
        + " + message['content'] + " + _literal(end) + " }}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + _literal(head.replace("ROLE", "assistant")) + " }}{% endif %}"
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

# All are Jinja, so that what is trained with, what chat asks with and what an exported model carries are the same text.
BUILT_IN = {
    # FastChat's: separators " " and "</s>".
    "vicuna_v1.1": _dialogue("vicuna_v1.1", VICUNA_SYSTEM, "USER: ", " ASSISTANT: ", " "),
    "koala": _dialogue("koala", "BEGINNING OF CONVERSATION:", "USER: ", " GPT: ", " "),
    # Meta's, as transformers carries it: BOS before each exchange, a space before EOS.
    "llama-2": _LLAMA_2,
    "llama-3": _headed(_BOS, "<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"),
    "chatml": _headed("", "<|im_start|>ROLE\n", "<|im_end|>\n"),
    # Stanford's train.py, where the answer follows the colon at once; further exchanges go on in the same way.
    "alpaca": _dialogue("alpaca", ALPACA_SYSTEM, "\n\n### Instruction:\n", "\n\n### Response:"),
    # No names of roles: turns apart by an empty line, EOS at the end of all.
    "plain": _PLAIN,
}
VICUNA = BUILT_IN["vicuna_v1.1"]
NAMES = (*BUILT_IN, "tokenizer")
# Control tokens that a template writes by their text, beside the tokenizer's own BOS and EOS.
CONTROLS = {
    "llama-3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
}
TRAIN_ON = ("all", "last")


class TemplateError(UserError):
    """This conversation does not fit this template (a tool turn where there is none); `prepare` counts and drops it."""


@dataclass(frozen=True)
class Segment:
    """Consecutive ids with one answer to `train`: is the loss taken on predicting them?"""

    ids: tuple[int, ...]
    train: bool


def jinja_template(template: str, tokenizer: Tokenizer) -> str:
    """The Jinja chat template that a template's name stands for, equal in text and ids; for an exported model.

    Raises UserError for an unknown name, a tokenizer without a template of its own, one without an EOS token that the
    template needs, or one that lacks the template's control tokens.
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
    """The control tokens that a template needs and the tokenizer lacks: what `Tokenizer.with_controls` would add."""
    return tuple(token for token in CONTROLS.get(template, ()) if token not in tokenizer.controls)


def end_ids(template: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The control token that ends an answer, to stop at: one id, or none where a template ends answers by text alone."""
    try:
        segments = render([Message("user", "a"), Message("assistant", "a")], template, tokenizer)
    except TemplateError:  # a template that asks for more than these two turns
        return ()
    last = [segment.ids[-1] for segment in segments if segment.train][-1:]
    return tuple(token for token in last if token in {control.id for control in tokenizer.controls.values()})


def render(
    messages: tuple[Message, ...] | list[Message],
    template: str,
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    train_on: str = "all",
) -> list[Segment]:
    """A conversation's ids, cut where `train` changes; joined, they are all its ids in order.

    Trained on: assistant text, whatever the generation prompt leaves before it (a space), and the end token right after
    it; of every assistant turn (train_on "all") or only the last one ("last"), and never where Message.train is False.
    For clean text (no white space at the ends, no control tokens) the ids equal `transformers`'
    apply_chat_template;
    a typed control token stays text. BOS only where the template writes it. Raises TemplateError (a UserError).
    """
    if train_on not in TRAIN_ON:
        raise UserError(f"train_on {train_on!r} is unknown; {', '.join(TRAIN_ON)} would work")
    source = jinja_template(template, tokenizer)
    roles = tuple(message.role for message in messages)
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    in_loss = {number for number in (answers if train_on == "all" else answers[-1:]) if messages[number].train}
    specials = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    pieces = _pieces(source, roles, specials, add_generation_prompt)
    ids: list[tuple[int, bool]] = []
    run = _Run(tokenizer)
    ends_turn = False  # the next control token ends an assistant's text that is in the loss
    for piece in pieces:
        if isinstance(piece, _Content):
            ends_turn, content = piece.turn in in_loss, messages[piece.turn].content
            run.add(json.dumps(content, ensure_ascii=False) if piece.as_json else content, ends_turn)
            continue
        text, own, answer = piece
        train_own = answer in in_loss
        # `own` characters at the end of the text are the assistant's to write, though the template writes them.
        at, border = 0, len(text) - own
        for match in tokenizer.control_pattern.finditer(text):
            run.add_template(text[at : match.start()], border - at, train_own)
            ends_turn = ends_turn and not text[at : match.start()].strip()
            if ends_turn:
                run.train_all_of_tail(text[at : match.start()])
            ids += run.finish()
            ids.append((tokenizer.controls[match.group(match.lastindex)].id, ends_turn))
            ends_turn = False
            at = match.end()
        run.add_template(text[at:], border - at, train_own)
        ends_turn = False
    ids += run.finish()
    return _segments(ids)


class _Run:
    """Text between two control tokens, of template and contents together: it must be encoded in one go, because tokens
    form across their borders ("USER:" + " hello"), and only the places then tell which tokens are the assistant's."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.parts: list[tuple[str, bool]] = []
        self.beginning = True

    def add(self, text: str, train: bool) -> None:
        if text:
            self.parts.append((text, train))

    def add_template(self, text: str, border: int, train: bool) -> None:
        border = max(border, 0)
        self.add(text[:border], False)
        self.add(text[border:], train)

    def train_all_of_tail(self, tail: str) -> None:
        # llama-2 writes a space between answer and EOS: the model has to write it as well, or it never gets to EOS.
        if tail and self.parts and self.parts[-1][0] == tail:
            self.parts[-1] = (tail, True)

    def finish(self) -> list[tuple[int, bool]]:
        trained, length, text = [], 0, "".join(part for part, _ in self.parts)
        for part, train in self.parts:
            if train:
                trained.append((length, length + len(part)))
            length += len(part)
        spans = self.tokenizer.encode_spans(text, self.beginning)
        self.parts, self.beginning = [], False
        result, next_one = [], 0
        for token, start, end in spans:
            while next_one < len(trained) and trained[next_one][1] <= start:
                next_one += 1
            inside = next_one < len(trained) and (
                trained[next_one][0] < end if end > start else trained[next_one][0] <= start
            )
            result.append((token, inside))
        return result


def _segments(ids: list[tuple[int, bool]]) -> list[Segment]:
    segments, start = [], 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at][1] != ids[start][1]:
            segments.append(Segment(tuple(token for token, _ in ids[start:at]), ids[start][1]))
            start = at
    return segments


class _Content(NamedTuple):
    """Where a template writes the content of a turn, by its number; as_json: in quotes and escaped (Llama 3.1's tool turns)."""

    turn: int
    as_json: bool


@lru_cache(maxsize=4096)
def _pieces(source: str, roles: tuple[str, ...], specials: tuple, add_generation_prompt: bool) -> tuple:
    """The rendered template as a tuple of contents and (text, own, answer).

    own: how many characters at the text's end, before the content of message `answer`, an assistant writes itself.
    Depends on roles alone, so that Jinja runs once per shape of conversation.
    """
    if not roles:
        raise TemplateError("a conversation without turns")
    parts = _cut(source, roles, specials, add_generation_prompt)
    first = next((i for i, role in enumerate(roles) if role == "assistant"), None)
    prompt = None
    if first:
        try:
            tail = _cut(source, roles[:first], specials, True)[-1]
            prompt = tail if isinstance(tail, str) else None
        except TemplateError:  # a template that takes whole conversations only
            prompt = None
    result = []
    for place, part in enumerate(parts):
        if isinstance(part, _Content):
            result.append(part)
            continue
        following = parts[place + 1] if place + 1 < len(parts) else None
        answer = following.turn if isinstance(following, _Content) and roles[following.turn] == "assistant" else None
        own = len(part) - len(prompt) if answer is not None and prompt and part.startswith(prompt) else 0
        result.append((part, own, answer))
    return tuple(result)


def _cut(source: str, roles: tuple[str, ...], specials: tuple, add_generation_prompt: bool) -> list[str | _Content]:
    """Renders with marks, and cuts: texts and contents, in the order in which the template writes them."""
    marks = [f"\ufdd0{number}\ufdd1" for number in range(len(roles))]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    names = zip(("bos_token", "eos_token", "pad_token"), specials, strict=True)
    known = {name: text for name, text in names if text is not None}
    try:
        text = _compile(source).render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **known
        )
    except UserError:
        raise
    except Exception as error:  # Jinja's own errors and whatever a template's expressions raise
        raise TemplateError(f"the chat template refuses turns {', '.join(roles)}: {error}") from None
    parts: list[str | _Content] = []
    pieces = text.split("\ufdd0")
    if pieces[0]:
        parts.append(pieces[0])
    for piece in pieces[1:]:
        number, _, rest = piece.partition("\ufdd1")
        parts.append(_Content(int(number.rstrip('"')), number.endswith('"')))
        if rest:
            parts.append(rest)
    written = [part.turn for part in parts if isinstance(part, _Content)]
    for number, role in enumerate(roles):
        if (times := written.count(number)) != 1:
            raise TemplateError(f"the chat template writes turn {number} ({role}) {times} times, not once and as it is")
    return parts


@lru_cache(maxsize=32)
def _compile(source: str):
    # The same environment as transformers': blocks trimmed, sandboxed, `break` and `continue`, tojson, raise_exception.
    # strftime_now is left out on purpose: templates that would print today's date then print their fixed one.
    from jinja2 import TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant wrote, for transformers' own masks; it writes nothing."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message):
        raise TemplateError(f"the chat template refuses: {message}")

    def tojson(value, indent=None):
        return re.sub('"\ufdd0(\\d+)\ufdd1"', '\ufdd0\\1"\ufdd1', json.dumps(value, ensure_ascii=False, indent=indent))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UserError(f"the tokenizer's chat template is no Jinja: line {error.lineno}: {error.message}") from None
