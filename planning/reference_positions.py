"""`auto: [positions]` for `preference.ref_model`: the log-likelihoods of a reference whose RoPE
ends before the documents do mean nothing, so it is extended as the trained model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model.config import TransformerConfig
from model.lengths import extended_positions, supported_length
from trainer.config.schema import ModelConfig, RunConfig
from trainer.model_source import choose_model, named
from trainer.run.directory import RunDirectory
from trainer.run.identity import recorded_identity


def reference_positions(
    config: RunConfig, trained_model: TransformerConfig, longest: Callable[[], int]
) -> dict[str, Any]:
    """Returns the POSITIONS that `preference.ref_overrides` lacks; none if the reference is the
    initial model, reaches the documents, or has positions by the user.

    A run that has begun keeps those with which it began.

    Args:
      trained_model: with its positions for this run.
      longest: prepares the data and returns the tokens of the longest document.

    Raises:
      UserError, ValueError: the reference or the data cannot be used.
    """
    options = config.preference
    if not options.needs_reference or options.ref_model is None or options.ref_overrides:
        return {}
    section = ModelConfig(path=options.ref_model, tokenizer=options.ref_tokenizer)
    with named("preference.ref_model"):
        reference = choose_model(section, weights=False, field="preference.ref_model").config
    run = RunDirectory.of(config)
    if run.config.exists():
        recorded = recorded_identity(run)["preference.ref_overrides"]
        length = recorded.get("max_position_embeddings") if isinstance(recorded, dict) else None
        return extended_positions(reference, length) if isinstance(length, int) else {}
    # The same model before training: both have the same RoPE, also where no document needs it.
    positions = extended_positions(reference, trained_model.max_position_embeddings)
    if positions and reference.with_positions(**positions).rope == trained_model.rope:
        return positions
    trained, rows = supported_length(reference), config.data.context_length
    if trained is None or not extended_positions(reference, rows) or longest() <= trained:
        return {}
    return extended_positions(reference, max(longest(), reference.max_position_embeddings))
