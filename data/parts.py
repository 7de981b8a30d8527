"""Prepares data in parts: workers turn files into documents, and documents into shards.

Workers share a folder, on a file system that all of them have or in a store. What is in it is
written whole, and found again by the same command after a failure:

    job.pickle, tokenizer/   what is to be done
    scan.json                the units, once duplicates between them are known
    seen/UNIT                hashes of a unit's records that an earlier unit has
    near/                    what `data.near_duplicates` finds
    parts/UNIT/              a unit's documents, index, report and dropped records
    documents/               shards; a shard's size and hash are in shards/NUMBER.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from data import near_duplicates, paths, prepared, record_store
from data.engine import GROUP, Engine
from data.errors import TransientError, UserError
from data.folders import file_hash
from data.job import Job, Unit
from data.paths import File
from data.record_store import ShardSize
from data.report import MOST_DROPPED, Report, SourceReport, dropped_file, renumbered
from data.tokenizer import Tokenizer
from data.work_folder import read_bytes, read_json, write_bytes

_JOB, _SCAN, _PART = "job.pickle", "scan.json", "part.json"
_DIGEST = 16  # bytes


class _Span(NamedTuple):
    """Consecutive documents of a part."""

    part: str
    start: int
    stop: int


class _Shard(NamedTuple):
    """A shard to be made of documents of parts."""

    number: int
    spans: tuple[_Span, ...]


def build_in_parts(job: Job, engine: Engine, folder: Path, work: Path) -> None:
    """Writes the folder of prepared data that one process would write.

    Args:
      folder: an empty folder.
      work: a folder for workers, which is removed at the end.
    """
    shared = str(work)
    _save_job(job, shared)
    units = _scan(job, engine, shared)
    if job.compared(units):
        near_duplicates.find(
            job.compared(units), job.clean.near_duplicates, engine, shared, partial(_sign, shared)
        )
    engine.run(units, partial(_make_part, shared))
    parts = [_Part.read(shared, unit) for unit in units]
    report = _merged_report(job, units, parts)
    arrays = _merged_index(shared, units)
    job.check_split(bool(arrays["held_out"].all()), report)
    shards = _shards(units, parts)
    engine.run(shards, partial(_make_shard, shared))
    documents = folder / prepared.DOCUMENTS
    documents.mkdir()
    sizes = []
    for shard in shards:
        name = record_store.shard_name(prepared.DOCUMENTS, shard.number)
        os.replace(work / prepared.DOCUMENTS / name, documents / name)
        state = read_json(f"{shared}/shards/{shard.number}.json") or {}
        sizes.append(ShardSize(state["records"], state["bytes"]))
    record_store.write_metadata(folder, prepared.DOCUMENTS, prepared.document_features, sizes)
    with (folder / prepared.DROPPED).open("w", encoding="ascii") as dropped:
        dropped.writelines(_dropped_lines(shared, units, parts))
    prepared.write_index(folder, arrays, report)
    paths.remove_tree(work)


def _scan(job: Job, engine: Engine, work: str) -> list[Unit]:
    """Finds duplicates between files; returns the units, of which one is whole where it must be."""
    stored = read_json(f"{work}/{_SCAN}")
    if stored is not None:
        whole = set(stored)
    else:
        scanned = [unit for unit in job.units() if job.sources[unit.source].has_turns]
        engine.run(
            scanned,
            partial(_digests, work),
            GROUP,
            _later_units,
            GROUP,
            partial(_write_seen, work),
        )
        whole = {
            number
            for number in {unit.source for unit in scanned}
            if File(f"{work}/trees/{number}").exists()
        }
        write_bytes(f"{work}/{_SCAN}", json.dumps(sorted(whole)).encode())
    units = [unit for unit in job.units() if unit.source not in whole or unit.first == 0]
    return [job.whole(unit.source) if unit.source in whole else unit for unit in units]


def _digests(work: str, unit: Unit) -> Iterator[tuple[tuple[int, bytes], int]]:
    """Yields ((source, hash), first file) for each conversation of a unit."""
    job, seen = _load_job(work), set[bytes]()
    reader = job.reader(unit, seen)
    try:
        for _ in reader.read(list(unit.files), SourceReport("")):
            pass
    except TransientError:
        raise
    except UserError:
        return  # _make_part meets it again
    if reader.has_tree_rows:
        write_bytes(f"{work}/trees/{unit.source}", b"")
    yield from (((unit.source, digest), unit.first) for digest in sorted(seen))


def _later_units(
    group: tuple[tuple[int, bytes], Sequence[int]],
) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Yields ((source, first file), hash) for each unit but the first that has a conversation."""
    (source, digest), firsts = group
    for first in sorted(set(firsts))[1:]:
        yield (source, first), digest


