"""Finds near duplicates among a source's records, independent of engine and reading order.

Every record has a hash of its id and text. Pairs that share a key (data.minhash) are compared by
all their shingles. In hash order, a record is dropped if a kept one with a smaller hash is at least
as similar as the threshold.

Three steps, for any engine; units and bands are independent of each other. In the work folder:

    near/UNIT/shingles, keys, records
        each record's signature, from `sign`
    near/pairs/...
        the similar pairs of one band of keys
    near/UNIT/dropped.json
        which records of a unit are dropped, and for which
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt32, UInt64

from data import minhash, paths, work_folder
from data.conversation import Conversation, Labelled, Preference, Record, Text
from data.engine import Engine
from data.paths import File
from data.sources import Unit

NEAR_DUPLICATE = "near duplicate"
MOST_KEYS = 1 << 23  # keys that a search has in memory, at some 40 bytes each
MOST_COMPARED = 128  # dissimilar records with the same key to compare each further one with
_RECORD = np.dtype(
    [
        ("hash", "<u8", 2),
        ("start", "<u8"),  # of its shingles in the unit's file
        ("count", "<u4"),
        ("file", "<u4"),  # number in the unit
        ("line", "<u8"),
    ]
)
_PAIR = np.dtype(
    [("first", "<i8"), ("other", "<i8"), ("shared", "<u4"), ("all", "<u4"), ("crowded", "<u8")]
)


class NearDuplicate(NamedTuple):
    """The kept record that a dropped one is similar to."""

    file: str
    line: int
    similarity: float


class _Search(NamedTuple):
    """The keys of a band, or those with the same remainder, to search for equal ones."""

    units: tuple[str, ...]
    """Those of one source, in its order."""
    band: int
    part: int
    parts: int
    threshold: float

    @property
    def name(self) -> str:
        return f"{self.units[0]}-{self.band}-{self.part}"


def find(
    units: Sequence[Unit],
    threshold: float,
    engine: Engine,
    work: str,
    sign_unit: Callable[[Any], Iterable[Any]],
) -> None:
    """Finds the near duplicates of all units; `dropped` reads them.

    Args:
      units: all units of the sources, in order.
      threshold: the least similarity of near duplicates.
      engine: runs the work.
      sign_unit: calls `sign` for a unit.
    """
    engine.run(units, sign_unit)
    for source in sorted({unit.source for unit in units}):
        members = [unit for unit in units if unit.source == source]
        names = tuple(unit.name for unit in members)
        counts = [_Signed.open(work, name).records for name in names]
        parts = -(-sum(counts) // MOST_KEYS)
        searches = [
            _Search(names, band, part, parts, threshold)
            for band in range(minhash.bands_for(threshold).keys)
            for part in range(parts)
        ]
        engine.run(searches, partial(_search, work))
        _resolve(work, members, searches)


def text_of(record: Record) -> tuple[str, int] | None:
    """Returns the text by which a record is compared, and its kind; only records of one kind are
    compared.

    The text excludes tools, and system turns, which many records may share. Completions with
    different labels are of different kinds. None for token ids.
    """
    if isinstance(record, Text):
        return record.text, 0
    if isinstance(record, Conversation):
        return _conversation_text(record), 0
    if isinstance(record, Preference):
        return f"{_conversation_text(record.chosen)}\n{_conversation_text(record.rejected)}", 0
    if isinstance(record, Labelled):
        return _conversation_text(record.conversation), 1 + record.desirable
    return None


def _conversation_text(conversation: Conversation) -> str:
    texts: list[str] = []
    for message in conversation.messages:
        if message.role != "system":
            calls = [call["function"] for call in message.tool_calls]
            texts += [message.reasoning or "", message.content, json.dumps(calls) if calls else ""]
    return "\n".join(texts)


def sign(records: Iterable[Record], threshold: float, unit: Unit, work: str) -> tuple[()]:
    """Writes the shingles, keys and hashes of a unit's records, unless done before.

    Takes some 10 bytes of memory per record; on disk 4 bytes per word, and 250 per record at 0.8.
    """
    target, bands = f"{work}/near/{unit.name}", minhash.bands_for(threshold)
    if File(f"{target}/records").exists():
        return ()
    numbers = {str(file): number for number, file in enumerate(unit.files)}
    start = 0
    with work_folder.worker_scratch("comparison") as scratch:
        with (
            (scratch / "shingles").open("wb") as shingle_file,
            (scratch / "by_record").open("wb") as key_file,
            (scratch / "records").open("wb") as record_file,
        ):
            for record in records:
                text, kind = text_of(record) or ("", 0)
                found = minhash.shingles(text)
                row = np.zeros(1, _RECORD)
                row["hash"] = _hash(record.id, text)
                row["start"], row["count"] = start, len(found)
                row["file"], row["line"] = numbers[record.file], record.line
                start += len(found)
                record_file.write(row.tobytes())
                shingle_file.write(found.astype("<u4").tobytes())
                key_file.write(minhash.band_keys(found, bands, kind).astype("<u8").tobytes())
        _transpose(scratch / "by_record", scratch / "keys", bands.keys)
        for file in ("shingles", "keys", "records"):
            paths.put_file(scratch / file, f"{target}/{file}")
    return ()


def _hash(record_id: str, text: str) -> UInt64[np.ndarray, " 2"]:
    content = f"{record_id}\0{text}".encode("utf-8", "surrogatepass")
    return np.frombuffer(hashlib.sha256(content).digest()[:16], ">u8")


def _transpose(rows: Path, columns: Path, count: int) -> None:
    """Writes numbers that are stored record by record as one column after another."""
    size = rows.stat().st_size // (8 * count)
    if not size:
        columns.touch()
        return
    by_row = np.memmap(rows, "<u8", "r", shape=(size, count))
    by_column = np.memmap(columns, "<u8", "w+", shape=(count, size))
    for start in range(0, size, 1 << 16):
        by_column[:, start : start + (1 << 16)] = by_row[start : start + (1 << 16)].T
    by_column.flush()


class _Signed(NamedTuple):
    """What `sign` has written for a unit."""

    folder: str
    records: int

    @classmethod
    def open(cls, work: str, name: str) -> _Signed:
        folder = f"{work}/near/{name}"
        return cls(folder, File(f"{folder}/records").size() // _RECORD.itemsize)

    def keys(self, band: int) -> Iterator[UInt64[np.ndarray, " n"]]:
        """Yields the keys of a band, block after block."""
        with File(f"{self.folder}/keys").open() as file:
            file.seek(8 * band * self.records)
            for start in range(0, self.records, MOST_KEYS):
                size = min(MOST_KEYS, self.records - start)
                yield np.frombuffer(file.read(8 * size), "<u8")


class _Records:
    """Records of a source's units by number, counted over all units."""

    def __init__(self, work: str, units: Sequence[str]):
        self.signed = [_Signed.open(work, name) for name in units]
        self.first = np.cumsum([0, *(signed.records for signed in self.signed)])
        self._open = lru_cache(maxsize=64)(self._open_file)

    def _open_file(self, unit: int, name: str) -> BinaryIO:
        return File(f"{self.signed[unit].folder}/{name}").open()

    def unit(self, number: int) -> int:
        """Returns the number of a record's unit."""
        return int(np.searchsorted(self.first, number, "right")) - 1

    def __getitem__(self, number: int) -> Any:
        unit = self.unit(number)
        file = self._open(unit, "records")
        file.seek(_RECORD.itemsize * int(number - self.first[unit]))
        return np.frombuffer(file.read(_RECORD.itemsize), _RECORD)[0]

    def sort_key(self, number: int) -> tuple[int, int, int]:
        """Returns a record's sort key: the hash, then the position in the source."""
        high, low = self[number]["hash"].tolist()
        return high, low, number

    def shingles(self, number: int) -> UInt32[np.ndarray, " n"]:
        """Returns a record's shingles."""
        record = self[number]
        file = self._open(self.unit(number), "shingles")
        file.seek(4 * int(record["start"]))
        return np.frombuffer(file.read(4 * int(record["count"])), "<u4")

    def close(self) -> None:
        """Closes the files."""
        self._open.cache_clear()


