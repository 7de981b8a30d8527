"""Renders a chat template with real contents, tracking which characters come from which turn."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from data.conversation import IN_CONTENT, Message
from data.errors import UserError
from data.fields import REASONING_FIELDS
from data.templates.errors import TemplateError
from data.templates.meter import meter
from data.templates.runs import Run, Source
from data.templates.sandbox import STEPS, STEPS_PER_VALUE, compile_template, variables_of

# Template variables that come from a conversation's own fields.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"}
)
# The order of a turn's fields if its record has another form.
_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name")
# Most turns of a conversation whose roles are remembered; longer ones rarely repeat.
MOST_ALIKE = 64
# The names of tracked texts' types in error messages of Python and Jinja.
_TRACKED = re.compile(r"data\.templates\.tracked\.(?:Tracked|Safe)|(?<=')(?:Tracked|Safe)(?=')")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Rendered(NamedTuple):
    """A conversation as a template writes it."""

    text: str
    runs: Sequence[Run]
    """Where the characters come from."""
    sources: list[Source]
    """The template's input texts."""
    generated: list[tuple[int, int]] | None = None
    """Ranges in {% generation %} blocks; None if the template has no such block."""
    needles: frozenset[str] = frozenset()
    """Texts that the template looks for in others, such as </think>."""
    call_names: Sequence[Source] = ()
    """The sources of the names of all calls, in order."""

    def writes(self, field: str) -> bool:
        """Returns whether any turn's text of this field is written, such as `content`."""
        return any(source is not None and source.field == field for _, source, _ in self.runs)


class Template(NamedTuple):
    """A chat template and its inputs apart from conversations."""

    source: str
    """The template in Jinja."""
    specials: tuple[tuple[str, str], ...]
    """Names and texts of special tokens, such as ("bos_token", "<s>")."""
    date: datetime
    """What strftime_now writes."""
    variables: Mapping[str, Any] = {}
    """Further variables, such as {"enable_thinking": False}."""
    arguments_as_text: bool = False
    """Whether calls have their arguments as JSON text, in OpenAI's form, instead of as values."""
    in_parts: Literal["", "content", "reasoning"] = ""
    """What turns have in a list of parts: `reasoning` that they had there, with the content beside
    it, for Magistral's; or any `content`, for LLaVA's."""
    memory: dict[Any, Any] | None = None
    """Prompts that were rendered, by what was given; None: none is remembered."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Renders a conversation.

        Args:
          tools: descriptions of tools.
          add_generation_prompt: whether the header of an assistant's turn follows.

        Raises:
          TemplateError: the template refuses the conversation, or does something not allowed.
        """
        if (
            compile_template(self.source).only_writes
            and len(messages) <= MOST_ALIKE
            and not (tools or self.variables)
            and all(_has_only_content(message) for message in messages)
        ):
            roles = tuple(message.role for message in messages)
            outline = _outline(self.source, self.specials, self.date, roles, add_generation_prompt)
            if outline is not None:
                return outline.filled(messages, compile_template(self.source).needles)
        # Not what follows the prompt, which is rendered again for each call in it.
        if self.memory is None or not all(message.in_prompt for message in messages):
            return self._run(messages, tools, add_generation_prompt)
        # Texts, since equal values may be written differently: 1, 1.0 and True.
        values = repr(([*messages], [*tools], self.variables))
        options = (self.arguments_as_text, self.in_parts, add_generation_prompt)
        given = (self.source, values, *options)
        if given not in self.memory:
            self.memory[given] = self._run(messages, tools, add_generation_prompt)
        return self.memory[given]

    def _run(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
    ) -> Rendered:
        """Runs the template."""
        from data.templates.environment import strftime
        from data.templates.tracked import concat, track

        reserved = sorted(RESERVED.intersection(self.variables))
        if reserved:
            raise TemplateError(f"chat_template_kwargs may not give {', '.join(reserved)}")
        compiled = compile_template(self.source)
        sources: list[Source] = []
        if self.arguments_as_text:
            messages = list(map(_with_arguments_as_text, messages))
        turns = [_fields(message, number, sources) for number, message in enumerate(messages)]
        for turn, message in zip(turns, messages, strict=True):
            if self.in_parts == "content" or (self.in_parts and has_thinking_part(message)):
                _put_in_parts(turn, message)
        names = [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]
        descriptions = track(list(tools), -1, "tools", sources) or None
        variables = {
            name: track(value, -1, "variables", sources) for name, value in self.variables.items()
        }
        _set_limit(sources, len(turns))
        meter.printed, meter.generated = 0, []
        context = compiled.template.new_context(
            {
                "messages": turns,
                "add_generation_prompt": add_generation_prompt,
                "tools": descriptions,
                "documents": None,
                "strftime_now": partial(strftime, self.date),
                **dict(self.specials),
                **variables,
            }
        )
        pieces = []
        try:
            for piece in compiled.template.root_render_func(context):
                pieces.append(piece)
                meter.printed += len(piece)
            text = concat(pieces)
        except UserError:
            raise
        except Exception as error:  # Jinja's errors and anything a template's expressions raise
            raise _refusal(messages, error) from None
        generated = meter.generated if _GENERATION.search(self.source) else None
        named = [source for name in names for _, source, _ in name.runs]
        return Rendered(str.__str__(text), text.runs, sources, generated, compiled.needles, named)

    def unread_variables(self, names: Iterable[str]) -> list[str]:
        """Returns those of some variables that the template does not read."""
        return [name for name in names if name not in variables_of(self.source)]


