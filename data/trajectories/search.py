"""Augmented random search over linear policies (Mania et al., Simple random search of static linear
policies is competitive for reinforcement learning, Algorithm 2), which goes on after an
interruption."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from data.errors import UserError
from data.folders import replacing
from data.trajectories.episodes import DAMAGE


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Augmented random search.

    Attributes:
      directions: tried per iteration, each on both sides of the policy; best: how many of them to
        follow.
      step: length of a step; noise: distance of the tries from the policy.
      paired: whether both episodes of a direction start from the same state; false for folders that
        do not say.
    """

    directions: int = 16
    best: int = 8
    step: float = 0.1
    noise: float = 0.1
    paired: bool = False

    @property
    def episodes(self) -> int:
        """The episodes of an iteration."""
        return 2 * self.directions


class Search:
    """Augmented random search over linear policies, with the statistics of all states seen.

    Its state is saved after each iteration; an interrupted iteration is replayed with the same
    seeds.
    """

    def __init__(self, config: SearchConfig, shape: tuple[int, int], seed: int, path: Path) -> None:
        """Reads the state if saved. Raises UserError if it is damaged."""
        self.config, self.seed, self.path = config, seed, path
        self.iteration = 0
        self.weights = np.zeros(shape)
        self.sums = np.zeros((2, shape[1]))
        self.count = 0
        if path.exists():
            try:
                with np.load(path) as stored:
                    self.iteration, self.count = int(stored["iteration"]), int(stored["count"])
                    self.weights, self.sums = stored["weights"], stored["sums"]
            except (KeyError, *DAMAGE):
                raise UserError(
                    f"{path}: damaged; remove it, and the same command plays the whole search again"
                ) from None

    @property
    def mean(self) -> Float[np.ndarray, " O"]:
        """The mean of all states seen; 0 before the first."""
        return self.sums[0] / max(self.count, 1)

    @property
    def std(self) -> Float[np.ndarray, " O"]:
        """The deviation of all states seen; 1 before the first, and for almost constant numbers."""
        variance = self.sums[1] / max(self.count, 1) - np.square(self.mean)
        return np.where(variance > 1e-6, np.sqrt(np.maximum(variance, 1e-6)), 1.0)

    def directions(self) -> Float[np.ndarray, "n A O"]:
        """Returns the iteration's directions."""
        generator = np.random.default_rng((self.seed, 2, self.iteration))
        return generator.normal(size=(self.config.directions, *self.weights.shape))

    def update(
        self,
        returns: Float[np.ndarray, " 2n"],
        states: Sequence[tuple[np.ndarray, np.ndarray, int]],
    ) -> None:
        """Follows the best directions (Algorithm 2, lines 6 and 7), and saves the state.

        Args:
          returns: of the policies on both sides of each direction, in turn.
        """
        pairs = returns.reshape(-1, 2)
        best = np.argsort(-pairs.max(1), kind="stable")[: self.config.best]
        spread = max(float(pairs[best].std()), 1e-6)
        gradient = np.tensordot(pairs[best, 0] - pairs[best, 1], self.directions()[best], 1)
        self.weights = self.weights + self.config.step / (self.config.best * spread) * gradient
        for total, squares, count in states:
            self.sums = self.sums + np.stack([total, squares])
            self.count += count
        self.iteration += 1
        fields = {name: getattr(self, name) for name in ("iteration", "count", "weights", "sums")}
        with replacing(self.path) as scratch, scratch.open("wb") as file:
            np.savez(file, **fields)
