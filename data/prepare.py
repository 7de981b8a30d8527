"""Prepares data once: tokenizes sources into documents and writes them to a folder."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from data import paths, prepared, tables
from data import sources as source_readers
from data.clean import CleanConfig
from data.conversation import Order, Record, Tokens
from data.encode import Encoder, encode_all
from data.errors import UserError
from data.folders import building
from data.mismatched import with_mismatched
from data.prepared import Prepared
from data.progress import ProgressBar
from data.record_store import write_records
from data.report import MOST_DROPPED, Report
from data.sources import Source
from data.templates import jinja_template
from data.templates.alternation import order_of
from data.templates.sandbox import compile_template
from data.tokenizer import Tokenizer

# To be changed with every change to the documents, so that existing folders are not reused.
RULES = "prepare-8"
WORTH_PROCESSES = (
    1 << 23
)  # bytes of a source from which on several processes, which take seconds to start, encode it


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    context_length: int,
    folder: str | Path,
    *,
    held_out_fraction: float = 0.0,
    held_out_sources: Sequence[Source] = (),
    clean: CleanConfig = CleanConfig(),
    train_on: str = "all",
    cut_prompts: bool = False,
    unpaired: bool = False,
    share_prompts: bool = False,
    progress: bool = True,
    key: str | None = None,
) -> Prepared:
    """Tokenizes all sources into a folder, or opens the folder if they have been tokenized before.

    The folder's name is a hash of the contents, templates, tokenizer and rules. Besides the
    documents it contains dropped.jsonl, with the file, line and reason of every record that was not
    used (of the first 100,000 such records). Conversations longer than context_length are split
    between exchanges (`clean.split`); what is still longer is cut into consecutive pieces, and
    pieces without a trained token are left out. Several processes may prepare the same folder at
    the same time.

    Args:
      sources: the sources to train on.
      tokenizer: the tokenizer.
      context_length: how many tokens a document has at most.
      folder: parent of the prepared folders. If it is in a store (gs://, s3://), the prepared
        folder is made and read in the cache on this machine, and copied to or from the store.
      held_out_fraction: the fraction of records, chosen by a hash of their ids, for the split
        held_out.
      held_out_sources: sources that belong to the split held_out entirely; numbered after
        `sources`.
      clean: the cleaning rules for conversations.
      train_on: train on `all` assistant turns, or only on the `last` one.
      cut_prompts: whether a preference pair that is too long loses the beginning of its
        prompt, or is dropped.
      unpaired: whether each completion of a preference is a document of its own, with a label and
        the completion of another record after the same prompt, as KTO needs them.
      share_prompts: whether a row holds the prompt of two completions once, which decides what
      fits.
      progress: whether to show a progress bar.
      key: the folder's name, if another process has prepared it: then no source is read.

    Returns:
      The two splits. In held_out every document counts once, whatever its source's weight.

    Raises:
      UserError: a file cannot be read (see data.sources.read), a template does not fit, no document
        is left to train on; or there is no folder of the name `key`.
    """
    if not sources:
        raise UserError("no data: data.sources is empty; --data.path FILE.json would work")
    if context_length < 2:
        raise UserError(
            f"data.context_length: found {context_length}, which leaves no token to predict; 2 or "
            "more would work"
        )
    if not 0.0 <= held_out_fraction < 1.0:
        raise UserError(
            f"data.held_out_fraction: found {held_out_fraction}; a number from 0 to less than 1 "
            "would work"
        )
    all_sources = [
        replace(source, left_out=(str(folder),)) for source in (*sources, *held_out_sources)
    ]
    for source in all_sources:
        _template_text(source, tokenizer)  # so that a wrong name fails before an hour of reading
        _check_arrays(source, tokenizer)
    job = _Job(
        all_sources,
        len(sources),
        tokenizer,
        context_length,
        held_out_fraction,
        clean,
        train_on,
        cut_prompts,
        unpaired,
        share_prompts,
    )
    name = key or job.key()
    local, shared = paths.local_folder(folder) / name, f"{str(folder).rstrip('/')}/{name}"
    stored = prepared.read_or_warn(local)
    if stored is None and paths.is_remote(folder):
        paths.download(shared, local, prepared.INDEX, prepared.is_whole)
        stored = prepared.read_or_warn(local)
    if stored is None:
        if key:
            raise UserError(
                f"{shared}: not found on this machine, but another process has prepared it; a "
                "data.prepared that all processes share would work"
            )
        _build(job, local, progress)
        if paths.is_remote(folder):
            paths.upload(local, shared, prepared.INDEX)
        stored = prepared.read(local)
    return prepared.open_folder(local, stored, all_sources, context_length)


@dataclass
class _Job:
    """The arguments of `prepare` that decide what the folder contains."""

    sources: list[Source]
    """The sources to train on, then the held-out ones."""
    train_sources: int
    """Number of sources to train on."""
    tokenizer: Tokenizer
    context_length: int
    held_out_fraction: float
    clean: CleanConfig
    train_on: str
    cut_prompts: bool
    unpaired: bool
    share_prompts: bool

    @cached_property
    def orders(self) -> list[Order]:
        """The order of turns that each source's template requires."""
        return [
            order_of(source.template, self.tokenizer) if source.has_turns else "any"
            for source in self.sources
        ]

    @cached_property
    def add_bos(self) -> tuple[bool, ...]:
        """Whether each source's texts begin with BOS."""
        return tuple(
            source.format == "text"
            and (self.tokenizer.adds_bos if source.add_bos is None else source.add_bos)
            for source in self.sources
        )

    def key(self) -> str:
        """Returns the folder's name, a hash of contents, which moving a file does not change."""
        parts = {
            "rules": RULES,
            "tokenizer": self.tokenizer.fingerprint,
            "context_length": self.context_length,
            "held_out_fraction": self.held_out_fraction,
            "train_sources": self.train_sources,
            "clean": asdict(self.clean),
            "train_on": self.train_on,
            "cut_prompts": self.cut_prompts,
            "unpaired": self.unpaired,
            "share_prompts": self.share_prompts,
            "template_date": self._template_date(),
            "template_kwargs": dict(self.tokenizer.template_kwargs),
            "sources": [
                [
                    _content_hash(source),
                    source.format,
                    _template_text(source, self.tokenizer),
                    dict(source.fields),
                    add_bos,
                ]
                for source, add_bos in zip(self.sources, self.add_bos, strict=True)
            ],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]

    def _template_date(self) -> str | None:
        """Returns the date that the templates write, or None if none writes one."""
        texts = [_template_text(source, self.tokenizer) or "" for source in self.sources]
        return (
            self.tokenizer.template_date.date().isoformat()
            if any("strftime_now" in text for text in texts)
            else None
        )

    def _is_record_held_out(self, source: int, record: Record) -> bool:
        return self.is_held_out(source, record.id)

    def is_held_out(self, source: int, record_id: str) -> bool:
        """Returns whether a record belongs to the split held_out."""
        if source >= self.train_sources:
            return True
        number = int.from_bytes(
            hashlib.sha256(f"held-out\0{record_id}".encode()).digest()[:8], "big"
        )
        return number < self.held_out_fraction * 2**64

    def documents(
        self, report: Report, index: prepared.Index, progress_bar: ProgressBar
    ) -> Iterator[dict]:
        """Yields the fields of each document, as they are stored.

        Args:
          report: receives the counts of records.
          index: receives an entry for each document.
          progress_bar: advanced by the bytes read.
        """
        templates = tuple(source.template for source in self.sources)
        encoder = Encoder(
            templates,
            self.tokenizer,
            self.context_length,
            self.clean.split,
            self.train_on,
            self.cut_prompts,
            self.add_bos,
            self.unpaired,
            self.share_prompts,
        )
        for number, source in enumerate(self.sources):
            records = source_readers.read(
                source, report, number, progress_bar.advance, self.clean, self.orders[number]
            )
            encoded_records = encode_all(encoder, records, _processes_for(source))
            if self.unpaired:
                encoded_records = with_mismatched(
                    encoded_records,
                    partial(self._is_record_held_out, number),
                    self.context_length,
                    self.cut_prompts,
                    self.share_prompts,
                )
            for record, encoded in encoded_records:
                source_report = report.sources[-1]
                if encoded.drop_reason is not None:
                    content = (
                        None
                        if isinstance(record, Tokens)
                        else asdict(replace(record, file="", line=0))
                    )
                    source_report.reject(encoded.drop_reason, record, content)
                    continue
                source_report.count_kept(encoded.changes)
                held_out = self.is_held_out(number, record.id)
                for tokens, mask, chosen, label, shared in encoded.documents:
                    index.add(
                        len(tokens),
                        int(mask[1:].sum()),
                        number,
                        held_out,
                        chosen,
                        int(mask[1:chosen].sum()),
                        label,
                        shared,
                    )
                    yield {
                        "tokens": tokens,
                        "loss_mask": mask,
                        "source": number,
                        "record_id": record.id,
                    }
            source_report = report.sources[-1]
            if not source_report.kept:
                reasons = source_report.reasons()
                raise UserError(
                    f"{source.path}: none of its {source_report.records} records can be used "
                    f"({reasons})"
                )
            others = source.other_splits() if number < self.train_sources else []
            if others:
                names = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
                source_report.notes.append(
                    f"also reads {names}; name the folder or file of the training split to leave "
                    "them out"
                )


def _build(job: _Job, folder: Path, progress: bool) -> None:
    """Prepares the data; if another process was faster, its folder is kept."""
    index = prepared.Index()
    size = sum(file.size() for source in job.sources for file in source.files())
    progress_bar = ProgressBar("preparing data", size, "B", progress)
    with building(folder, prepared.is_whole) as temporary:
        with progress_bar, (temporary / prepared.DROPPED).open("w", encoding="ascii") as dropped:
            numbers = itertools.count(1)
            report = Report(
                on_drop=lambda record: (
                    next(numbers) <= MOST_DROPPED and dropped.write(record.to_json() + "\n")
                )
            )
            write_records(
                temporary,
                prepared.DOCUMENTS,
                prepared.document_features,
                lambda: job.documents(report, index, progress_bar),
            )
        arrays = index.arrays()
        if arrays["held_out"].all():
            raise UserError(
                f"data.held_out_fraction: found {job.held_out_fraction}, which takes all of "
                f"{report.kept} records and leaves nothing to train on; a smaller one would work"
            )
        prepared.write_index(temporary, arrays, report)


def _processes_for(source: Source) -> int:
    """Returns how many processes encode a source: one per core, or a single one for little work."""
    size = sum(file.size() for file in source.files())
    return _cores() if source.format != "tokens" and size >= WORTH_PROCESSES else 1


def _cores() -> int:
    """Returns the cores that this process may use; Slurm, containers and taskset may limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _template_text(source: Source, tokenizer: Tokenizer) -> str | None:
    """Returns the Jinja chat template of a source, or None if it has no conversations.

    Raises:
      UserError: there is no such template, or it uses what is not allowed.
    """
    if not source.has_turns:
        return None
    text = jinja_template(source.template, tokenizer)
    compile_template(text)
    return text


def _check_arrays(source: Source, tokenizer: Tokenizer) -> None:
    """Raises UserError early for an array of tokens that would be refused as a whole later."""
    for file in source.files() if source.format == "tokens" else ():
        if file.suffix != ".npy" or paths.is_remote(file.path) or not file.exists():
            continue
        array = tables.open_npy(file, source.would_work)
        if array.dtype.kind not in "iu":
            raise UserError(f"{file}: holds {array.dtype}, not integers; {source.would_work}")
        if (
            array.ndim == 1
            and len(array)
            and not 0 <= array.min() <= array.max() < tokenizer.vocab_size
        ):
            raise UserError(
                f"{file}: holds ids from {array.min()} to {array.max()}, and the tokenizer has 0 "
                f"to {tokenizer.vocab_size - 1}; ids of this tokenizer would work"
            )


def _content_hash(source: Source) -> str:
    """Returns a hash of the contents of the source's files, in their order."""
    digest = hashlib.sha256()
    for file in source.files():
        if not file.exists():
            next(
                source_readers.read(source, Report()), None
            )  # raises the error about the missing file
        with file.open() as opened:
            digest.update(hashlib.file_digest(cast(Any, opened), "sha256").digest())
    return digest.hexdigest()


if __name__ == "__main__":
    raise SystemExit(
        "this module is not a command; python -m scripts.prepare --config RECIPE.yaml tokenizes a "
        "recipe's data"
    )
