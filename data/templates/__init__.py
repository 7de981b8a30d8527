"""Chat templates: a conversation's ids, and which of them are trained on.

`rendering` runs a Jinja template in the `sandbox` with the real contents, as strings that know
where their characters came from (`tracked`). Control tokens are recognized in the template's own
text, and in turns only if the template looks for them (`encoder`); `loss` finds what is trained on.
`built_in` has templates for any tokenizer.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from data.conversation import Message
from data.errors import UserError, nearest
from data.templates.built_in import BUILT_IN, CONTROLS, NAMES
from data.templates.encoder import Segment, encode, find_controls
from data.templates.errors import TemplateError
from data.templates.loss import Written, excluded_ranges, tail_of, trained_ranges
from data.templates.notes import notes_of
from data.templates.rendering import Rendered, Template, has_thinking_part
from data.templates.runs import cut
from data.tokenizer import Tokenizer

UNREAD_VARIABLE = "the template does not read this of chat_template_kwargs: "
ARGUMENTS_AS_TEXT = "arguments of calls given to the template as JSON text, as it requires"
CONTENTS_AS_PARTS = "contents given to the template as lists of parts, as it requires"
# Followed by the token, which data.text_tokens could let a text contain.
TYPED = "control token in a turn's text, encoded as plain text: "
_FIELD = "data.template, or the template of one of data.sources"  # for messages


def jinja_template(template: str, tokenizer: Tokenizer) -> str:
    """Returns the chat template of this name in Jinja, as needed by an exported model.

    Raises:
      UserError: the name is unknown; the tokenizer has no chat template (for the name `tokenizer`),
        or lacks the EOS token or control tokens that the template writes.
    """
    if template == "tokenizer":
        if not tokenizer.chat_template:
            raise UserError(
                f"{_FIELD}: found 'tokenizer' (the default: the model's own), and this tokenizer "
                "has no chat template; choose one, such as --data.template vicuna_v1.1: "
                f"{', '.join(BUILT_IN)}, or your own, data.template: FILE.jinja, would work"
            )
        return tokenizer.chat_template
    if template not in BUILT_IN:
        raise UserError(
            f"{_FIELD}: found {template!r}; {nearest(template, NAMES)}{', '.join(NAMES)}, or "
            "as data.template a file FILE.jinja, such as a model's chat_template.jinja, would work"
        )
    missing = missing_controls(template, tokenizer)
    if missing:
        raise UserError(
            f"{_FIELD}: found {template!r}, which writes the control tokens {', '.join(missing)}, "
            "which the tokenizer lacks; data.add_control_tokens: true adds them with new "
            "embedding rows, template vicuna_v1.1 needs none"
        )
    if "eos_token" in BUILT_IN[template] and tokenizer.eos_token is None:
        raise UserError(
            f"{_FIELD}: found {template!r}, which writes EOS, and the tokenizer names no "
            "eos_token; one that is named in its tokenizer_config.json would work"
        )
    return BUILT_IN[template]


def missing_controls(template: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the control tokens that a template needs and the tokenizer lacks."""
    return tuple(token for token in CONTROLS.get(template, ()) if token not in tokenizer.controls)


