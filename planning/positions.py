"""`auto: [positions]`: extends a pretrained model's RoPE as far as the documents need.

Positions restart in each document, so the longest document decides, not the rows that hold several.
The answer is part of a run's identity: a run keeps the one with which it began.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from data.errors import UserError
from model.config import POSITIONS
from model.lengths import extended_positions, supported_length
from trainer.config.checks import check
from trainer.config.schema import RunConfig
from trainer.model_source import choose_model, for_templates
from trainer.run.directory import RunDirectory
from trainer.run.identity import recorded_identity
from trainer.run.opening import check_run
from trainer.source_kinds import ModelSource
from trainer.text import prepare_text
from trainer.text_checks import longest_document

from .reference_positions import reference_positions


def with_extended_positions(config: RunConfig) -> tuple[RunConfig, str]:
    """Returns the configuration with the POSITIONS that its longest training document needs, also
    those of `preference.ref_model`, and what was chosen and why, which also joins `planned`.

    The data are prepared, and kept for the run, unless the answer does not depend on them.

    Raises:
      UserError, ValueError: the model, the data or the run's folder cannot be used.
    """
    if config.trajectories.path:
        raise UserError(
            "auto: found positions in a run on trajectories, which has no documents; leave it out"
        )
    source = choose_model(config.model, config.adapter.path, weights=False)
    positions, reason = _begun(config, source) or _needed(config, source)
    model = dataclasses.replace(config.model, overrides={**config.model.overrides, **positions})
    preference = config.preference
    if found := reference_positions(
        config,
        source.config.with_positions(**positions),
        functools.cache(lambda: _longest(config, source)),
    ):
        preference = dataclasses.replace(preference, ref_overrides=found)
        reason += f"\nRoPE of the reference: stretched too, {_named_reference(found)}"
    planned = "\n".join(filter(None, (config.planned, reason)))
    return (
        check(dataclasses.replace(config, model=model, preference=preference, planned=planned)),
        reason,
    )


def without_earlier_answer(config: RunConfig) -> RunConfig:
    """Returns the configuration as the user gave it: from a run's own configuration, used as a
    recipe, removes the POSITIONS that were chosen then, which would be extended once more."""
    overrides = config.model.overrides
    length = overrides.get("max_position_embeddings")
    if "model.overrides {" in config.planned and isinstance(length, int):
        given = {name: value for name, value in overrides.items() if name not in POSITIONS}
        model = dataclasses.replace(config.model, overrides=given)
        without = choose_model(model, config.adapter.path, weights=False)
        chosen = extended_positions(without.config, length)
        if {**given, **chosen} == overrides and _named(chosen) in config.planned:
            config = dataclasses.replace(config, model=model)
    preference = config.preference
    if preference.ref_overrides and _named_reference(preference.ref_overrides) in config.planned:
        preference = dataclasses.replace(preference, ref_overrides={})
    return dataclasses.replace(config, preference=preference, planned="")


def _begun(config: RunConfig, source: ModelSource) -> tuple[dict[str, Any], str] | None:
    """Returns the POSITIONS with which the run in the configuration's folder began, and the line;
    None if there is no run."""
    run = RunDirectory.of(config)
    if run.mirror is not None:
        run.mirror.pull(run.config.name)
    if not run.config.exists():
        return None
    overrides = recorded_identity(run)["model.overrides"]
    length = overrides.get("max_position_embeddings") if isinstance(overrides, dict) else None
    # From the length, so that other differences from the folder's run are still refused.
    positions = extended_positions(source.config, length) if isinstance(length, int) else {}
    if positions:
        how = _named(positions)
    elif isinstance(overrides, dict) and any(name in POSITIONS for name in overrides):
        how = "by model.overrides"  # the user's own, which are not taken for an answer later
    else:
        how = "unchanged"
    return positions, f"RoPE: as {run} began, {how}"


def _needed(config: RunConfig, source: ModelSource) -> tuple[dict[str, Any], str]:
    """Returns the POSITIONS that a new run needs, and the line."""
    if "rope_theta" in config.model.overrides:
        return {}, "RoPE: by model.overrides, whose rope_theta is made for the length"
    if not source.is_pretrained:
        return {}, "RoPE: that of the model from scratch"
    trained, rule = supported_length(source.config), source.config.rope.rule
    if trained is None:
        return {}, f"RoPE: unchanged; its rule {rule} adapts to the length of the rows"
    rows, ours = config.data.context_length, f"the model is trained for {trained:,}"
    if rows <= trained:
        return {}, f"RoPE: unchanged; rows have {rows:,} tokens, {ours}"
    if not extended_positions(source.config, rows):
        return {}, f"RoPE: unchanged; {ours}, and the factors of its rule {rule} fit one length"
    check_run(config)  # before the data are prepared, which can take hours
    longest = _longest(config, source)
    if longest <= trained:
        return {}, f"RoPE: unchanged; the longest document has {longest:,} tokens, {ours}"
    # Some models state more than they were trained for; an export states no less.
    length = max(longest, source.config.max_position_embeddings)
    positions = extended_positions(source.config, length)
    return positions, (
        f"RoPE: stretched to the longest document, {longest:,} tokens, since {ours}: "
        f"{_named(positions)}"
    )


def _named(positions: dict[str, Any]) -> str:
    return f"model.overrides {json.dumps(positions)}"


def _named_reference(positions: dict[str, Any]) -> str:
    return f"preference.ref_overrides {json.dumps(positions)}"


def _longest(config: RunConfig, source: ModelSource) -> int:
    """Prepares the run's data and returns the tokens of the longest training document."""
    source, tokenizer = for_templates(source, config.data)
    return longest_document(prepare_text(config, source.config, tokenizer, config.logging.console))
