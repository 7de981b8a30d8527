"""Which orders of turns a chat template can write."""

from data.conversation import Message, TurnOrder
from data.templates import TemplateError, render
from data.tokenizer import Tokenizer

# Built-in templates whose models saw only alternating questions and answers. Their Jinja would
# write any order.
ALTERNATING = frozenset({"vicuna_v1.1", "koala", "llama-2", "alpaca", "plain"})
_OPENING_ANSWER = [Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")]


def order_of(template: str, tokenizer: Tokenizer | None = None) -> TurnOrder:
    """Returns the order of turns that a chat template requires.

    A tokenizer's own template is only tested with an answer before the first question: it refuses
    other unsupported orders itself.

    Args:
      template: name of the template.
      tokenizer: the tokenizer; without it, its own template is assumed to write any order.
    """
    if template != "tokenizer" or tokenizer is None:
        return "alternating" if template in ALTERNATING else "any"
    try:
        render(_OPENING_ANSWER, template, tokenizer)
    except TemplateError:
        return "question first"
    return "any"
