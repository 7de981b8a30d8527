"""The section `optimizer` of a recipe: the update rule, its schedule, and clipping."""

import dataclasses
import math
from typing import Literal

from .require import require, require_at_least

# The default rate; and the one that `load` sets with adapters, which learn less from the same one.
LEARNING_RATE, ADAPTERS_LEARNING_RATE = 1e-5, 1e-4


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, the learning-rate schedule, and clipping."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """AdamW; Lion, with one moment; Adafactor, with a row and a column of the second moment (of
    matrices of at least 128 x 128, as in optax; of smaller ones, such as most adapters', all of
    it); or Muon, which orthogonalizes updates of the layers' matrices and trains all other
    parameters by AdamW with Nesterov momentum, without weight decay."""
    learning_rate: float = LEARNING_RATE
    """Peak learning rate, by default 1e-4 with adapters."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The learning rate after warm-up: cosine or linear decay to its final share, constant, or
    constant until a decay in the last steps (wsd: warm-up, stable, decay). The last two allow
    extending a run."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    warmup_fraction: float = 0.0
    """Share of the steps used for warm-up, such as 0.03, instead of warmup_steps."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a share of the peak; with 0 that step changes nothing. Not
    with constant."""
    decay_fraction: float = 0.2
    """Share of the steps, at the end, over which wsd decays linearly."""
    beta1: float = 0.9
    """Decay of the first moment; Lion's share of the moment in an update. Muon's matrices always
    have 0.95, and Adafactor has no first moment."""
    beta2: float = 0.95
    """Decay of the second moment; of Lion's only moment. Muon's matrices have no second moment, and
    Adafactor's decays by a rule of its own."""
    epsilon: float = 1e-8
    """Added to the root of the second moment, or to the norm by which Muon divides a matrix; Lion
    and Adafactor do without."""
    weight_decay: float = 0.0
    """Decoupled weight decay, for matrices only."""
    clip_norm: float = 1.0
    """Global norm to which the gradient is clipped; 0 never clips."""
    moment_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Storage precision of both moments; updates compute in float32. 8bit: 8-bit floats with a
    scale per 128 numbers, rounded stochastically; moments of norms and biases stay float32. Only
    AdamW and Lion can have 8bit, and Adafactor needs float32."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage precision of the trained weights. bfloat16 rounds each update stochastically, so that
    steps too small for its 8 bits still move weights on average."""
    average_decay: float = 0.0
    """Decay of an exponential moving average of the trained weights, such as 0.999; it takes 4
    bytes per parameter, and `scripts.export_hf --average` exports it. Early steps decay less: (1 +
    n) / (10 + n) after n steps. 0 keeps none."""

    def __post_init__(self) -> None:
        require_at_least(self, "optimizer", 0, "warmup_steps", "weight_decay", "clip_norm")
        require(
            0 < self.learning_rate < math.inf,
            "optimizer.learning_rate",
            self.learning_rate,
            "a positive number",
        )
        require(
            not (self.warmup_steps and self.warmup_fraction),
            "optimizer.warmup_fraction",
            self.warmup_fraction,
            "to be left out with optimizer.warmup_steps; keep one of them",
        )
        for name in ("final_fraction", "decay_fraction", "warmup_fraction"):
            require(
                0 <= getattr(self, name) <= 1,
                f"optimizer.{name}",
                getattr(self, name),
                "a share between 0 and 1",
            )
        require(
            0 <= self.average_decay < 1,
            "optimizer.average_decay",
            self.average_decay,
            "a number from 0 to below 1",
        )
        require(self.epsilon > 0, "optimizer.epsilon", self.epsilon, "a positive number")
        self._check_moments()

    def _check_moments(self) -> None:
        """Raises ValueError if moments cannot have this storage precision or decay."""
        require(
            self.moment_dtype != "8bit" or self.name in ("adamw", "lion"),
            "optimizer.moment_dtype",
            self.moment_dtype,
            f"float32{' or bfloat16' * (self.name == 'muon')} with optimizer.name {self.name}",
        )
        # The longer it trains, the less Adafactor's second moment changes in a step: by less than
        # bfloat16 resolves from about step 1,000 on.
        require(
            self.moment_dtype != "bfloat16" or self.name != "adafactor",
            "optimizer.moment_dtype",
            self.moment_dtype,
            "float32 with optimizer.name adafactor",
        )
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= beta < 1, f"optimizer.{name}", beta, "a number from 0 to below 1")
            # bfloat16 has 8 bits: a moment that loses less than 1/256 per step would never shrink.
            require(
                self.moment_dtype != "bfloat16" or beta <= 0.99,
                f"optimizer.{name}",
                beta,
                "at most 0.99 with optimizer.moment_dtype bfloat16",
            )

    def stable_steps(self, steps: int) -> int:
        """Returns the number of initial steps whose learning rate a longer run would share."""
        if self.warmup_fraction:  # a longer run has a longer warm-up
            return 0
        if self.schedule == "constant":
            return steps
        return steps - self.decay_steps(steps) if self.schedule == "wsd" else 0

    def first_steps(self, steps: int) -> int:
        """Returns the number of warm-up steps in a run of `steps`."""
        if not self.warmup_fraction:
            return self.warmup_steps
        return math.ceil(round(self.warmup_fraction * steps, 9))  # 0.07 * 100 is more than 7

    def decay_steps(self, steps: int) -> int:
        """Returns the number of steps over which wsd decays, in a run of `steps`."""
        return round(self.decay_fraction * steps)