def _write_seen(work: str, group: tuple[tuple[int, int], Sequence[bytes]]) -> tuple[()]:
    (source, first), digests = group
    write_bytes(f"{work}/seen/{source}-{first}", b"".join(sorted(set(digests))))
    return ()


def _read_seen(work: str, unit: Unit) -> set[bytes]:
    content = read_bytes(f"{work}/seen/{unit.name}") or b""
    return {content[start : start + _DIGEST] for start in range(0, len(content), _DIGEST)}


def _sign(work: str, unit: Unit) -> tuple[()]:
    return _load_job(work).sign(unit, _read_seen(work, unit), work)


class _Part(NamedTuple):
    """What became of the records of a unit."""

    report: SourceReport
    documents: int
    problem: str | None
    """Why the unit cannot be read, in words for the user."""

    @classmethod
    def read(cls, work: str, unit: Unit) -> _Part:
        """Reads what `_make_part` wrote."""
        state = read_json(f"{work}/parts/{unit.name}/{_PART}")
        if state is None:
            raise TransientError(
                f"{work}/parts/{unit.name}: not found; the same command makes what is missing"
            )
        report = SourceReport.from_dict(state["report"])
        return cls(report, state["documents"], state["problem"])


def _make_part(work: str, unit: Unit) -> tuple[()]:
    """Writes the documents of a unit, unless it was done before."""
    target = f"{work}/parts/{unit.name}"
    if read_json(f"{target}/{_PART}") is not None:
        return ()
    job, problem, index = _load_job(work), None, prepared.Index()
    report = SourceReport("", source=unit.source, most_names=sys.maxsize)
    seen = _read_seen(work, unit)
    with tempfile.TemporaryDirectory(prefix="longstripe-part-") as name:
        scratch = Path(name)
        try:
            with dropped_file(scratch / prepared.DROPPED) as report.on_drop:
                serialized = record_store.serialize(
                    prepared.document_features,
                    job.documents(unit, report, index, seen, near=job.near_duplicates(work, unit)),
                )
                record_store.write_shard(scratch / prepared.DOCUMENTS, serialized)
        except TransientError:
            raise
        except UserError as error:
            problem = str(error)
        arrays = index.arrays()
        np.savez(scratch / prepared.INDEX, **arrays)  # type: ignore[arg-type]  # numpy's own types
        for file in (prepared.DOCUMENTS, prepared.INDEX, prepared.DROPPED):
            paths.put_file(scratch / file, f"{target}/{file}")
    state = {
        "report": report.to_dict(),
        "documents": len(arrays["length"]),
        "problem": problem,
    }
    write_bytes(f"{target}/{_PART}", json.dumps(state).encode())
    return ()


def _shards(units: Sequence[Unit], parts: Sequence[_Part]) -> list[_Shard]:
    """Returns which documents each shard holds: as many as the last one leaves in each."""
    shards: list[list[_Span]] = []
    room = 0
    for unit, part in zip(units, parts, strict=True):
        start = 0
        while start < part.documents:
            if not room:
                shards.append([])
                room = record_store.RECORDS_IN_A_FILE
            stop = min(part.documents, start + room)
            shards[-1].append(_Span(unit.name, start, stop))
            room -= stop - start
            start = stop
    return [_Shard(number, tuple(spans)) for number, spans in enumerate(shards)]


