"""`auto: [positions]`: stretches a pretrained model's RoPE as far as the documents need.

Positions restart in each document, so the longest document decides, not the rows that hold several.
The answer is part of a run's identity: a run keeps the one with which it began.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from model.lengths import extended, trained_length
from trainer.config.checks import check
from trainer.config.schema import RunConfig
from trainer.model_source import choose_model, for_templates
from trainer.run.directory import RunDirectory
from trainer.run.identity import recorded_identity
from trainer.run.opening import check_run
from trainer.source_kinds import ModelSource
from trainer.text import prepare_text
from trainer.text_checks import longest_document


def stretched(config: RunConfig) -> tuple[RunConfig, str]:
    """Returns the configuration with the POSITIONS that its longest training document needs, and a
    line that says what was chosen and why; the line also joins `planned`.

    The data are prepared, and kept for the run, unless the answer does not depend on them.

    Raises:
      UserError, ValueError: the model, the data or the run's folder cannot be used.
    """
    source = choose_model(config.model, config.adapter.path, weights=False)
    positions, reason = _begun(config, source) or _needed(config, source)
    model = dataclasses.replace(config.model, overrides={**config.model.overrides, **positions})
    planned = "\n".join(filter(None, (config.planned, reason)))
    return check(dataclasses.replace(config, model=model, planned=planned)), reason


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
    positions = extended(source.config, length) if isinstance(length, int) else {}
    return positions, f"RoPE: as {run} began, {_named(positions) if positions else 'unchanged'}"


def _needed(config: RunConfig, source: ModelSource) -> tuple[dict[str, Any], str]:
    """Returns the POSITIONS that a new run needs, and the line."""
    if "rope_theta" in config.model.overrides:
        return {}, "RoPE: by model.overrides, whose rope_theta is made for the length"
    if not source.is_pretrained:
        return {}, "RoPE: that of the model from scratch"
    trained, rule = trained_length(source.config), source.config.rope.rule
    if trained is None:
        return {}, f"RoPE: unchanged; its rule {rule} adapts to the length of the rows"
    rows, ours = config.data.context_length, f"the model is trained for {trained:,}"
    if rows <= trained:
        return {}, f"RoPE: unchanged; rows have {rows:,} tokens, {ours}"
    if not extended(source.config, rows):
        return {}, f"RoPE: unchanged; {ours}, and the factors of its rule {rule} fit one length"
    check_run(config)  # before the data are prepared, which can take hours
    longest = _longest(config, source)
    if longest <= trained:
        return {}, f"RoPE: unchanged; the longest document has {longest:,} tokens, {ours}"
    # Some models state more than they were trained for; an export states no less.
    positions = extended(source.config, max(longest, source.config.max_position_embeddings))
    return positions, (
        f"RoPE: stretched to the longest document, {longest:,} tokens, since {ours}: "
        f"{_named(positions)}"
    )


def _named(positions: dict[str, Any]) -> str:
    return f"model.overrides {json.dumps(positions)}"


def _longest(config: RunConfig, source: ModelSource) -> int:
    """Prepares the run's data and returns the tokens of the longest training document."""
    source, tokenizer = for_templates(source, config.data)
    return longest_document(prepare_text(config, source.config, tokenizer, config.logging.console))