def _search(work: str, search: _Search) -> tuple[()]:
    """Writes the similar pairs among records with an equal key, unless done before."""
    target = f"{work}/near/pairs/{search.name}"
    if File(target).exists():
        return ()
    records = _Records(work, search.units)
    pairs = [
        pair
        for group in _groups(records, search)
        for pair in _similar_pairs(records, group, search.threshold)
    ]
    records.close()
    work_folder.write_bytes(target, np.array(pairs, _PAIR).tobytes())
    return ()


def _groups(records: _Records, search: _Search) -> Iterator[Int64[np.ndarray, " n"]]:
    """Yields the numbers of the records that have an equal key."""
    keys, numbers = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for unit, signed in enumerate(records.signed):
        first = records.first[unit]
        for block in signed.keys(search.band):
            chosen = np.flatnonzero(block % np.uint64(search.parts) == search.part)
            keys.append(block[chosen])
            numbers.append(chosen + first)
            first += len(block)
    all_keys, all_numbers = np.concatenate(keys), np.concatenate(numbers)
    del keys, numbers
    order = np.argsort(all_keys, kind="stable")
    all_keys, all_numbers = all_keys[order], all_numbers[order]
    ends = np.flatnonzero(np.append(all_keys[1:] != all_keys[:-1], True)) + 1
    starts = np.append(0, ends[:-1])
    for group in np.flatnonzero(ends - starts > 1):
        yield all_numbers[starts[group] : ends[group]]


