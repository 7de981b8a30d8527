"""Prepares sources once: token documents in array_record files by tensorflow-datasets, and a light index of them."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data import paths
from data import sources as sources_room
from data.clean import CleanConfig
from data.conversation import Tokens
from data.encode import Encoder, encode_all
from data.errors import UserError
from data.report import Report, SourceReport
from data.sources import Source
from data.templates import jinja_template
from data.tokenizer import Tokenizer

RULES = "prepare-3"  # change it with any change of what a document holds: old folders are then left alone
DROPPED = "dropped.jsonl"
INDEX = "index.npz"  # written last: a folder with an index is whole
WORTH_PROCESSES = 1 << 23  # bytes of a source from which on several processes encode it; they take seconds to start


@dataclass(frozen=True)
class Document:
    """tokens: int32 [n]; loss_mask: bool [n], is token i a target trained on; source: number; record_id: text."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    source: int
    record_id: str


class Documents:
    """One split of a prepared folder: len and [number] -> Document. Picklable, opens lazily.

    lengths, sources, trained (tokens trained on): int32 [N]; weights: float64 [N]; fingerprint: changes with any
    document.
    """

    def __init__(self, folder: Path, numbers: np.ndarray, index: dict[str, np.ndarray], weights: np.ndarray, name: str):
        self.folder, self.name = folder, name
        self.fingerprint = f"{folder.name}/{name}"
        self._numbers = numbers
        self.lengths = index["length"][numbers]
        self.trained = index["trained"][numbers]
        self.sources = index["source"][numbers]
        self.weights = weights[self.sources] if len(numbers) else np.zeros(0)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Document:
        record = self._store[int(self._numbers[number])]
        return Document(
            record["tokens"], record["loss_mask"].astype(bool), int(record["source"]), record["record_id"].decode()
        )

    @cached_property
    def _store(self):
        import tensorflow_datasets as tfds

        return tfds.builder_from_directory(str(self.folder / "documents")).as_data_source(split="documents")

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_store"}


@dataclass(frozen=True)
class Prepared:
    """train and held_out: Documents (held_out may be empty); report: what became of every record; folder."""

    folder: Path
    train: Documents
    held_out: Documents
    report: Report
    context_length: int


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
    progress: bool = True,
    key: str | None = None,
) -> Prepared:
    """Tokenizes all sources into `folder`/HASH, or reuses it: the hash is of contents, templates, tokenizer and rules.

    Conversations longer than context_length are split on whole exchanges (`clean.split`); what is still longer is cut
    into consecutive pieces, those without a token to learn from left out. The folder also holds dropped.jsonl: every
    record that was not used, with the reason. train_on: `all` assistant turns, or only the `last`.
    held_out_fraction of the records, chosen by a hash of their ids, and all of held_out_sources (numbered on after
    `sources`) are the split held_out, in which every document counts once, whatever its source's weight. Several processes
    may prepare the same folder at once. A folder in a store (gs://, s3://) is filled from, and read through, one in the cache.
    key: HASH as another process found it, which has prepared that folder: it is opened, and no source is read.
    Raises UserError: a bad file (see data.sources.read), a template that does not fit, nothing to train on; with a key, no
    such folder.
    """
    if not sources:
        raise UserError("no data: data.sources is empty; --data.path FILE.json would work")
    if context_length < 2:
        raise UserError(f"context_length {context_length} leaves no token to predict; 2 or more would work")
    if not 0.0 <= held_out_fraction < 1.0:
        raise UserError(f"held_out_fraction {held_out_fraction} must be at least 0 and below 1")
    everything = [*sources, *held_out_sources]
    for source in everything:
        _template(source, tokenizer)  # a wrong name fails before an hour of reading
    job = _Job(everything, len(sources), tokenizer, context_length, held_out_fraction, clean, train_on)
    name = key or job.key()
    final, there = paths.local_folder(folder) / name, f"{str(folder).rstrip('/')}/{name}"
    if not (final / INDEX).exists() and paths.is_remote(folder):
        paths.download(there, final, INDEX)
    if not (final / INDEX).exists():
        if key:
            raise UserError(f"{there}: not seen here, where another process has prepared it; a data.prepared that all "
                            "processes share would work")
        _build(job, final, progress)
        if paths.is_remote(folder):
            paths.upload(final, there, INDEX)
    return _open(final, everything, context_length)


@dataclass
class _Job:
    sources: list[Source]
    train_sources: int
    tokenizer: Tokenizer
    context_length: int
    held_out_fraction: float
    clean: CleanConfig
    train_on: str

    def key(self) -> str:
        """Names what the folder holds, by content: a file that moved is the same, a file that changed is another."""
        parts = {
            "rules": RULES,
            "tokenizer": self.tokenizer.fingerprint,
            "context_length": self.context_length,
            "held_out_fraction": self.held_out_fraction,
            "train_sources": self.train_sources,
            "clean": asdict(self.clean),
            "train_on": self.train_on,
            "sources": [
                [_content_hash(source), source.format, _template(source, self.tokenizer)] for source in self.sources
            ],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]

    def held_out(self, source: int, record_id: str) -> bool:
        if source >= self.train_sources:
            return True
        place = int.from_bytes(hashlib.sha256(f"held-out\0{record_id}".encode()).digest()[:8], "big")
        return place < self.held_out_fraction * 2**64

    def documents(self, report: Report, index: "_Index", bar) -> Iterator[tuple[int, dict]]:
        """(key, record) as tensorflow-datasets wants them; keys are consecutive, so that order is the sources'."""
        templates = tuple(source.template for source in self.sources)
        encoder = Encoder(templates, self.tokenizer, self.context_length, self.clean.split, self.train_on)
        for number, source in enumerate(self.sources):
            size = sum(file.size() for file in source.files())
            processes = _cores() if source.format != "tokens" and size >= WORTH_PROCESSES else 1
            items = sources_room.read(source, report, number, bar.update, self.clean)
            for item, made in encode_all(encoder, items, processes):
                account = report.sources[-1]
                if isinstance(made, str):
                    account.reject(made, item.record, None if isinstance(item, Tokens) else asdict(item))
                    continue
                account.repaired.update(made.changes)
                held_out = self.held_out(number, item.id)
                for tokens, mask in made.documents:
                    key = index.add(len(tokens), int(mask[1:].sum()), number, held_out)
                    yield key, {"tokens": tokens, "loss_mask": mask, "source": number, "record_id": item.id}
            account = report.sources[-1]
            if not account.kept:
                why = f"none of its {account.records} records can be used ({account.reasons()})"
                raise UserError(f"{source.path}: {why}")


