"""Chat templates: which ids a conversation has, and which of them are trained on.

`rendering` runs a Jinja template in the `sandbox` and cuts the result into the template's own text and the contents of turns;
`tools` does the same for conversations with tool calls. Only then are control tokens looked for, and only in the template's own
text (`encoder`). `built_in` has the templates that every tokenizer can use.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from data.conversation import Message
from data.errors import UserError, nearest
from data.templates.built_in import BUILT_IN, CONTROLS, NAMES
from data.templates.encoder import ConversationEncoder
from data.templates.errors import TemplateError
from data.templates.rendering import Content, render_pieces
from data.templates.tools import render_tool_pieces
from data.tokenizer import Tokenizer

_FIELD = "data.template, or the template of one of data.sources"  # for messages


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
            raise UserError(f"{_FIELD}: found 'tokenizer', and this tokenizer has no chat template; vicuna_v1.1 would work")
        return tokenizer.chat_template
    if template not in BUILT_IN:
        raise UserError(f"{_FIELD}: found {template!r}; {nearest(template, NAMES)}{', '.join(NAMES)} would work")
    missing = missing_controls(template, tokenizer)
    if missing:
        raise UserError(
            f"{_FIELD}: found {template!r}, which writes the control tokens {', '.join(missing)}, which the tokenizer lacks; "
            "data.add_control_tokens: true adds them with new embedding rows, template vicuna_v1.1 needs none"
        )
    if "eos_token" in BUILT_IN[template] and tokenizer.eos_token is None:
        raise UserError(f"{_FIELD}: found {template!r}, which writes EOS, and the tokenizer names no eos_token; one that is "
                        "named in its tokenizer_config.json would work")
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
        tools: descriptions of tools for the template; see `writes_tools`.

    Raises:
        TemplateError: the conversation does not fit the template, such as one with tool calls that it does not write.
        UserError: see `jinja_template`.
    """
    source = jinja_template(template, tokenizer)
    roles = tuple(message.role for message in messages)
    trained_turns = {number for number, role in enumerate(roles) if role == "assistant" and messages[number].train}
    specials = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    encoder = ConversationEncoder(tokenizer)
    if tools or any(message.tool_calls for message in messages):
        pieces = render_tool_pieces(source, messages, tools, specials, add_generation_prompt, tokenizer)
    else:
        pieces = render_pieces(source, roles, specials, add_generation_prompt)
    for piece in pieces:
        if isinstance(piece, Content):
            content = messages[piece.turn].content
            text = json.dumps(content, ensure_ascii=False) if piece.as_json else content
            encoder.add_content(text, piece.turn in trained_turns)
        else:
            encoder.add_template_text(piece, trained_turns)
    return _segments(encoder.finish())


def _segments(ids: list[tuple[int, bool]]) -> list[Segment]:
    return [Segment(tuple(token for token, _ in group), train) for train, group in groupby(ids, key=itemgetter(1))]


def writes_tools(template: str, tokenizer: Tokenizer) -> bool:
    """Returns whether a chat template reads descriptions of tools; those of the built-in ones are for text alone."""
    return re.search(r"\btools\b", jinja_template(template, tokenizer)) is not None
