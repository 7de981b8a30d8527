"""The common fields of a recipe's `evaluations`; each test adds its own."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

from eval.prompts import Count
from eval.suite import Case
from model.attention.names import Tokens
from trainer.config.require import require


@dataclasses.dataclass(frozen=True)
class LiveTest(abc.ABC):
    """A long-context test repeated during training on the current parameters."""

    test: str
    """The test: lines, needle, ruler or coreference."""
    every: int = 0
    """Steps between measurements; 0 measures only before the first and after the last step."""
    tokens: tuple[Tokens, ...] = ()
    """Lengths of the cases, answers included; data.context_length by default, if a pretrained model
    or a training document is as long."""
    count: int = 20
    """Cases of each task and length."""
    rows: int = 0
    """Prompts answered together; 0: one for each shard of the batch."""
    chunk: Tokens = 4096
    """Prompt tokens computed at a time."""
    name: str = ""
    """Its name in the run's folder and on boards; by default the test's."""

    def __post_init__(self) -> None:
        for minimum, fields in ((0, ("every", "rows")), (1, ("count", "chunk"))):
            for field in fields:
                value = getattr(self, field)
                require(value >= minimum, f"evaluations.{field}", value, f"at least {minimum}")
        require(
            all(tokens >= 1 for tokens in self.tokens),
            "evaluations.tokens",
            self.tokens,
            "lengths of at least 1",
        )

    @abc.abstractmethod
    def cases(self, count: Count, lengths: Sequence[int]) -> list[Case]:
        """Returns the cases of these lengths, in tokens with their answers."""