class _Content(NamedTuple):
    """A turn's content in an outline."""

    turn: int
    trimmed: bool
    """Whether it is stripped of white space."""


class _Outline(NamedTuple):
    """The output of a template that only writes contents, for conversations of the same roles."""

    pieces: tuple[str | _Content, ...]
    steps: int
    """The template's work without contents."""

    def filled(self, messages: Sequence[Message], needles: frozenset[str]) -> Rendered:
        """Returns a conversation as the template writes it.

        Raises:
          TemplateError: it is too long.
        """
        sources = [
            Source(number, "content", message.content) for number, message in enumerate(messages)
        ]
        texts: list[str] = []
        runs: list[Run] = []
        for piece in self.pieces:
            if isinstance(piece, str):
                text, source, offset = piece, None, 0
            else:
                source = sources[piece.turn]
                text, offset = source.text, 0
                if piece.trimmed:
                    text, offset = text.strip(), len(text) - len(text.lstrip())
            if text:
                texts.append(text)
                runs.append((len(text), source, offset))
        _set_limit(sources, len(messages))
        meter.spend(self.steps + sum(map(len, texts)) // 100)
        return Rendered("".join(texts), runs, sources, None, needles)


@lru_cache(maxsize=1024)
def _outline(
    source: str,
    specials: tuple[tuple[str, str], ...],
    date: datetime,
    roles: tuple[str, ...],
    add_generation_prompt: bool,
) -> _Outline | None:
    """Returns the outline of conversations of these roles; None if the template refuses them."""
    template = Template(source, specials, date)
    try:
        rendered = template._run(
            [Message(role, " x ") for role in roles], (), add_generation_prompt
        )
    except TemplateError:
        return None
    pieces: list[str | _Content] = []
    at = 0
    for length, content, offset in rendered.runs:
        if content is None:
            pieces.append(rendered.text[at : at + length])
        else:
            assert (length, offset) in ((3, 0), (1, 1)), "the template has looked at a content"
            pieces.append(_Content(content.turn, trimmed=length == 1))
        at += length
    return _Outline(tuple(pieces), meter.limit - meter.left)


def _set_limit(sources: list[Source], turns: int) -> None:
    """Sets a template's work limit for a conversation."""
    characters = sum(len(source.text) for source in sources)
    meter.left = meter.limit = STEPS + STEPS_PER_VALUE * (len(sources) + turns) + characters


def _has_only_content(message: Message) -> bool:
    """Returns whether a turn has only a role and content for the template."""
    others = (message.reasoning, message.tool_call_id, message.name)
    return not message.tool_calls and others == (None, None, None)


def _refusal(messages: Sequence[Message], error: Exception) -> TemplateError:
    """Returns the error of a conversation on which the template failed."""
    roles = [message.role for message in messages]
    names = ", ".join(roles[:8]) + ", ..." * (len(roles) > 8)
    reason = _TRACKED.sub("str", str(error))[:200]
    if isinstance(error, RecursionError):
        reason = "macros or lists nested too deeply"
    return TemplateError(f"the chat template refuses turns {names}: {reason}")


def _with_arguments_as_text(message: Message) -> Message:
    """Returns a turn with its calls' arguments as JSON text."""
    calls = []
    for call in message.tool_calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return replace(message, tool_calls=tuple(calls))


def has_thinking_part(message: Message) -> bool:
    """Returns whether a turn's reasoning was a part of its content."""
    return message.reasoning is not None and message.reasoning_field == IN_CONTENT


def _put_in_parts(fields: dict[str, Any], message: Message) -> None:
    """Makes a list of parts of a turn's content, and of the reasoning that was a part of it."""
    from data.templates.tracked import Part

    parts = [Part(type="text", text=fields["content"])]
    if has_thinking_part(message):
        thinking = [fields.pop(name, None) for name in REASONING_FIELDS]
        parts.insert(0, Part(type="thinking", thinking=thinking[0]))
    fields["content"] = parts


def _fields(message: Message, turn: int, sources: list[Source]) -> dict[str, Any]:
    """Returns the fields of a turn as transformers gives them to a template, tracked."""
    from data.templates.tracked import track

    record_fields = message.fields or ("role", "content", message.reasoning_field)
    fields: dict[str, Any] = {
        "role": message.role,
        "content": track(message.content, turn, "content", sources),
    }
    if message.reasoning is not None:
        reasoning = track(message.reasoning, turn, "reasoning", sources)
        names = {"thinking", "reasoning_content", *record_fields} & {*REASONING_FIELDS}
        fields.update(dict.fromkeys(names, reasoning))
    if message.tool_calls:
        fields["tool_calls"] = track(message.tool_calls, turn, "tool_calls", sources)
    for name in ("tool_call_id", "name"):
        text = getattr(message, name)
        if text is not None:
            fields[name] = track(text, turn, name, sources)
    # The names that transformers adds come first and last.
    order = ("thinking", *record_fields, *_FIELDS, "reasoning_content")
    return {name: fields[name] for name in order if name in fields}
