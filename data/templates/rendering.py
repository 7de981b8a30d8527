"""Renders a chat template with real contents; says which characters come from which turn."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from data.conversation import Message
from data.errors import UserError
from data.templates.errors import TemplateError
from data.templates.sandbox import STEPS, STEPS_PER_VALUE, compile_template

# What a conversation gives to its template by fields of its own.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"}
)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Rendered(NamedTuple):
    """A conversation as a template writes it."""

    text: str
    runs: Sequence[tuple]
    """Where the characters come from, see data.templates.tracked.Run."""
    sources: list
    """The texts that the template was given, as data.templates.tracked.Source."""
    generated: list[tuple[int, int]] | None = None
    """Ranges in {% generation %} blocks; None if the template has no such block."""
    needles: frozenset[str] = frozenset()
    """Texts that the template looks for in others, such as </think>."""


class Template(NamedTuple):
    """A chat template and all that it is given apart from conversations."""

    source: str
    """The template in Jinja."""
    specials: tuple[str | None, ...]
    """Texts of BOS, EOS and the padding token."""
    date: datetime
    """What strftime_now writes."""
    variables: Mapping[str, Any] = {}
    """Further variables, such as {"enable_thinking": False}."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Renders a conversation.

        Args:
          messages: the turns.
          tools: descriptions of tools.
          add_generation_prompt: whether the heading of an assistant's turn follows.

        Raises:
          TemplateError: the template refuses the conversation, or does what is not allowed.
        """
        from data.templates.environment import strftime
        from data.templates.tracked import Source, concat, meter, track

        reserved = sorted(RESERVED.intersection(self.variables))
        if reserved:
            raise TemplateError(f"chat_template_kwargs may not give {', '.join(reserved)}")
        compiled = compile_template(self.source)
        template = compiled.template
        sources: list[Source] = []
        turns = [_fields(message, number, sources) for number, message in enumerate(messages)]
        descriptions = track(list(tools), -1, "tools", sources) or None
        variables = {
            name: track(value, -1, "variables", sources) for name, value in self.variables.items()
        }
        specials = zip(("bos_token", "eos_token", "pad_token"), self.specials, strict=True)
        characters = sum(len(source.text) for source in sources)
        meter.left = meter.limit = (
            STEPS + STEPS_PER_VALUE * (len(sources) + len(turns)) + characters
        )
        meter.printed, meter.generated = 0, []
        context = template.new_context(
            {
                "messages": turns,
                "add_generation_prompt": add_generation_prompt,
                "tools": descriptions,
                "documents": None,
                "strftime_now": partial(strftime, self.date),
                **{name: token for name, token in specials if token is not None},
                **variables,
            }
        )
        pieces = []
        try:
            for piece in template.root_render_func(context):
                pieces.append(piece)
                meter.printed += len(piece)
            text = concat(pieces)
        except UserError:
            raise
        except Exception as error:  # Jinja's own errors and whatever a template's expressions raise
            roles = [message.role for message in messages]
            names = ", ".join(roles[:8]) + ", ..." * (len(roles) > 8)
            raise TemplateError(
                f"the chat template refuses turns {names}: {_words(error)}"
            ) from None
        has_blocks = _GENERATION.search(self.source) is not None
        return Rendered(
            str.__str__(text),
            text.runs,
            sources,
            meter.generated if has_blocks else None,
            compiled.needles,
        )

    def unread_variables(self, names: Iterable[str]) -> list[str]:
        """Returns those of some variables that the template does not read."""
        return [name for name in names if name not in compile_template(self.source).variables]


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "macros or lists nested too deeply"
    return str(error)[:200]


def _fields(message: Message, turn: int, sources: list) -> dict[str, Any]:
    """Returns the fields of a turn as transformers gives them to a template, tracked."""
    from data.templates.tracked import track

    fields: dict[str, Any] = {
        "role": message.role,
        "content": track(message.content, turn, "content", sources),
    }
    if message.reasoning is not None:
        reasoning = track(message.reasoning, turn, "reasoning", sources)
        fields.update(thinking=reasoning, reasoning_content=reasoning)
        fields[message.reasoning_field] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = track(message.tool_calls, turn, "tool_calls", sources)
    for name in ("tool_call_id", "name"):
        text = getattr(message, name)
        if text is not None:
            fields[name] = track(text, turn, name, sources)
    return fields
