"""The options of a run that learns from preferences: the section `preference` of a recipe."""

import dataclasses
from typing import Any, Literal

from data.lengths import with_lengths
from model.config import POSITIONS
from model.rope_config import require_scaling

from .require import require
from .stage import LENGTHS

WITHOUT_REFERENCE = ("orpo", "simpo")
"""Losses that only compare the completions with each other."""


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Learning from pairs of completions (sources of format preference): which one should become
    likelier."""

    loss: (
        Literal[
            "sigmoid",
            "sigmoid_norm",
            "hinge",
            "robust",
            "ipo",
            "apo_zero",
            "apo_down",
            "bco_pair",
            "nca_pair",
            "sppo_hard",
            "orpo",
            "simpo",
            "kto",
        ]
        | None
    ) = None
    """The loss, under TRL's names: sigmoid is DPO (Rafailov et al., Direct Preference
    Optimization), sigmoid_norm takes means over a completion's tokens, ipo is Azar et al.'s, robust
    Chowdhury et al.'s for flipped labels; apo_zero and apo_down (D'Oosterlinck et al.) are for
    chosen completions better or worse than the model's own; bco_pair is Jung et al.'s, nca_pair
    Chen et al.'s, sppo_hard Wu et al.'s; orpo (Hong et al.) and simpo (Meng et al.) need no
    reference; kto (Ethayarajh et al.) takes labelled completions instead of pairs. Setting a loss
    makes the run learn from preferences."""
    beta: float = 0.1
    """How closely the model is held to the reference: the scale of rewards."""
    ref_model: str | None = None
    """The reference, if not the initial model: a Hugging Face folder, org/name on the hub or a
    checkpoint of this project, with the same tokenizer."""
    ref_tokenizer: str | None = None
    """Folder, file or hub name of ref_model's tokenizer; by default the one beside ref_model."""
    ref_overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields rope_theta, rope_scaling and max_position_embeddings of ref_model, as in
    model.overrides."""
    ref_without_adapter: bool = False
    """The reference is the model with its adapter disabled, also if adapter.path continues a
    trained one."""
    label_smoothing: float = 0.0
    """Share of pairs whose labels are assumed flipped, for sigmoid (conservative DPO) and robust;
    below 0.5."""
    simpo_gamma: float = 0.5
    """simpo's target margin between the rewards of the chosen and the rejected completion."""
    sft_weight: float = 0.0
    """Weight of the chosen completions' cross-entropy, the mean over the batch's tokens, added to
    the loss; always 1 for orpo."""
    desirable_weight: float = 1.0
    """Weight of desirable completions' losses, for kto."""
    undesirable_weight: float = 1.0
    """Weight of undesirable completions' losses, for kto."""
    share_prompts: bool = True
    """Whether a pair's prompt is computed once for both completions, in one row, with the same
    result. With a sliding window it is computed twice."""
    long_pairs: Literal["drop", "cut_prompt"] = "drop"
    """What to do with a pair longer than a row: drop it, or cut the beginning of its prompt."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"preference.beta: found {self.beta}, needs a number above 0")
        if self.loss in ("ipo", "sppo_hard") and self.beta < 1e-19:
            raise ValueError(
                f"preference.beta: found {self.beta}, needs at least 1e-19 with preference.loss "
                f"{self.loss}: the square of 1 / (2 beta) is a float32"
            )
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"preference.label_smoothing: found {self.label_smoothing}, needs 0 to below 0.5"
            )
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise ValueError(
                f"preference.label_smoothing: found {self.label_smoothing}, needs 0 with "
                f"preference.loss {self.loss}; sigmoid and robust read it"
            )
        if self.sft_weight < 0 or (self.sft_weight and self.loss in ("orpo", "kto")):
            raise ValueError(
                f"preference.sft_weight: found {self.sft_weight}, needs a number of 0 or more, 0 "
                "with orpo and kto"
            )
        if self.ref_model is not None and self.loss in WITHOUT_REFERENCE:
            raise ValueError(
                f"preference.ref_model: found {self.ref_model}, needs to be left out with "
                f"preference.loss {self.loss}, which has no reference"
            )
        self._check_reference()
        for name in ("desirable_weight", "undesirable_weight"):
            found = getattr(self, name)
            if not 0 <= found < float("inf") or (found != 1 and self.loss != "kto"):
                raise ValueError(
                    f"preference.{name}: found {found}, needs "
                    + ("a number of 0 or more" if self.loss == "kto" else "1; only kto reads it")
                )

    def _check_reference(self) -> None:
        """Raises ValueError if the fields of the reference do not agree."""
        object.__setattr__(self, "ref_overrides", with_lengths(self.ref_overrides, LENGTHS))
        require_scaling(
            "preference.ref_overrides.rope_scaling", self.ref_overrides.get("rope_scaling")
        )
        require(
            set(self.ref_overrides) <= set(POSITIONS if self.ref_model else ()),
            "preference.ref_overrides",
            self.ref_overrides,
            f"only fields of {', '.join(POSITIONS)}, with preference.ref_model",
        )
        require(
            self.ref_tokenizer is None or self.ref_model is not None,
            "preference.ref_tokenizer",
            self.ref_tokenizer,
            "to be left out without preference.ref_model",
        )
        require(
            not self.ref_without_adapter
            or (self.ref_model is None and self.loss not in WITHOUT_REFERENCE),
            "preference.ref_without_adapter",
            self.ref_without_adapter,
            "false with preference.ref_model, orpo or simpo",
        )

    @property
    def labelled(self) -> bool:
        """Whether the loss takes single labelled completions instead of pairs."""
        return self.loss == "kto"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return self.loss is not None and self.loss not in WITHOUT_REFERENCE
