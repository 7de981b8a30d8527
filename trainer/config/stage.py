"""A stage of a curriculum: an entry of `stages` in a recipe."""

import dataclasses
from typing import Any

from data.lengths import with_lengths
from model.attention.names import Tokens
from model.config import POSITIONS
from model.rope_config import require_scaling

from .require import require, require_at_least

# Fields of Hugging Face's config.json that hold a number of tokens; model.overrides and stages.rope
# also read 64K.
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window")


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """A stage of a curriculum; the other sections give its defaults."""

    context_length: Tokens
    """Tokens in a row; replaces data.context_length."""
    steps: int = 0
    """Optimizer steps; 0 means train.steps."""
    batch_size: int = 0
    """Rows in a step; 0 means train.batch_size."""
    in_context: int = 0
    """Episodes in a row; 0 means trajectories.in_context."""
    accumulation: int = 0
    """Parts of a batch; 0 means train.accumulation."""
    learning_rate: float = 0.0
    """Peak learning rate; 0 means optimizer.learning_rate."""
    warmup_steps: int | None = None
    """Warm-up steps; optimizer.warmup_steps by default."""
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    """Changed mesh axes, such as {fsdp: 1, sequence: 8}; the number of devices stays the same."""
    rope: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields rope_theta, rope_scaling and max_position_embeddings from this stage on, as in
    model.overrides."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope", with_lengths(self.rope, LENGTHS))
        require_scaling("stages.rope.rope_scaling", self.rope.get("rope_scaling"))
        require_at_least(self, "stages", 1, "context_length")
        require_at_least(
            self, "stages", 0, "steps", "batch_size", "in_context", "accumulation", "learning_rate"
        )
        require(
            set(self.rope) <= set(POSITIONS),
            "stages.rope",
            self.rope,
            f"only fields of {', '.join(POSITIONS)}",
        )

    def replaces(self, name: str) -> bool:
        """Returns whether the stage sets the field `name`, whose default is in another section."""
        return getattr(self, name) != getattr(StageConfig, name, None)


# The fields of other sections that a stage may replace -> their names in the stage.
STAGED = {
    "data.context_length": "context_length",
    "train.steps": "steps",
    "train.batch_size": "batch_size",
    "train.accumulation": "accumulation",
    "trajectories.in_context": "in_context",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.warmup_steps": "warmup_steps",
}
