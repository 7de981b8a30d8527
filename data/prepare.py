"""Prepares data once: tokenizes sources into documents and writes them to a folder."""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from data import near_duplicates, paths, prepared
from data.encode import EncodingRules
from data.engine import PROCESSES, Engine
from data.errors import UserError
from data.exact_duplicates import SeenOnDisk
from data.folders import building, read_or_warn
from data.index import NewIndex
from data.job import Job, check_arrays, processes_for, template_text
from data.parts import build_in_parts
from data.prepared import Prepared
from data.progress import ProgressBar
from data.record_store import write_records
from data.report import Report, dropped_file
from data.shard_cache import ShardCache
from data.sources import Sources, Unit
from data.tokenizer import Tokenizer


def prepare(
    sources: Sources,
    tokenizer: Tokenizer,
    rules: EncodingRules,
    folder: str | Path,
    *,
    progress: bool = True,
    key: str | None = None,
    engine: Engine = PROCESSES,
    cache_gib: float = 64.0,
) -> Prepared:
    """Tokenizes all sources into a folder, or opens the folder if they have been tokenized before.

    The folder's name is a hash of the contents, templates, tokenizer and rules. Besides the
    documents it contains dropped.jsonl, with the file, line and reason of the first 100,000 unused
    records. Conversations longer than context_length are split between exchanges (`clean.split`);
    parts that are still longer are cut into consecutive pieces, and pieces without a trained token
    are dropped. Several processes may prepare the same folder at the same time.

    Args:
      sources: the sources, and what is held out.
      rules: how records become documents.
      folder: parent of the prepared folders. If it is in a store (gs://, s3://), the prepared
        folder is made in the local cache and copied to the store; if the store has it already,
        shards are copied here when read.
      progress: whether to show a progress bar.
      key: the folder's name, if another process has prepared it: then no source is read.
      engine: what prepares the data; does not affect the result.
      cache_gib: GiB of this machine's disk for shards, if the prepared folder is in a store.

    Returns:
      The two splits. In held_out every document counts once, whatever its source's weight.

    Raises:
      UserError: a file cannot be read (see data.sources.read), a template does not fit, no document
        is left to train on; or there is no folder of the name `key`.
    """
    sources = sources.leaving_out(str(folder))
    for source in sources.all:
        template_text(source, tokenizer)  # so that wrong names fail before an hour of reading
        check_arrays(source)
    job = Job(sources, tokenizer, rules)
    opened = _opened(job, folder, key, progress, engine, cache_gib)
    # Other paths to the same contents have the same folder.
    for number, report in enumerate(opened.report.sources if not key else ()):
        job.note_path(number, report)
    return opened


def _opened(
    job: Job, folder: str | Path, key: str | None, progress: bool, engine: Engine, cache_gib: float
) -> Prepared:
    """Opens the folder of a job, which is built if it does not exist; see `prepare`."""
    name = key or job.key()
    local, shared = paths.local_folder(folder) / name, f"{str(folder).rstrip('/')}/{name}"
    stored = read_or_warn(local, prepared.INDEX, prepared.read)
    if stored is None and paths.is_remote(folder):
        from_store = _open_in_store(job, shared, None if key else engine, cache_gib)
        if from_store is not None:
            return from_store
    if stored is None:
        if key:
            raise UserError(
                f"{shared}: not found on this machine, but another process has prepared it; a "
                "data.prepared that all processes share would work"
            )
        _build(job, local, progress, engine)
        stored = prepared.read(local)
    if paths.is_remote(folder) and not key:
        paths.upload_missing(local, shared, prepared.INDEX)
    return prepared.open_folder(local, stored, job.sources.all, job.rules.context_length)


def _open_in_store(
    job: Job, shared: str, engine: Engine | None, cache_gib: float
) -> Prepared | None:
    """Opens a prepared folder in a store; its shards are copied to the local cache when read.

    Args:
      job: what the folder is prepared from.
      shared: the folder.
      engine: prepares the data in the store if it is not there and the engine can; or None.
      cache_gib: GiB of this machine's disk for shards.

    Returns:
      The folder; None if it is not in the store.
    """
    cached = paths.cache_folder("shards") / shared.rsplit("/", 1)[1]
    stored = prepared.read_from_store(shared, cached)
    if stored is None and engine is not None and engine.in_parts:
        _build_in_store(job, shared, engine)
        stored = prepared.read_from_store(shared, cached)
    if stored is None:
        return None
    cache = ShardCache(shared, stored.shards, cached, int(cache_gib * 2**30))
    return prepared.open_folder(cached, stored, job.sources.all, job.rules.context_length, cache)


def _build_in_store(job: Job, shared: str, engine: Engine) -> None:
    """Prepares the data in a store, to which workers write the shards."""
    job.check_ids()
    parent, name = shared.rsplit("/", 1)
    with tempfile.TemporaryDirectory(prefix="longstripe-prepared-") as scratch:
        folder = Path(scratch)
        build_in_parts(job, engine, folder, f"{parent}/.{name}-work", shared)
        paths.upload(folder, shared, prepared.INDEX)


def _build(job: Job, folder: Path, progress: bool, engine: Engine) -> None:
    """Prepares the data; if another process was faster, its folder is kept."""
    job.check_ids()
    with building(folder, prepared.is_whole) as temporary:
        if engine.in_parts:
            work = folder.with_name(f".{folder.name}-work")
            build_in_parts(job, engine, temporary, str(work))
        else:
            _build_in_one_pass(job, temporary, progress)


def _build_in_one_pass(job: Job, folder: Path, progress: bool) -> None:
    """Writes the documents while reading the sources, one after another."""
    index, report = NewIndex(folder), Report()
    units = [job.all_files(number) for number in range(len(job.sources.all))]
    size = sum(file.size() for unit in units for file in unit.files)
    work = str(folder / "near-duplicates")
    if job.compared(units):
        with ProgressBar("comparing records", size, "B", progress) as bar:

            def sign(unit: Unit) -> tuple[()]:
                with closing(SeenOnDisk(folder / "seen")) as seen:
                    return job.sign(unit, seen, work, bar.advance)

            near_duplicates.find(
                job.compared(units), job.rules.clean.near_duplicates, PROCESSES, work, sign
            )

    def documents() -> Iterator[dict]:
        for number, source in enumerate(job.sources.all):
            source_report = report.add_source(str(source.path))
            with closing(SeenOnDisk(folder / "seen")) as seen:
                yield from job.documents(
                    units[number],
                    source_report,
                    index,
                    seen,
                    progress_bar.advance,
                    processes_for(source),
                    job.near_duplicates(work, units[number]),
                )
            job.finish_source(number, source_report)

    with (
        ProgressBar("preparing data", size, "B", progress) as progress_bar,
        dropped_file(folder / prepared.DROPPED) as report.on_drop,
    ):
        write_records(folder, prepared.DOCUMENTS, prepared.document_features, documents)
    paths.remove_tree(work)
    job.check_split(index.all_held_out, report)
    prepared.write_index(folder, index, report)


if __name__ == "__main__":
    raise SystemExit(
        "this module is not a command; python -m scripts.prepare --config RECIPE.yaml tokenizes a "
        "recipe's data"
    )