def end_ids(template: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the id of the control token that ends an answer; empty if only text ends it."""
    try:
        segments = render([Message("user", "a"), Message("assistant", "a")], template, tokenizer)
    except TemplateError:  # the template needs more than these two turns
        return ()
    controls = {control.id for control in tokenizer.controls.values()}
    for token in reversed(
        [token for segment in segments if segment.train for token in segment.ids]
    ):
        if token in controls:
            return (token,)
        if tokenizer.decode([token]).strip():  # the answer's own text
            break
    return ()


class Encoding(NamedTuple):
    """The outcome for a conversation."""

    segments: list[Segment]
    notes: frozenset[str]
    """Changes and omissions, such as reasoning, as the report counts them."""


def render(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    tools: Sequence[dict[str, Any]] = (),
) -> list[Segment]:
    """Returns the segments of `encode_conversation`."""
    return encode_conversation(messages, template, tokenizer, add_generation_prompt, tools).segments


def encode_conversation(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    tools: Sequence[dict[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = {},
    train_on_everything: bool = False,
    reads_blocks: bool = True,
) -> Encoding:
    """Returns the ids of a conversation in segments with and without loss, and what was left out.

    Text and ids equal those of transformers' apply_chat_template, except that control tokens typed
    in a turn remain text, unless they are tags that the template itself looks for, such as Qwen 3's
    </think>, or tags that are not special in a turn that a model generated. BOS is added only if
    the template writes it. The loss covers a template's {% generation %} blocks if it has any;
    otherwise everything between the generation prompt and the end token of an assistant's turn,
    including calls, reasoning and their marks. Turns whose Message.train is False are excluded.

    Args:
      template: the name of a chat template, one of NAMES.
      tokenizer: the tokenizer; its `template_date` is what strftime_now writes.
      add_generation_prompt: whether the header of an assistant's turn follows the conversation.
      tools: descriptions of tools for the template.
      template_kwargs: variables for the template, overriding the tokenizer's `template_kwargs`.
      train_on_everything: whether the loss covers the template's text and all turns, as by default
        in TRL, but those whose `train` is False.
      reads_blocks: whether the loss covers the template's {% generation %} blocks, if it has any.

    Raises:
      TemplateError: the conversation does not fit the template, such as one with unsupported tool
        calls.
      UserError: see `jinja_template`.
    """
    program = _program(template, tokenizer, template_kwargs)
    program, rendered = _rendered(program, messages, tools, add_generation_prompt)
    if not reads_blocks:
        rendered = rendered._replace(generated=None)
    notes = notes_of(rendered, messages, tools, program.source, template == "tokenizer")
    if program.arguments_as_text:
        notes |= {ARGUMENTS_AS_TEXT}
    if program.in_parts:
        notes |= {CONTENTS_AS_PARTS}
    notes |= {UNREAD_VARIABLE + name for name in program.unread_variables(template_kwargs)}
    controls, typed = find_controls(rendered, tokenizer, _generated(messages))
    ranges_of = excluded_ranges if train_on_everything else trained_ranges
    found = ranges_of(Written(rendered, controls, messages, program, tokenizer, tools))
    segments = encode(rendered, controls, found.ranges, tokenizer)
    if train_on_everything:  # a token with any part of an excluded turn is left out
        segments = [replace(segment, train=not segment.train) for segment in segments]
    return Encoding(segments, notes | found.notes | {TYPED + token for token in typed})


class Prompt(NamedTuple):
    """The ids of a conversation with the generation prompt after it."""

    ids: list[int]
    turns: int
    """How many of them end with the last turn's text."""


def encode_prompt(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = {},
) -> Prompt:
    """Returns the ids of a prompt; arguments and errors as in `encode_conversation`."""
    program = _program(template, tokenizer, template_kwargs)
    _, rendered = _rendered(program, messages, tools, True)
    controls = find_controls(rendered, tokenizer, _generated(messages)).controls
    end = len(rendered.text)
    after_turns = (end - len(tail_of(rendered)), end)
    segments = encode(rendered, controls, [after_turns], tokenizer)
    turns = sum(len(segment.ids) for segment in segments if not segment.train)
    return Prompt([token for segment in segments for token in segment.ids], turns)


class Unfinished(NamedTuple):
    """A rendered conversation that a text continues.

    What follows its last control token is encoded together with that text, because tokens form
    across the border ("ASSISTANT:" + " The").
    """

    text: str
    """All of it, as the template writes it."""
    ids: tuple[int, ...]
    """Up to the last control token."""
    tail: str
    """The text after that."""
    strips: bool
    """Whether that token removes the white space after it."""

    def followed_by(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Returns the ids of the conversation and a text that continues it."""
        tail = self.tail + text
        tail = tail.lstrip() if self.strips else tail
        return [*self.ids, *tokenizer.encode_spans(tail, beginning=not self.ids).ids]


def unfinished(
    messages: Sequence[Message], template: str, tokenizer: Tokenizer, continue_last: bool = False
) -> Unfinished:
    """Returns a conversation up to where an answer begins, or up to the end of the last turn's
    content, as transformers' continue_final_message does.

    Raises:
      TemplateError, UserError: as `encode_conversation`; or the template does not write the content
        that is to be continued.
    """
    program = _program(template, tokenizer)
    program, rendered = _rendered(program, messages, (), not continue_last)
    # For its error: the template writes no turn, or omits a call.
    notes_of(rendered, messages, (), program.source, template == "tokenizer")
    if continue_last:
        rendered = _until_last_content(rendered, len(messages) - 1)
    controls = find_controls(rendered, tokenizer, _generated(messages)).controls
    if not controls:
        return Unfinished(rendered.text, (), rendered.text, False)
    last = controls[-1]
    segments = encode(rendered._replace(text=rendered.text[: last.end]), controls, (), tokenizer)
    ids = tuple(token for segment in segments for token in segment.ids)
    token = tokenizer.controls[rendered.text[last.token_start : last.token_end]]
    return Unfinished(rendered.text, ids, rendered.text[last.end :], token.strips[1])


def _until_last_content(rendered: Rendered, turn: int) -> Rendered:
    """Returns a conversation without what the template writes after the content of a turn."""
    end = at = 0
    runs = list(rendered.runs)
    for length, source, _ in runs:
        at += length
        if source is not None and (source.turn, source.field) == (turn, "content"):
            end = at
    if not end:
        raise TemplateError("the chat template does not write the turn that is to be continued")
    return rendered._replace(text=rendered.text[:end], runs=cut(runs, [(0, end)])[0])


def _generated(messages: Sequence[Message]) -> set[int]:
    """Returns the numbers of the turns that a model generated."""
    return {number for number, message in enumerate(messages) if message.generated}


def _program(
    template: str, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] = {}
) -> Template:
    """Returns the template of this name with the tokenizer's variables, overridden by others."""
    return Template(
        jinja_template(template, tokenizer),
        tuple(sorted(tokenizer.special_tokens.items())),
        tokenizer.template_date,
        {**tokenizer.template_kwargs, **template_kwargs},
        memory=tokenizer.memory,
    )


def _rendered(
    program: Template,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool,
) -> tuple[Template, Rendered]:
    """Returns a conversation as the template writes it, and the template as it was used.

    DeepSeek V3's template accepts only arguments of calls that are JSON text; LLaVA's writes only
    contents that are lists of parts, Magistral's only reasoning that is a part of one.

    Raises:
      TemplateError: see `encode_conversation`.
    """
    if not messages:
        raise TemplateError("a conversation without turns")
    given = (messages, tools, add_generation_prompt)
    try:
        rendered = program.render(*given)
    except TemplateError:
        has_calls = any(message.tool_calls for message in messages)
        others = [program._replace(arguments_as_text=True)] if has_calls else []
        for other in (*others, program._replace(in_parts="content")):
            with contextlib.suppress(TemplateError):
                rendered = other.render(*given)
                if other.arguments_as_text or rendered.writes("content"):
                    return other, rendered
        raise  # the refusal of the conversation as it is
    if missing := _missing(rendered, messages):
        of_parts = program._replace(in_parts=missing)
        with contextlib.suppress(TemplateError):
            if (with_parts := of_parts.render(*given)).writes(missing):
                return of_parts, with_parts
    return program, rendered


def _missing(
    rendered: Rendered, messages: Sequence[Message]
) -> Literal["", "content", "reasoning"]:
    """Returns the field of turns that a template has not written, and would perhaps in parts."""
    if not rendered.writes("content"):
        return "content"
    is_given = any(map(has_thinking_part, messages))
    return "reasoning" if is_given and not rendered.writes("reasoning") else ""