def _similar_pairs(
    records: _Records, numbers: Int64[np.ndarray, " n"], threshold: float
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields (first, other, shingles shared, all shingles, 0) of similar records; first has the
    smaller `sort_key`.

    A record similar to an earlier one is not compared with later ones, so a thousand copies take a
    thousand comparisons, not half a million. A last tuple of zeros ends with the number of records
    that had too many earlier ones to be compared with all.
    """
    leaders: list[tuple[int, np.ndarray]] = []
    crowded = 0
    for number in sorted(numbers.tolist(), key=records.sort_key):
        own, is_similar = records.shingles(number), False
        for leader, others in leaders if len(own) else ():
            shared, union = minhash.shared_and_all(others, own)
            if shared / union >= threshold:
                is_similar = True
                yield leader, number, shared, union, 0
        if len(own) and not is_similar:
            if len(leaders) < MOST_COMPARED:
                leaders.append((number, own))
            else:
                crowded += 1
    if crowded:
        yield 0, 0, 0, 0, crowded


def _resolve(work: str, units: Sequence[Unit], searches: Sequence[_Search]) -> None:
    """Decides which records of a source are dropped; takes 32 bytes of memory per pair, and some
    200 per dropped record."""
    content = b"".join(
        work_folder.read_bytes(f"{work}/near/pairs/{search.name}") or b"" for search in searches
    )
    pairs = np.frombuffer(content, _PAIR)
    crowded = int(pairs["crowded"].sum())
    pairs = np.unique(pairs[pairs["crowded"] == 0])
    records = _Records(work, [unit.name for unit in units])
    sort_keys = {
        int(number): records.sort_key(number)
        for number in np.unique(np.concatenate([pairs["first"], pairs["other"]]))
    }
    kept_by: dict[int, tuple[int, float]] = {}
    by_other = sorted(pairs.tolist(), key=lambda pair: (sort_keys[pair[1]], sort_keys[pair[0]]))
    for first, other, shared, union, _ in by_other:
        if first not in kept_by and other not in kept_by:
            kept_by[other] = (first, shared / union)
    found: list[list[tuple[int, str, int, float]]] = [[] for _ in units]
    for number, (first, similarity) in sorted(kept_by.items()):
        record, unit = records[first], records.unit(number)
        file = units[records.unit(first)].files[record["file"]]
        row = number - int(records.first[unit])
        found[unit].append((row, str(file), int(record["line"]), round(similarity, 4)))
    records.close()
    for member, rows in zip(units, found, strict=True):
        state = {"rows": rows, "crowded": crowded if member is units[0] else 0}
        target = f"{work}/near/{member.name}/dropped.json"
        work_folder.write_bytes(target, json.dumps(state).encode())


class Dropped(NamedTuple):
    """The near duplicates of a unit."""

    rows: Mapping[int, NearDuplicate]
    """By the record's number among those read, from 0."""
    note: str | None = None
    """What the source's report says of the search."""


NOTHING_DROPPED = Dropped({})


def dropped(work: str, unit: Unit) -> Dropped:
    """Returns the near duplicates that `find` has found in a unit."""
    state = work_folder.read_json(f"{work}/near/{unit.name}/dropped.json")
    note = (
        f"near duplicates: {state['crowded']} times a record was compared with only "
        f"{MOST_COMPARED} of those that may be similar"
        if state["crowded"]
        else None
    )
    return Dropped({row: NearDuplicate(*kept) for row, *kept in state["rows"]}, note)
