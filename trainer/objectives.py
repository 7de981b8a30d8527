"""Which objective a run has; each is imported only when a run has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config.schema import RunConfig
    from .objective import Objective


def objective_class(config: RunConfig) -> type[Objective]:
    """Returns the configuration's objective: actions of trajectories, preferences between
    completions, or text."""
    if config.trajectories.path:
        from .trajectories import TrajectoryObjective

        return TrajectoryObjective
    if config.preference.loss is not None:
        from .preference import PreferenceObjective

        return PreferenceObjective
    from .text import TextObjective

    return TextObjective
