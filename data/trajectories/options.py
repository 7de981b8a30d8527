"""The options of a run that learns from trajectories: the section `trajectories` of a recipe."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class TrajectoryConfig:
    """Learning from trajectories instead of text: which episodes, and how they form a context."""

    path: str | None = None
    """Folder of episodes, {domain}/{algorithm}/buffer/*.npz below it; if given, the run learns
    their actions, and reads only context_length, prepared, held_out_fraction and seed of the
    section data."""
    task: str = ""
    """Task whose rewards to learn from, such as walker_walk."""
    in_context: int = 1
    """Episodes in a row, by ascending return (Agentic Transformer); 1 is Decision Transformer."""
    conditioning: Literal["return", "none"] = "return"
    """What comes with states and actions: return and reward, or nothing (behaviour cloning)."""
    best: float = 1.0
    """Share of the episodes to train on, those with the highest returns: 0.1 with conditioning none
    is the papers' 10% behaviour cloning."""
    see_actions: bool = True
    """Whether the model sees the actions taken. If episodes come from noiseless policies, it learns
    to continue the policy that its own actions suggest, whatever return is requested; false
    prevents that."""
    components: int = 1
    """Actions predicted at a state: one, by squared error, or a mixture of several, trained by
    likelihood; the most probable is executed."""
    loss_on: Literal["all", "last"] = "all"
    """Episodes of a row whose actions are trained on: all, or only the last, best one."""
    action_repeat: int = 1
    """Simulator steps per decision: its state and action are the first step's, its reward the sum.
    Exact for data collected with actions held as long."""
    decisions: int = 0
    """Successive decisions per episode in a row, from a random start; 0 takes the whole episode."""

    def __post_init__(self) -> None:
        for name, minimum in (
            ("in_context", 1),
            ("components", 1),
            ("action_repeat", 1),
            ("decisions", 0),
        ):
            if getattr(self, name) < minimum:
                raise ValueError(
                    f"trajectories.{name}: found {getattr(self, name)}, needs at least {minimum}"
                )
        if not 0 < self.best <= 1:
            raise ValueError(
                f"trajectories.best: found {self.best}, needs a share above 0 and up to 1"
            )
        if self.path and not self.task:
            raise ValueError(
                "trajectories.task: missing; give the task whose rewards are learned from, such "
                "as walker_walk"
            )

    @property
    def tokens_per_decision(self) -> int:
        """Tokens of a decision: return to go, state, action, reward; or state and action."""
        return 4 if self.conditioning == "return" else 2
