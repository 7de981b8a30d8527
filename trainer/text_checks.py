"""Checks and warnings once model and data are open, in training on text and in dry runs."""

from __future__ import annotations

import dataclasses
import json
import operator
import shlex
from collections.abc import Iterator

import numpy as np

from data.clean import CleanConfig
from data.conversation import TEMPLATE_FILES
from data.errors import UserError
from data.loader import Loader
from data.prepared import Documents, Prepared
from data.sources import TURN_FORMATS
from model.adapter import AdapterConfig
from model.config import TransformerConfig
from model.lengths import extended_positions, supported_length

from .adapted_source import AdaptedSource, CheckpointAdapter, PeftAdapter
from .config.data import DataConfig
from .config.schema import ModelConfig, RunConfig
from .huggingface import peft
from .source_kinds import ModelSource

# The share of padding in an epoch that makes rows too long for the data, and the number of epochs
# beyond which a run repeats them too often. Fine-tuning takes a few.
MOST_PADDING, MOST_EPOCHS, USUAL_EPOCHS = 0.5, 10, 3
# What makes a whole model of an adapter.
_MERGE_RUN = "python -m scripts.export_hf --merge"
_MERGE_WITH_PEFT = f"{_MERGE_RUN} of its run, or peft's merge_and_unload,"


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
        _length_warning(source, config, longest),
        _held_out_length_warning(source, config.model, prepared),
        _padding_warning(loader),
        _repetition_warning(config, loader),
        _held_out_warning(config, prepared),
        _unused_warning(config.data),
        *_adapter_warnings(source, config),
        *_untrained_warnings(config, prepared),
    )
    return [warning for warning in warnings if warning]


def _padding_warning(loader: Loader) -> str | None:
    """Returns a warning if rows are mostly padding, which costs the same compute."""
    share, length = loader.padding_share, loader.context_length
    if share < MOST_PADDING:
        return None
    document = "pair" if loader.documents.chosen.any() else "document"
    longest = int(loader.documents.row_lengths.max())
    return (
        f"{share:.1%} of the tokens in the rows are padding: data.context_length is {length:,}, "
        f"and the longest {document} takes {longest:,} tokens; rows of about that length would "
        "waste less"
    )


def _repetition_warning(config: RunConfig, loader: Loader) -> str | None:
    """Returns a warning if a step repeats rows or all have empty ones, or a run repeats rows many
    times."""
    rows, batch = len(loader), loader.batch_size
    if not rows:
        return None
    train = config.train.for_epochs(rows)
    taken = train.rows_taken(train.steps, rows)
    if batch > taken:
        return (
            f"train.batch_size: the batch has {batch:,} rows, but the run has only {taken:,}, so "
            "the others are empty, and cost as much; a smaller batch would waste less"
        )
    if batch > rows:
        return (
            f"train.batch_size: the batch has {batch:,} rows, but an epoch has only {rows:,}, so "
            f"each step repeats {'it' if rows == 1 else 'them'} {batch / rows:.3g} times; use a "
            "smaller batch, shorter rows or more data"
        )
    epochs = taken / rows
    number, weight = _heaviest_source(loader.documents)
    times = epochs * weight
    if times <= MOST_EPOCHS:
        return None
    documents, remedy = "every document", "a smaller weight or fewer steps would repeat them less"
    if not loader.documents.equally_often:
        documents += f" of {config.data.sources[number].path} (weight {weight:g})"
    if weight <= 1:
        usual = dataclasses.replace(train, epochs=USUAL_EPOCHS).for_epochs(rows).steps
        remedy = f"{USUAL_EPOCHS} epochs would be {usual:,} steps"
    return (
        f"{train.steps:,} steps of {batch:,} rows are {f'{epochs:,.1f}'.removesuffix('.0')} epochs "
        f"of {rows:,} rows: {documents} is trained on {times:,.0f} times; {remedy}"
    )


