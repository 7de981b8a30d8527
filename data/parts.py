"""Prepares data in parts: workers turn files into documents, and documents into shards.

Workers share a folder, on a common file system or in a store. Its files are written atomically, and
after a failure the same command continues with them:

    job.json                 the job, with its tokenizer's files
    scan.json                the sources that must be read as one unit, once duplicates are known
    read/UNIT                the number of distinct conversations in a unit
    seen/UNIT                hashes of a unit's records that an earlier unit also has
    near/                    results of `data.near_duplicates`
    parts/UNIT/              a unit's documents, index, report and dropped records
    documents/               shards; a shard's size and hash are in shards/NUMBER.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from data import near_duplicates, paths, prepared, record_store
from data.engine import GROUP, Engine
from data.errors import TransientError, UserError
from data.folders import file_hash
from data.index import NewIndex, check_count
from data.job import Job
from data.job_file import job_bytes, read_job
from data.paths import File
from data.record_store import ShardSize
from data.report import MOST_DROPPED, Report, SourceReport, dropped_file, renumbered
from data.sources import Unit
from data.work_folder import read_bytes, read_json, worker_scratch, write_bytes

_JOB, _SCAN, _PART, _SIZES = "job.json", "scan.json", "part.json", "sizes"
_DIGEST = 16  # bytes


class _Span(NamedTuple):
    """Consecutive documents of a part."""

    part: str
    start: int
    stop: int


class _Shard(NamedTuple):
    """A shard, to be made from documents of parts."""

    number: int
    spans: tuple[_Span, ...]


def build_in_parts(
    job: Job, engine: Engine, folder: Path, work: str, store: str | None = None
) -> None:
    """Writes the same folder of prepared data that a single process would write.

    Args:
      job: what to prepare.
      engine: runs the work.
      folder: an empty folder.
      work: a folder for workers, removed at the end.
      store: the prepared folder in a store, to which workers write the shards; `folder` then
        receives all other files, and the store's folder is complete once it has them too.
    """
    write_bytes(f"{work}/{_JOB}", job_bytes(job))
    units = _scan(job, engine, work)
    if job.compared(units):
        near_duplicates.find(
            job.compared(units), job.rules.clean.near_duplicates, engine, work, partial(_sign, work)
        )
    engine.run(units, partial(_make_part, work))
    parts = [_Part.read(work, unit) for unit in units]
    report = _merged_report(job, units, parts)
    check_count(sum(part.documents for part in parts))  # before merging and copying
    index = _merged_index(work, units, folder)
    job.check_split(index.all_held_out, report)
    shards = _shards(work, units, parts)
    target = f"{store or work}/{prepared.DOCUMENTS}"
    engine.run(shards, partial(_make_shard, work, target))
    states = [read_json(f"{work}/shards/{shard.number}.json") for shard in shards]
    (folder / prepared.DOCUMENTS).mkdir()
    for state in states if store is None else ():
        os.replace(f"{target}/{state['name']}", folder / prepared.DOCUMENTS / state["name"])
    sizes = [ShardSize(state["records"], state["bytes"]) for state in states]
    record_store.write_metadata(folder, prepared.DOCUMENTS, prepared.document_features, sizes)
    with (folder / prepared.DROPPED).open("w", encoding="ascii") as dropped:
        dropped.writelines(_dropped_lines(work, units, parts))
    files = {f"{prepared.DOCUMENTS}/{state['name']}": state["file"] for state in states}
    prepared.write_index(folder, index, report, files)
    paths.remove_tree(work)


def _scan(job: Job, engine: Engine, work: str) -> list[Unit]:
    """Finds duplicates between files; returns the units, one for each source with tree rows."""
    stored = read_json(f"{work}/{_SCAN}")
    if stored is not None:
        whole = set(stored)
    else:
        scanned = [unit for unit in job.units() if job.sources.all[unit.source].has_turns]
        engine.run(
            scanned, partial(_digests, work), GROUP, _later_units, GROUP, partial(_write_seen, work)
        )
        _warn_of_too_many(work, scanned)
        whole = {
            number
            for number in {unit.source for unit in scanned}
            if File(f"{work}/trees/{number}").exists()
        }
        write_bytes(f"{work}/{_SCAN}", json.dumps(sorted(whole)).encode())
    units = [unit for unit in job.units() if unit.source not in whole or unit.first == 0]
    return [job.all_files(unit.source) if unit.source in whole else unit for unit in units]


def _digests(work: str, unit: Unit) -> Iterator[tuple[tuple[int, int], tuple[int, bytes]]]:
    """Yields ((source, first byte), (first file, hashes)) for the conversations of a unit, by the
    first byte of their hashes.

    One value for many hashes: Dask takes about a kilobyte for each value that it groups.
    """
    job, seen = _load_job(work), set[bytes]()
    reader = job.reader(unit, seen)
    try:
        for _ in reader.read(list(unit.files), SourceReport("")):
            pass
    except TransientError:
        raise
    except UserError:
        return  # _make_part raises it again
    if reader.has_tree_rows:
        write_bytes(f"{work}/trees/{unit.source}", b"")
    write_bytes(f"{work}/read/{unit.name}", str(len(seen)).encode())
    for first_byte, digests in groupby(sorted(seen), key=lambda digest: digest[0]):
        yield (unit.source, first_byte), (unit.first, b"".join(digests))


def _later_units(
    group: tuple[tuple[int, int], Sequence[tuple[int, bytes]]],
) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Yields ((source, first file), hashes) for each unit: the hashes, in order, of those of its
    conversations that an earlier unit also has."""
    (source, _), values = group
    units, hashes = zip(*sorted(set(values)), strict=True)
    digests = np.frombuffer(b"".join(hashes), ">u8").reshape(-1, _DIGEST // 8)
    firsts = np.repeat(units, [len(each) // _DIGEST for each in hashes])
    order = np.lexsort(digests.T[::-1])  # stable: equal hashes remain in the order of their units
    digests, firsts = digests[order], firsts[order]
    repeats = 1 + np.flatnonzero((digests[1:] == digests[:-1]).all(1))
    repeats = repeats[np.argsort(firsts[repeats], kind="stable")]
    later, starts = np.unique(firsts[repeats], return_index=True)
    # Of no repeats, split makes one empty part.
    for first, of_unit in zip(later, np.split(repeats, starts[1:]), strict=False):
        yield (source, int(first)), digests[of_unit].tobytes()


def _write_seen(work: str, group: tuple[tuple[int, int], Sequence[bytes]]) -> tuple[()]:
    (source, first), hashes = group
    write_bytes(f"{work}/seen/{source}-{first}", b"".join(sorted(set(hashes))))
    return ()


def _read_seen(work: str, unit: Unit) -> set[bytes]:
    content = read_bytes(f"{work}/seen/{unit.name}") or b""
    return {content[start : start + _DIGEST] for start in range(0, len(content), _DIGEST)}


def _warn_of_too_many(work: str, units: Sequence[Unit]) -> None:
    """Warns before tokenizing that there are more conversations than a folder can number. This is
    no error yet: some may be dropped as unusable or near duplicates."""
    count = 0
    for unit in units:
        repeated = len(read_bytes(f"{work}/seen/{unit.name}") or b"") // _DIGEST
        count += int(read_bytes(f"{work}/read/{unit.name}") or 0) - repeated
    try:
        check_count(count, "conversations")
    except UserError as error:
        print(f"warning: {error}. It is an error if that many are left", file=sys.stderr)


def _sign(work: str, unit: Unit) -> tuple[()]:
    return _load_job(work).sign(unit, _read_seen(work, unit), work)


class _Part(NamedTuple):
    """The outcome for the records of a unit."""

    report: SourceReport
    documents: int
    problem: str | None
    """Why the unit cannot be read, as a message for the user."""

    @classmethod
    def read(cls, work: str, unit: Unit) -> _Part:
        """Reads what `_make_part` wrote."""
        state = read_json(f"{work}/parts/{unit.name}/{_PART}")
        if state is None:
            raise TransientError(
                f"{work}/parts/{unit.name}: not found; the same command creates what is missing"
            )
        report = SourceReport.from_dict(state["report"])
        return cls(report, state["documents"], state["problem"])


def _make_part(work: str, unit: Unit) -> tuple[()]:
    """Writes the documents of a unit, unless already done."""
    target = f"{work}/parts/{unit.name}"
    if read_json(f"{target}/{_PART}") is not None:
        return ()
    job, problem = _load_job(work), None
    report = SourceReport("", source=unit.source, most_names=sys.maxsize)
    seen = _read_seen(work, unit)
    with worker_scratch("part") as scratch:
        index = NewIndex(scratch)
        try:
            with dropped_file(scratch / prepared.DROPPED) as report.on_drop:
                serialized = record_store.serialize(
                    prepared.document_features,
                    job.documents(unit, report, index, seen, near=job.near_duplicates(work, unit)),
                )
                record_store.write_shard(
                    scratch / prepared.DOCUMENTS, _counted(serialized, scratch / _SIZES)
                )
        except TransientError:
            raise
        except UserError as error:
            problem = str(error)
        index.write(scratch / prepared.INDEX)
        for file in (prepared.DOCUMENTS, _SIZES, prepared.INDEX, prepared.DROPPED):
            paths.put_file(scratch / file, f"{target}/{file}")
    # In order: once names are many, those that come first are counted separately.
    state = {"report": report.to_dict(in_order=True), "documents": len(index), "problem": problem}
    write_bytes(f"{target}/{_PART}", json.dumps(state).encode())
    return ()


def _counted(serialized: Iterator[bytes], sizes: Path) -> Iterator[bytes]:
    """Yields records and writes the size of each to a file."""
    with sizes.open("wb") as file:
        for record in serialized:
            file.write(np.array(len(record), "<i8").tobytes())
            yield record


def _shards(work: str, units: Sequence[Unit], parts: Sequence[_Part]) -> list[_Shard]:
    """Returns which documents each shard holds."""
    ends = record_store.shard_ends(np.concatenate([_sizes(work, unit) for unit in units]))
    shards, first = [], 0
    part_ends = np.cumsum([part.documents for part in parts])
    for number, end in enumerate(ends):
        spans = []
        while first < end:
            part = int(np.searchsorted(part_ends, first, "right"))
            part_start = int(part_ends[part]) - parts[part].documents
            stop = min(end, int(part_ends[part]))
            spans.append(_Span(units[part].name, first - part_start, stop - part_start))
            first = stop
        shards.append(_Shard(number, tuple(spans)))
    return shards


def _sizes(work: str, unit: Unit) -> Int64[np.ndarray, " n"]:
    """Returns the bytes of each document of a part."""
    content = read_bytes(f"{work}/parts/{unit.name}/{_SIZES}") or b""
    return np.frombuffer(content, "<i8")


def _make_shard(work: str, documents: str, shard: _Shard) -> tuple[()]:
    """Writes a shard on this machine and copies it to a folder, unless already done."""
    done = f"{work}/shards/{shard.number}.json"
    name = record_store.shard_name(prepared.DOCUMENTS, shard.number)
    target = f"{documents}/{name}"
    if read_json(done) is not None and File(target).exists():
        return ()
    with worker_scratch("shard") as scratch:
        size = record_store.write_shard(
            scratch / name,
            chain.from_iterable(_documents_of(work, span, scratch) for span in shard.spans),
        )
        paths.put_file(scratch / name, target)
        file = [(scratch / name).stat().st_size, file_hash(scratch / name)]
        state = {**size._asdict(), "name": name, "file": file}
    write_bytes(done, json.dumps(state).encode())
    return ()


def _documents_of(work: str, span: _Span, scratch: Path) -> Iterator[bytes]:
    """Yields documents of a part, first copying it from a store to this machine."""
    source = f"{work}/parts/{span.part}/{prepared.DOCUMENTS}"
    if not paths.is_remote(source):
        yield from record_store.read_shard(Path(source), span.start, span.stop)
        return
    local = scratch / span.part
    paths.get_file(source, local)
    yield from record_store.read_shard(local, span.start, span.stop)
    local.unlink()


def _merged_report(job: Job, units: Sequence[Unit], parts: Sequence[_Part]) -> Report:
    """Returns the report of all sources.

    Raises:
      UserError: the first problem that a single process would have met.
    """
    report = Report()
    for number, source in enumerate(job.sources.all):
        source_report = report.add_source(str(source.path))
        for unit, part in zip(units, parts, strict=True):
            if unit.source == number:
                if part.problem:
                    raise UserError(part.problem)
                source_report.add(part.report)
        job.finish_source(number, source_report)
    return report


def _merged_index(work: str, units: Sequence[Unit], folder: Path) -> NewIndex:
    """Returns the index of all parts, with its temporary file in `folder`."""
    index = NewIndex(folder)
    with tempfile.TemporaryDirectory(prefix="longstripe-index-") as scratch:
        local = Path(scratch) / prepared.INDEX
        for unit in units:
            paths.get_file(f"{work}/parts/{unit.name}/{prepared.INDEX}", local)
            index.extend(local)
    return index


def _dropped_lines(work: str, units: Sequence[Unit], parts: Sequence[_Part]) -> Iterator[str]:
    """Yields the first lines of dropped.jsonl."""
    remaining, source, first_record = MOST_DROPPED, -1, 0
    for unit, part in zip(units, parts, strict=True):
        if unit.source != source:
            source, first_record = unit.source, 0
        with File(f"{work}/parts/{unit.name}/{prepared.DROPPED}").open() as lines:
            for line in lines:
                if not remaining:
                    return
                remaining -= 1
                yield renumbered(line.decode("ascii"), first_record)
        first_record += part.report.records


@lru_cache(maxsize=2)
def _load_job(work: str) -> Job:
    """Reads the job in the shared folder, once per process."""
    content = read_bytes(f"{work}/{_JOB}")
    if content is None:
        raise UserError(
            f"{work}/{_JOB}: a worker cannot find it; a data.prepared that all workers share, such "
            "as one in a store, would work"
        )
    return read_job(content, f"{work}/{_JOB}")
