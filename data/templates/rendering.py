"""Renders a chat template and cuts the result into the template's own text and the contents of turns.

A template is rendered with marks in place of the turns' contents. The result is cut at the marks, so that it is known which
characters come from the template and which from a turn.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from data.errors import UserError
from data.templates.errors import TemplateError
from data.templates.sandbox import STEPS, STEPS_PER_TURN, compile_template


class Content(NamedTuple):
    """The content of a turn, in a rendered template."""

    turn: int
    as_json: bool
    """Whether the template writes it in quotes and escaped, as Llama 3.1's writes tool turns."""


class Written(NamedTuple):
    """Part of a template's text that the assistant has to write itself, since the generation prompt lacks it."""

    start: int
    end: int
    turn: int
    is_call: bool = False
    """Whether it belongs to a turn with tool calls, of which control tokens are trained on too."""


class TemplateText(NamedTuple):
    """Text between two contents, in a rendered template."""

    text: str
    written: tuple[Written, ...] = ()
    """The parts of the text that the assistant has to write itself, in order."""


def rendered_parts(
    source: str, roles: tuple[str, ...], specials: tuple[str | None, ...], add_generation_prompt: bool,
    fields: Sequence[dict[str, Any]] = (), tools: list | None = None,
) -> list[str | Content]:
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
    compiled = compile_template(source)
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
    parts: list[str | Content] = []
    pieces = text.split("\ufdd0")
    if pieces[0]:
        parts.append(pieces[0])
    for piece in pieces[1:]:
        mark, _, following_text = piece.partition("\ufdd1")
        # A quote in the mark is put there by tojson, see compile_template.
        parts.append(Content(int(mark.rstrip('"')), as_json=mark.endswith('"')))
        if following_text:
            parts.append(following_text)
    turns = Counter(part.turn for part in parts if isinstance(part, Content))
    for number, role in enumerate(roles):
        # Some templates leave out the text beside a call.
        if (times := turns[number]) != 1 and not (times == 0 and "tool_calls" in messages[number]):
            raise TemplateError(
                f"the chat template writes turn {number} ({role}) {times} times, not once and without changes"
            )
    return parts


def render_pieces(
    source: str, roles: tuple[str, ...], specials: tuple[str | None, ...], add_generation_prompt: bool
) -> tuple[Content | TemplateText, ...]:
    """Returns the result of `_render_pieces`, remembered for conversations of up to 64 turns: longer ones are rarely alike."""
    make = _remembered_pieces if len(roles) <= 64 else _render_pieces
    return make(source, roles, specials, add_generation_prompt)


def _render_pieces(
    source: str, roles: tuple[str, ...], specials: tuple[str | None, ...], add_generation_prompt: bool
) -> tuple[Content | TemplateText, ...]:
    """Renders a template for turns of these roles.

    Args:
        source: the template in Jinja.
        roles: the role of each turn.
        specials: texts of BOS, EOS and the padding token.
        add_generation_prompt: whether the heading of an assistant's turn follows.
    """
    if not roles:
        raise TemplateError("a conversation without turns")
    parts = rendered_parts(source, roles, specials, add_generation_prompt)
    prompt = _generation_prompt(source, roles, specials)
    pieces: list[Content | TemplateText] = []
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(part, Content):
            pieces.append(part)
            continue
        answer = following.turn if isinstance(following, Content) and roles[following.turn] == "assistant" else None
        written = answer is not None and prompt and len(prompt) < len(part) and part.startswith(prompt)
        pieces.append(TemplateText(part, (Written(len(prompt), len(part), answer),) if written else ()))
    return tuple(pieces)


# Jinja runs once for each sequence of roles.
_remembered_pieces = lru_cache(maxsize=4096)(_render_pieces)


def _generation_prompt(source: str, roles: tuple[str, ...], specials: tuple[str | None, ...]) -> str | None:
    """Returns what the template writes before the first answer when it asks for one; None if there is no such text."""
    first_answer = roles.index("assistant") if "assistant" in roles else 0
    if not first_answer:
        return None
    try:
        tail = rendered_parts(source, roles[:first_answer], specials, True)[-1]
    except TemplateError:  # the template accepts complete conversations only
        return None
    return tail if isinstance(tail, str) else None