def _heaviest_source(documents: Documents) -> tuple[int, float]:
    """Returns the number and weight of the source whose documents are used most often."""
    has_documents = np.diff(documents.source_starts) > 0
    weights = np.where(has_documents, documents.source_weights, 0.0)
    return int(weights.argmax()), float(weights.max())


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
    if prepared.report.kept == 1:
        return (
            "no held-out loss: there is only one record, which is held out as a whole or not at "
            "all; set data.held_out_path, or divide it"
        )
    documents = "1 document" if len(prepared.train) == 1 else f"{len(prepared.train):,} documents"
    return (
        f"no held-out loss: a share of {data.held_out_fraction:g} picks none of {documents}; raise "
        "data.held_out_fraction or set data.held_out_path"
    )


def _unused_warning(data: DataConfig) -> str | None:
    """Returns a warning about fields that apply only to conversations, if there are none."""
    if any(source.format in TURN_FORMATS for source in data.sources):
        return None
    # Not chat_template_kwargs and a template's file: the trained model answers with them.
    names = ["train_on", *([] if data.template.endswith(TEMPLATE_FILES) else ["template"])]
    names += [f"clean.{each.name}" for each in dataclasses.fields(CleanConfig)]
    names.remove("clean.near_duplicates")  # of texts too
    default = DataConfig()
    given = [
        f"data.{name}"
        for name in names
        if operator.attrgetter(name)(data) != operator.attrgetter(name)(default)
    ]
    if not given:
        return None
    formats = sorted({source.format for source in data.sources})
    return (
        f"{', '.join(given)}: without effect, since no source has conversations; found format "
        f"{' and '.join(formats)}"
    )


def _untrained_warnings(config: RunConfig, prepared: Prepared) -> list[str]:
    """Returns a warning for each source whose documents are all held out, as of a small one."""
    trained, held_out = (
        np.diff(documents.source_starts).tolist()
        for documents in (prepared.train, prepared.held_out)
    )
    return [
        f"{source.path}: {'its 1 document is' if count == 1 else f'all {count:,} documents are'} "
        "held out, so the source is not trained on; a smaller data.held_out_fraction than "
        f"{config.data.held_out_fraction:g}, or data.held_out_path, would leave it for training"
        for source, rest, count in zip(config.data.sources, trained, held_out, strict=False)
        if count and not rest
    ]


def longest_document(prepared: Prepared) -> int:
    """Returns the tokens of the longest training document; each completion of a pair is one."""
    return _longest(prepared.train)


def _longest(documents: Documents) -> int:
    lengths = np.maximum(documents.chosen, documents.lengths - documents.chosen)
    return int(lengths.max(initial=0))


def known_length(source: ModelSource, model: ModelConfig) -> int | None:
    """Returns the tokens that a pretrained model's positions are trained for; None for a model from
    scratch, or if its RoPE rule or the recipe's rope_theta supports any length.

    Args:
      source: the model with the recipe's positions; model: the recipe's section.
    """
    if not source.is_pretrained or "rope_theta" in model.overrides:
        return None
    return supported_length(source.config)


def _length_warning(source: ModelSource, config: RunConfig, longest: int) -> str | None:
    """Returns a warning if documents exceed a model's `known_length`, unless `auto: [positions]`
    will stretch it when the run trains.

    Args:
      longest: tokens of the longest document.
    """
    known = known_length(source, config.model)
    is_stretched = "positions" in config.auto and extended_positions(source.config, longest)
    if known is None or longest <= known or is_stretched:
        return None
    return (
        f"documents up to {longest:,} tokens, trained for {known:,}: set "
        f"rope_scaling{_example(source, longest)}"
    )


def _held_out_length_warning(
    source: ModelSource, model: ModelConfig, prepared: Prepared
) -> str | None:
    """Returns a warning if documents that are only measured exceed a model's `known_length`, which
    the training documents do not."""
    known, held_out = known_length(source, model), _longest(prepared.held_out)
    if known is None or not longest_document(prepared) <= known < held_out:
        return None
    return (
        f"held-out documents up to {held_out:,} tokens, but trained for {known:,}, and no "
        "training document is longer: the held-out loss counts positions that the model does not "
        "know; "
        f"shorter held-out documents or rope_scaling{_example(source, held_out)} would avoid that"
    )


