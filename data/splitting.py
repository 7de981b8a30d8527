"""Splits conversations that are longer than the context between their exchanges."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from data.conversation import Message

Rendered = TypeVar("Rendered")


def split(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], Rendered],
    length: Callable[[Rendered], int],
    max_length: int,
    whole: Rendered,
) -> Iterator[Rendered]:
    """Splits a conversation between exchanges; yields parts of at most `max_length`, rendered.

    Each part has as many exchanges as fit, and at least one, even if that is longer; the system
    turn opens each part. Every exchange is in one part, including the last one, which FastChat's
    splitting sometimes loses.

    Args:
      render: renders a conversation.
      length: the length of a rendered conversation.
      max_length: how long a part should be at most.
    """
    system = messages[:1] if messages[0].role == "system" else messages[:0]
    starts = [*_exchange_starts(messages, len(system)), len(messages)]
    characters = np.cumsum([0, *(_characters(message) for message in messages)])
    length_per_character = length(whole) / characters[-1]

    def render_exchanges(first: int, count: int) -> Rendered:
        return render([*system, *messages[starts[first] : starts[first + count]]])

    first = 0
    while first < len(starts) - 1:
        lengths = (
            characters[starts[first + 1 :]] - characters[starts[first]]
        ) * length_per_character
        count, part = _largest_part(
            partial(render_exchanges, first),
            length,
            max_length,
            guess=int((lengths <= max_length).sum()),
            available=len(starts) - 1 - first,
        )
        yield part
        first += count


def _characters(message: Message) -> int:
    return len(message.content) + len(str(message.tool_calls)) + len(message.reasoning or "")


def _exchange_starts(messages: Sequence[Message], first: int) -> Iterator[int]:
    """Yields where exchanges begin: at `first`, and at each question after an answer."""
    yield first
    has_question = has_answer = False
    for index in range(first, len(messages)):
        role = messages[index].role
        if role in ("user", "system"):
            if has_answer:
                yield index
            has_question, has_answer = True, False
        # An opening answer belongs to the exchange after it.
        has_answer = has_answer or (role == "assistant" and has_question)


def _largest_part(
    render: Callable[[int], Rendered],
    length: Callable[[Rendered], int],
    max_length: int,
    guess: int,
    available: int,
) -> tuple[int, Rendered]:
    """Returns how many exchanges fit into `max_length`, at least one, and these rendered.

    Gallops from the guess until the number is enclosed, then bisects: with a good guess, two or
    three renderings.

    Args:
      render: renders a number of first exchanges.
      length: the length of a rendered part.
      max_length: how long the part should be at most.
      guess: an estimate of the number.
      available: how many exchanges there are.
    """
    fits, too_many, step = 1, available + 1, 1
    part = None
    while too_many - fits > 1:
        count = min(max(guess, fits + 1), too_many - 1)
        rendered = render(count)
        if length(rendered) <= max_length:
            fits, part = count, rendered
            guess = count + step if too_many == available + 1 else (fits + too_many) // 2
        else:
            too_many = count
            guess = count - step if fits == 1 else (fits + too_many) // 2
        step *= 2
    return fits, render(1) if part is None else part