def _make_shard(work: str, shard: _Shard) -> tuple[()]:
    """Writes a shard on this machine and copies it to `documents`, unless it was done before."""
    done = f"{work}/shards/{shard.number}.json"
    name = record_store.shard_name(prepared.DOCUMENTS, shard.number)
    target = f"{work}/{prepared.DOCUMENTS}/{name}"
    if read_json(done) is not None and File(target).exists():
        return ()
    with tempfile.TemporaryDirectory(prefix="longstripe-shard-") as folder:
        scratch = Path(folder)
        size = record_store.write_shard(
            scratch / name,
            chain.from_iterable(_documents_of(work, span, scratch) for span in shard.spans),
        )
        paths.put_file(scratch / name, target)
        state = {**size._asdict(), "file": [(scratch / name).stat().st_size]}
        state["file"].append(file_hash(scratch / name))
    write_bytes(done, json.dumps(state).encode())
    return ()


def _documents_of(work: str, span: _Span, scratch: Path) -> Iterator[bytes]:
    """Yields documents of a part, which is copied to this machine from a store."""
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
      UserError: what one process would have met first.
    """
    report = Report()
    for number, source in enumerate(job.sources):
        source_report = report.add_source(str(source.path))
        for unit, part in zip(units, parts, strict=True):
            if unit.source == number:
                if part.problem:
                    raise UserError(part.problem)
                source_report.add(part.report)
        job.finish_source(number, source_report)
    return report


def _merged_index(work: str, units: Sequence[Unit]) -> dict[str, Int32[np.ndarray, " D"]]:
    indices = []
    with tempfile.TemporaryDirectory(prefix="longstripe-index-") as folder:
        local = Path(folder) / prepared.INDEX
        for unit in units:
            paths.get_file(f"{work}/parts/{unit.name}/{prepared.INDEX}", local)
            with np.load(local) as stored:
                indices.append({name: stored[name] for name in stored.files})
    return {name: np.concatenate([index[name] for index in indices]) for name in indices[0]}


def _dropped_lines(work: str, units: Sequence[Unit], parts: Sequence[_Part]) -> Iterator[str]:
    """Yields the first lines of dropped.jsonl."""
    left, source, before = MOST_DROPPED, -1, 0
    for unit, part in zip(units, parts, strict=True):
        if unit.source != source:
            source, before = unit.source, 0
        with File(f"{work}/parts/{unit.name}/{prepared.DROPPED}").open() as lines:
            for line in lines:
                if not left:
                    return
                left -= 1
                yield renumbered(line.decode("ascii"), before)
        before += part.report.records


def _save_job(job: Job, work: str) -> None:
    """Writes a job for `_load_job`; the tokenizer as files, since not all can be pickled."""
    with tempfile.TemporaryDirectory(prefix="longstripe-tokenizer-") as name:
        folder = Path(name)
        job.tokenizer.save(name)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    tokenizer = job.tokenizer
    added = (tokenizer.text_tokens, tokenizer.template_date, tokenizer.template_kwargs)
    plain = dataclasses.replace(job, tokenizer=None)  # type: ignore[arg-type]  # its files follow
    write_bytes(f"{work}/{_JOB}", pickle.dumps((plain, contents, added)))


@lru_cache(maxsize=2)
def _load_job(work: str) -> Job:
    """Returns a job that `_save_job` wrote, once in each process."""
    content = read_bytes(f"{work}/{_JOB}")
    if content is None:
        raise UserError(
            f"{work}/{_JOB}: not found by a worker; a data.prepared that all workers share, such "
            "as one in a store, would work"
        )
    job, contents, (text_tokens, template_date, template_kwargs) = pickle.loads(content)
    with tempfile.TemporaryDirectory(prefix="longstripe-tokenizer-") as folder:
        for name, file in contents.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(file)
        tokenizer = (
            Tokenizer.load(folder)
            .with_text_tokens(text_tokens)
            .with_template_date(template_date)
            .with_template_kwargs(template_kwargs)
        )
    return dataclasses.replace(job, tokenizer=tokenizer)