def _example(source: ModelSource, length: int) -> str:
    """Returns an example of POSITIONS that reach a length, for a warning; "" if there is none."""
    example = extended_positions(source.config, length)
    return f", such as --model.overrides '{json.dumps(example)}'" if example else ""


def _adapter_warnings(source: ModelSource, config: RunConfig) -> Iterator[str]:
    """Yields how the training of a continued adapter differs from its earlier one."""
    if not isinstance(source, AdaptedSource):
        return
    before, section = source.adapter.config, config.adapter
    if before.dropout_rate and section.dropout is None:
        yield (
            f"adapter.dropout: 0 in preference tuning, as in TRL, but {before.dropout} in the "
            f"adapter's earlier training; --adapter.dropout {before.dropout} keeps it"
        )
    if before.quantize not in (section.quantize, "none"):
        yield (
            f"adapter.quantize: found {section.quantize}, but the adapter in {section.path} was "
            f"trained on a base in {before.quantize}; --adapter.quantize {before.quantize} trains "
            "on the same base"
        )


def check_vocabulary(source: AdaptedSource, rows: int) -> None:
    """Refuses templates that would add vocabulary rows to the `rows` of a continued adapter, which
    trains the same modules as before: their rows would not fit, or no file would have them.
    """
    if source.config.vocab_size <= rows:
        return
    owner, remedy = f"the adapter in {source.adapter.folder} does not have", _MERGE_WITH_PEFT
    if isinstance(source.adapter, CheckpointAdapter):
        owner, remedy = f"the run of {source.adapter.folder} did not have", _MERGE_RUN
    raise UserError(
        f"data.add_control_tokens: the templates need {source.config.vocab_size - rows} tokens "
        f"that {owner}; {remedy} makes a whole model of it; as model.path it gets them, as does a "
        "new adapter, without adapter.path"
    )


def check_new_rows(adapter: AdapterConfig, model: TransformerConfig, rows: int) -> None:
    """Raises UserError if vocabulary rows that the templates add to the base's `rows` are neither
    trained nor in the base: no checkpoint or export would hold them."""
    names = ("embed_tokens",) if model.tie_word_embeddings else ("embed_tokens", "lm_head")
    missing = [name for name in names if not adapter.trains(f"{name}.weight")]
    if adapter.rank and model.vocab_size > rows and missing:
        raise UserError(
            f"data.add_control_tokens: the templates need {model.vocab_size - rows} tokens that "
            "the base lacks, and with adapters only modules in adapter.train are saved; "
            f"--adapter.train '[{', '.join((*adapter.train, *missing))}]' would train and save "
            "their rows"
        )


def check_same(section: AdapterConfig, source: AdaptedSource) -> None:
    """Raises UserError unless the recipe's section describes the continued adapter, and ValueError
    if peft would not train all of it."""
    if isinstance(source.adapter, PeftAdapter):
        adapted = source.config.with_adapter(source.adapter.config)
        peft.check_trainable(source.adapter.folder, adapted)
    section = source.config.with_adapter(section).adapter or section  # what all-linear means
    differing = [
        (f"adapter.{name.replace('projections', 'targets')}", needed, found)
        for name in ("rank", "alpha", "projections", "use_rslora", "use_dora", "train")
        for needed, found in [(getattr(source.adapter.config, name), getattr(section, name))]
        if needed != found
    ]
    if differing:
        field, needed, found = differing[0]
        flags = " ".join(f"--{name} {shlex.quote(_as_yaml(value))}" for name, value, _ in differing)
        raise UserError(
            f"{field}: found {_as_yaml(found)}; the adapter in {section.path} has "
            f"{_as_yaml(needed)}; {flags} would continue it"
        )


def _as_yaml(value: object) -> str:
    """A field's value as in a recipe."""
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
