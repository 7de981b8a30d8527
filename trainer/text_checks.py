"""Checks and warnings once model and data are open, in training on text and in dry runs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from data.errors import UserError
from data.loader import Loader
from data.prepared import Prepared
from model.adapter import AdapterConfig
from model.lengths import extended, trained_length

from .adapted_source import AdaptedSource, CheckpointAdapter
from .config.schema import ModelConfig, RunConfig
from .source_kinds import ModelSource

# The share of padding in an epoch that makes rows too long for the data, and the number of epochs
# beyond which a run repeats them too often. Fine-tuning takes a few.
MOST_PADDING, MOST_EPOCHS, USUAL_EPOCHS = 0.5, 10, 3


def data_warnings(
    source: ModelSource, config: RunConfig, prepared: Prepared, loader: Loader
) -> list[str]:
    """Returns lines for the user about these data, before training.

    Args:
      source: the model with the recipe's positions.
      loader: of the training split.
    """
    longest = longest_document(prepared)
    warnings = (
        length_warning(source, config.model, longest),
        _padding_warning(loader, longest),
        _repetition_warning(config, loader),
        _held_out_warning(config, prepared),
    )
    return [warning for warning in warnings if warning]


def _padding_warning(loader: Loader, longest: int) -> str | None:
    """Returns a warning if rows are mostly padding, which costs the same compute."""
    share, length = loader.padding_share, loader.context_length
    if share < MOST_PADDING:
        return None
    return (
        f"{share:.1%} of the tokens in the rows are padding: data.context_length is {length:,}, "
        f"and the longest document has {longest:,} tokens; rows of about that length would waste "
        "less"
    )


def _repetition_warning(config: RunConfig, loader: Loader) -> str | None:
    """Returns a warning if a step repeats rows, or a run repeats them many times."""
    rows, batch = len(loader), loader.batch_size
    if not rows:
        return None
    if batch > rows:
        return (
            f"train.batch_size: the batch has {batch:,} rows, but an epoch has only {rows:,}, so "
            f"each step repeats {'it' if rows == 1 else 'them'} {batch / rows:.3g} times; use a "
            "smaller batch, shorter rows or more data"
        )
    train = config.train.for_epochs(rows)
    epochs = train.steps * batch / rows
    if epochs <= MOST_EPOCHS:
        return None
    usual = dataclasses.replace(train, epochs=USUAL_EPOCHS).for_epochs(rows).steps
    return (
        f"{train.steps:,} steps of {batch:,} rows are {epochs:,.0f} epochs of {rows:,} rows: every "
        f"document is trained on {epochs:,.0f} times; {USUAL_EPOCHS} epochs would be {usual:,} "
        "steps"
    )


def _held_out_warning(config: RunConfig, prepared: Prepared) -> str | None:
    """Returns a warning if a held-out loss is wanted but no document is held out."""
    data = config.data
    if len(prepared.held_out) or not (data.held_out_path or data.held_out_fraction):
        return None
    if data.held_out_path:
        return (
            f"no held-out loss: data.held_out_path {data.held_out_path} has no document to "
            "measure; set another one"
        )
    documents = "1 document" if len(prepared.train) == 1 else f"{len(prepared.train):,} documents"
    return (
        f"no held-out loss: a share of {data.held_out_fraction:g} picks none of {documents}; raise "
        "data.held_out_fraction or set data.held_out_path"
    )


def longest_document(prepared: Prepared) -> int:
    """Returns the tokens of the longest training document; each completion of a pair is one."""
    documents = prepared.train
    lengths = np.maximum(documents.chosen, documents.lengths - documents.chosen)
    return int(lengths.max(initial=0))


def length_warning(source: ModelSource, model: ModelConfig, longest: int) -> str | None:
    """Returns a warning if documents exceed a pretrained model's length; else None.

    Also None if the recipe sets rope_theta, which handles the length.

    Args:
      source: the model with the recipe's positions; model: the recipe's section.
      longest: tokens of the longest document.
    """
    trained = trained_length(source.config)
    if (
        not source.is_pretrained
        or "rope_theta" in model.overrides
        or trained is None
        or longest <= trained
    ):
        return None
    example = extended(source.config, longest)
    such_as = f", such as --model.overrides '{json.dumps(example)}'" if example else ""
    return f"documents up to {longest:,} tokens, trained for {trained:,}: set rope_scaling{such_as}"


def check_vocabulary(source: AdaptedSource, rows: int) -> None:
    """Refuses templates that would add vocabulary rows to the `rows` of an adapter's checkpoint,
    whose trained or drawn rows would not fit the larger vocabulary.
    """
    if isinstance(source.adapter, CheckpointAdapter) and source.config.vocab_size > rows:
        raise UserError(
            f"data.add_control_tokens: the templates need {source.config.vocab_size - rows} tokens "
            f"that the run of {source.adapter.folder} did not have; python -m scripts.export_hf "
            "--merge makes a whole model of it; as model.path it gets them"
        )


def check_same(section: AdapterConfig, source: AdaptedSource) -> None:
    """Raises UserError unless the recipe's section describes the continued adapter."""
    section = source.config.with_adapter(section).adapter or section  # what all-linear means
    for name in ("rank", "alpha", "projections", "use_rslora", "use_dora", "train"):
        needed, found = getattr(source.adapter.config, name), getattr(section, name)
        if needed != found:
            raise UserError(
                f"adapter.{name.replace('projections', 'targets')}: found {found!r}; the adapter "
                f"in {section.path} has {needed!r}"
            )
