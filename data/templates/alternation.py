"""Which chat templates require user and assistant to alternate."""

from data.conversation import Message
from data.templates import TemplateError, render
from data.tokenizer import Tokenizer

# Built-in templates whose models saw only alternating questions and answers. Their Jinja would
# write any order.
ALTERNATING = frozenset({"vicuna_v1.1", "koala", "llama-2", "alpaca", "plain"})
_OPENING_ANSWER = [Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")]


def needs_alternation(template: str, tokenizer: Tokenizer | None = None) -> bool:
    """Returns whether a chat template requires `[system] user assistant user assistant ...`.

    Of the tokenizer's own template, that is whether it refuses an answer before the first question.

    Args:
      template: name of the template.
      tokenizer: the tokenizer; without it, its own template is taken for one that writes any order.
    """
    if template != "tokenizer" or tokenizer is None:
        return template in ALTERNATING
    try:
        render(_OPENING_ANSWER, template, tokenizer)
    except TemplateError:
        return True
    return False
