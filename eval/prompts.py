"""Questions as token ids: prompts, their chat template, and what ends an answer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from data.conversation import Message
from data.errors import UserError, nearest
from data.templates import NAMES, end_ids, jinja_template, missing_controls, unfinished
from data.templates.rendering import RESERVED
from data.templates.sandbox import variables_of
from data.tokenizer import Tokenizer
from model.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question as text.

    Attributes:
      text: the user's turn, or all turns so far.
      new_tokens: the most tokens of the answer.
      prefix: beginning of the answer, for the model to continue.
    """

    text: str | tuple[Message, ...]
    new_tokens: int
    prefix: str = ""

    @property
    def key(self) -> str:
        """A hash that identifies its answer."""
        turns = (
            [("user", self.text)]
            if isinstance(self.text, str)
            else [(turn.role, turn.content) for turn in self.text]
        )
        return hashlib.sha256(
            json.dumps([turns, self.new_tokens, self.prefix]).encode()
        ).hexdigest()[:32]

    @property
    def draw(self) -> int:
        """Its sampling number, 28 bits of its key: its answer is independent of earlier prompts."""
        return int(self.key[:7], 16)


Count = Callable[[Prompt], int]
"""Returns the tokens of a prompt."""


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, template: str | None) -> list[int]:
    """Returns a prompt's ids: turns in the chat template; without a template, plain text that
    begins with BOS if the tokenizer adds it, as in training."""
    turns = (Message("user", prompt.text),) if isinstance(prompt.text, str) else prompt.text
    if template:
        return unfinished(turns, template, tokenizer).followed_by(prompt.prefix, tokenizer)
    text = "\n\n".join(turn.content for turn in turns)
    bos = [tokenizer.bos_id] if tokenizer.bos_id is not None and tokenizer.adds_bos else []
    return bos + tokenizer.encode(text + prompt.prefix)


def stop_ids(
    config: TransformerConfig, tokenizer: Tokenizer, template: str | None
) -> tuple[int, ...]:
    """Returns the ids that end an answer: EOS of model and tokenizer, the template's end token."""
    eos = config.eos_token_id if isinstance(config.eos_token_id, tuple) else (config.eos_token_id,)
    ends = end_ids(template, tokenizer) if template else ()
    return tuple(
        sorted({int(i) for i in (*eos, *ends, tokenizer.eos_id) if i is not None and i >= 0})
    )


def check_template(template: str, tokenizer: Tokenizer) -> None:
    """Raises UserError, naming usable templates, if a tokenizer cannot write this one."""
    usable = [name for name in NAMES if _is_usable(name, tokenizer)]
    if template not in usable:
        lacking = missing_controls(template, tokenizer) or (
            ("chat template",) if template == "tokenizer" else ("EOS token",)
        )
        raise UserError(
            f"--template: found {template}, and the model's tokenizer has no {', '.join(lacking)}; "
            f"{', '.join(usable) or 'a template of its own, with its control tokens,'} would work"
        )


def check_template_kwargs(
    kwargs: Mapping[str, Any], template: str | None, tokenizer: Tokenizer
) -> None:
    """Raises UserError if there is no chat template, or it cannot be given one of these variables,
    or does not read one."""
    if template is None:
        raise UserError(
            "--template-kwargs: the model's tokenizer has no chat template; with --template, or "
            "without them, it would work"
        )
    read = variables_of(jinja_template(template, tokenizer)) - RESERVED
    for name in kwargs:
        if name not in read:
            raise UserError(
                f"--template-kwargs: found {name}, which is not a variable that the chat template "
                f"reads; {nearest(name, read)}without it the prompts would be the same"
            )


def _is_usable(template: str, tokenizer: Tokenizer) -> bool:
    try:
        jinja_template(template, tokenizer)
    except UserError:
        return False
    return True