class _Index:
    def __init__(self):
        self.columns = {"length": [], "trained": [], "source": [], "held_out": []}

    def add(self, *values) -> int:
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        return len(self.columns["length"]) - 1

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(column, np.int32) for name, column in self.columns.items()}


def _build(job: _Job, final: Path, progress: bool) -> None:
    """Builds beside the final place and moves it there whole; if another process was quicker, its folder stands."""
    import tensorflow_datasets as tfds
    from tqdm import tqdm

    final.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    index = _Index()
    total = sum(file.size() for source in job.sources for file in source.files())
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="preparing data", disable=not progress)
    try:
        with bar, _quiet(tfds), (building / DROPPED).open("w", encoding="ascii") as dropped:
            report = Report(sink=lambda entry: dropped.write(json.dumps(entry) + "\n"))
            builder = _builder(tfds)(
                data_dir=str(building / "tfds"), documents=lambda: job.documents(report, index, bar)
            )
            builder.download_and_prepare()
            written = Path(builder.data_dir)
        arrays = index.arrays()
        if arrays["held_out"].all():
            kept = f"held_out_fraction {job.held_out_fraction} of {report.kept} conversations"
            raise UserError(f"nothing is left to train on: {kept} took them all; a smaller fraction would work")
        os.rename(written, building / "documents")
        shutil.rmtree(building / "tfds")
        accounts = json.dumps([account.to_dict() for account in report.sources], indent=1, ensure_ascii=False)
        (building / "report.json").write_text(accounts)
        np.savez(building / INDEX, **arrays)
        if final.exists() and not (final / INDEX).exists():
            shutil.rmtree(final)
        with contextlib.suppress(OSError):  # exists and is not empty: the same content by another process
            os.rename(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _builder(tfds):
    # Not in its registry of names: a second prepare() in one process would collide with the first.
    class Longstripe(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def __init__(self, *, documents, **options):
            self._documents = documents
            # array_record is the one format that tensorflow-datasets reads and writes right without tensorflow.
            super().__init__(file_format="array_record", **options)

        def _info(self):
            features = tfds.features.FeaturesDict(
                {
                    "tokens": tfds.features.Tensor(shape=(None,), dtype=np.int32),
                    "loss_mask": tfds.features.Tensor(shape=(None,), dtype=np.uint8),
                    "source": np.int32,
                    "record_id": tfds.features.Text(),
                }
            )
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, download_manager):
            return {"documents": self._generate_examples()}

        def _generate_examples(self):
            return self._documents()

    return Longstripe


@contextlib.contextmanager
def _quiet(tfds):
    """Its bars and its line about downloading would hide ours; an error in our generator comes through as it is."""
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()


def _open(final: Path, sources: list[Source], context_length: int) -> Prepared:
    with np.load(final / INDEX) as stored:
        index = {name: stored[name] for name in stored.files}
    held_out = index["held_out"].astype(bool)
    weights = np.asarray([source.weight for source in sources], np.float64)
    report = Report([SourceReport.from_dict(state) for state in json.loads((final / "report.json").read_text())])
    report.dropped_file = final / DROPPED
    for account, source in zip(report.sources, sources, strict=True):
        account.path = str(source.path)  # the same content may lie elsewhere today
    train = Documents(final, np.flatnonzero(~held_out), index, weights, "train")
    # A weight is how often a source is learned from; what is measured is measured once.
    measured = Documents(final, np.flatnonzero(held_out), index, np.ones_like(weights), "held_out")
    return Prepared(final, train, measured, report, context_length)


def _cores() -> int:
    """Those that this process may use: Slurm, containers and taskset give it a share of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _template(source: Source, tokenizer: Tokenizer) -> str | None:
    return jinja_template(source.template, tokenizer) if source.format == "sharegpt" else None


def _content_hash(source: Source) -> str:
    """Of all bytes of the source's files, and where each ends."""
    digest = hashlib.sha256()
    for file in source.files():
        if not file.exists():
            # The reader knows how to say what is wrong with it.
            next(sources_room.read(source, Report()), None)
        with file.open() as opened:
            whole = hashlib.file_digest(opened, "sha256")
        digest.update(whole.digest())
    return digest.hexdigest()


def counts(documents: Documents) -> Counter:
    """documents, tokens and trained tokens of a split, for a summary."""
    return Counter(
        documents=len(documents), tokens=int(documents.lengths.sum()), trained_tokens=int(documents.trained.sum())
    )


if __name__ == "__main__":
    raise SystemExit("no command; python -m scripts.prepare --config RECIPE.yaml tokenizes what a recipe trains on")
