"""Measures the speed and peak memory of the engines that prepare data, on generated conversations.

    python -m scripts.benchmarks.bench_engines --tokenizer DIR [--rows processes:1 beam:2 ...] \\
        [--gigabytes 0.25 0.5 1] [--write engines]

A row is ENGINE:CORES: `processes` on that many cores, or `beam` on Dask with one worker process per
core (in the environment of `make beam`). Each row is measured in a separate process and saved to
OUTPUT/engines.json immediately; a repeated row replaces the old one. --write makes
docs/results/engines.json, or engine_memory.json, from all rows saved there.

Data of one size are the same on every machine. Every fiftieth conversation repeats an earlier one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data.encode import EncodingRules
from data.engine import PROCESSES, Engine
from data.errors import UserError
from data.outputs import output_files
from data.prepare import prepare
from data.prepared import INDEX
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from scripts.benchmarks.bench_data import peak_mib
from scripts.benchmarks.commands import in_own_process, read_json, write_json
from scripts.benchmarks.results import ROOT, Result, renew, row
from trainer.options import command, option

WORDS = ROOT / "data/fixtures/conversations.json"
ENGINES = ("processes", "beam")
FILE_BYTES = 1 << 24  # so that each of two workers has several files
POOL_WORDS = 1 << 21
LONGEST_TURN = 1 << 16  # characters
REPEAT_EVERY = 50  # conversations
CONTEXT_LENGTH = 8192  # tokens
# Goals, set before anything was measured: the largest relative error of the scale-up rule, and the
# size of the largest data set that each engine has prepared; and peak memory that is flat. That
# flat means 10% was decided after the first measurement, which missed it.
LARGEST_RULE_ERROR = 0.2
MOST_GROWTH = 1.1  # of peak memory, from the smallest to the largest data set
SIZE_GOALS = {"processes": 10**10, "beam": 10**9}
RESULTS_FILE = "engines.json"


class Conversations:
    """Generated conversations, each a function of its number: the words of our fixtures in random
    order, every thirtieth replaced by a random hexadecimal number."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        records = read_json(WORDS)
        words = np.array(
            [w for r in records for turn in r["conversations"] for w in turn["value"].split()]
        )
        pool = words[rng.integers(0, len(words), POOL_WORDS)].tolist()
        pool[::30] = [f"{number:08x}" for number in rng.integers(0, 1 << 32, len(pool[::30]))]
        self._pool = " ".join(pool)

    def __getitem__(self, number: int) -> str:
        """Returns a conversation as a line of JSON."""
        is_repeat = number % REPEAT_EVERY == REPEAT_EVERY - 1
        # About halfway back; a multiple of REPEAT_EVERY is never itself a repeat.
        original = number // 2 // REPEAT_EVERY * REPEAT_EVERY if is_repeat else number
        rng = np.random.default_rng(original)
        lengths = np.clip(rng.lognormal(6.5, 1.0, 4), 8, LONGEST_TURN).astype(int)
        starts = rng.integers(0, len(self._pool) - LONGEST_TURN, 4)
        turns = [
            {"from": ("human", "gpt")[place % 2], "value": self._pool[start : start + length]}
            for place, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        return json.dumps({"id": f"{number}", "conversations": turns})


def write_conversations(folder: Path, size: int) -> int:
    """Writes `size` bytes of conversations to files in a new folder; returns their number."""
    conversations, count, written = Conversations(), 0, 0
    folder.mkdir()
    while written < size:
        file_start = written
        path = folder / f"{file_start // FILE_BYTES:05d}.jsonl"
        with path.open("w", encoding="ascii") as file:
            while written < size and written - file_start < FILE_BYTES:
                written += file.write(conversations[count] + "\n")
                count += 1
    return count


def measure(engine: str, cores: int, sources: Path, tokenizer: Path, target: Path) -> dict:
    """Prepares data in this process and its workers, on `cores` cores.

    Returns:
      What `_prepared` returns, CPU seconds, and the peak memory in MiB of each worker (for
      `processes`, of the largest).

    Raises:
      UserError: this machine has too few cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < cores:
        raise UserError(f"{engine}:{cores}: this process may use {len(allowed)} cores")
    os.sched_setaffinity(0, allowed[:cores])
    if engine == "processes":
        result = _prepared(PROCESSES, sources, tokenizer, target)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        worker_peaks = [round(children.ru_maxrss / 1024, 1)] if cores > 1 else []
        cpu_seconds = [time.process_time(), children.ru_utime + children.ru_stime]
    else:
        from distributed import Client, LocalCluster

        from data.beam import Beam

        cluster = LocalCluster(n_workers=cores, threads_per_worker=1, dashboard_address=None)
        with cluster, Client(cluster) as client:
            flag = f"--dask_client_address={client.scheduler.address}"
            result = _prepared(Beam("dask", (flag,)), sources, tokenizer, target)
            worker_peaks = [*client.run(peak_mib).values()]
            cpu_seconds = [time.process_time(), *client.run(time.process_time).values()]
    return {
        **result,
        "cpu_seconds": round(sum(cpu_seconds), 1),
        "worker_peak_mib": sorted(worker_peaks),
    }


def _prepared(engine: Engine, sources: Path, tokenizer: Path, target: Path) -> dict[str, Any]:
    """Prepares data; returns the seconds, the machine's load before, this process's peak memory in
    MiB, counts, and a hash of all files written."""
    started, load_before = time.monotonic(), os.getloadavg()[0]
    made = prepare(
        Sources((Source(str(sources), template="tokenizer"),)),
        Tokenizer.load(tokenizer),
        EncodingRules(CONTEXT_LENGTH),
        target,
        progress=False,
        engine=engine,
    )
    seconds = time.monotonic() - started
    peak = peak_mib()  # before the files are read for their hash
    report = made.report.sources[0]
    return {
        "seconds": round(seconds, 1),
        "load_before": round(load_before, 2),
        "peak_mib": peak,
        "records": report.records,
        "duplicates": report.dropped["duplicate"],
        "documents": len(made.train),
        "sha256": _content_hash(made.folder, sources),
    }


def _content_hash(folder: Path, sources: Path) -> str:
    """Returns a hash of prepared data that does not depend on the location of the sources."""
    digest = hashlib.sha256()
    # The index holds hashes of the other files, which contain the sources' paths; only its columns
    # are hashed, below.
    for path in sorted(path for path in folder.rglob("*") if path.name != INDEX):
        content = path.read_bytes() if path.is_file() else b""
        content = content.replace(str(sources).encode(), b"")
        digest.update(f"{path.relative_to(folder)}\0".encode() + content)
    with np.load(folder / INDEX) as index:
        for name in sorted(set(index.files) - {"files"}):
            digest.update(name.encode() + index[name].tobytes())
    return digest.hexdigest()


def predicted(rows: Iterable[dict], engine: str, size: int, cores: int) -> float | None:
    """Returns the seconds that the scale-up rule predicts for `size` bytes: a fixed time plus a
    constant rate per core, both fitted to the two smallest sizes on one core; None without two."""
    fitted = sorted((r["bytes"], r["seconds"]) for r in rows if _is(r, engine, 1))[:2]
    if len(fitted) < 2:
        return None
    (small, small_seconds), (large, large_seconds) = fitted
    seconds_a_byte = (large_seconds - small_seconds) / (large - small)
    fixed_seconds = small_seconds - small * seconds_a_byte
    return fixed_seconds + size * seconds_a_byte / cores


def _is(measured: dict, engine: str, cores: int) -> bool:
    return (measured["engine"], measured["cores"]) == (engine, cores)


def result_rows(rows: list[dict]) -> dict[str, dict[str, str]]:
    """Returns the rows of docs/results/engines.json."""
    result: dict[str, dict[str, str]] = {}
    for measured in sorted(rows, key=lambda r: (r["engine"], r["cores"], r["bytes"])):
        engine, cores, size = measured["engine"], measured["cores"], measured["bytes"]
        name = f"{engine}_{cores}_{size / 1e6:.0f}mb"
        what = f"preparing {size / 1e9:.3g} GB with {engine} on {cores} core{'s' * (cores > 1)}"
        result[name] = row(what, _described(measured))
        fitted = sorted(r["bytes"] for r in rows if _is(r, engine, 1))[:2]
        rule_seconds = predicted(rows, engine, size, cores)
        if rule_seconds is not None and not (cores == 1 and size in fitted):
            error = rule_seconds / measured["seconds"] - 1
            result[f"{name}_rule"] = row(
                f"{what}: seconds predicted by the scale-up rule, error",
                f"{rule_seconds:,.0f} s, {error:+.0%}",
                f"within {LARGEST_RULE_ERROR:.0%}",
                abs(error) <= LARGEST_RULE_ERROR,
            )
    for engine, goal in SIZE_GOALS.items():
        largest = max((r["bytes"] for r in rows if r["engine"] == engine), default=0)
        result[f"{engine}_largest"] = row(
            f"preparing data with {engine}: largest data set",
            f"{largest / 1e9:g} GB",
            f"{goal / 1e9:g} GB",
            largest >= goal,
        )
    result["same"] = _same_files(rows)
    return result


def memory_rows(rows: list[dict]) -> dict[str, dict[str, str]]:
    """Returns the rows of docs/results/engine_memory.json."""
    return {
        name: growth for engine in ENGINES for name, growth in _memory_growth(rows, engine).items()
    }


def _described(measured: dict) -> str:
    """Returns a row's speed, time and memory in words."""
    speed = measured["bytes"] / measured["seconds"] / measured["cores"] / 1e6
    cpu_speed = measured["bytes"] / measured["cpu_seconds"] / 1e6
    workers = ", ".join(f"{mib:,.0f}" for mib in measured["worker_peak_mib"])
    return (
        f"{speed:.3g} MB/s a core ({cpu_speed:.3g} a CPU second), {measured['seconds']:,.0f} s; "
        f"peak {measured['peak_mib']:,.0f} MiB" + (f", workers {workers}" if workers else "")
    )


def _memory_growth(rows: list[dict], engine: str) -> dict[str, dict[str, str]]:
    """Returns the row that compares an engine's peak memory on its smallest and largest data set,
    on as many cores as it had; {} if it had only one data set there."""
    cores = max((r["cores"] for r in rows if r["engine"] == engine), default=0)
    measured = sorted((r for r in rows if _is(r, engine, cores)), key=lambda r: r["bytes"])
    if len(measured) < 2:
        return {}
    small, large = measured[0], measured[-1]
    peaks = [(r["peak_mib"], max(r["worker_peak_mib"], default=0.0)) for r in (small, large)]
    return {
        f"{engine}_memory": row(
            f"preparing {small['bytes'] / 1e9:g} and {large['bytes'] / 1e9:g} GB with {engine} on "
            f"{cores} cores: peak MiB of the command; of the largest worker",
            "; ".join(
                f"{before:,.0f} -> {after:,.0f}" for before, after in zip(*peaks, strict=True)
            ),
            f"at most {MOST_GROWTH - 1:.0%} more",
            all(after <= MOST_GROWTH * before for before, after in zip(*peaks, strict=True)),
        )
    }


def _same_files(rows: list[dict]) -> dict[str, str]:
    """Returns the row that says whether every engine made the same files from the same data."""
    hashes: dict[int, list[str]] = {}
    for measured in rows:
        hashes.setdefault(measured["bytes"], []).append(measured["sha256"])
    compared = [set(of_size) for of_size in hashes.values() if len(of_size) > 1]
    is_same = all(len(different) == 1 for different in compared)
    return row(
        f"prepared files of {len(compared)} data sizes, compared between engines and cores",
        "the same" if is_same else "different",
        "the same",
        bool(compared) and is_same,
    )


def work(options: Options) -> Result | None:
    """Measures the rows; in a child process of this command, only one of them.

    Raises:
      UserError: a row's name is invalid, or the records read or dropped are not those written.
    """
    if options.sources:
        [name] = options.rows
        engine, cores = _parsed(name)
        with tempfile.TemporaryDirectory(dir=options.scratch, prefix="engines-") as target:
            measured = measure(engine, cores, options.sources, options.tokenizer, Path(target))
        print(json.dumps(measured))
        return None
    for name in options.rows:
        _parsed(name)
    output_files(options.output, {RESULTS_FILE: b'"sha256"'})
    path = options.output / RESULTS_FILE
    rows = read_json(path) if path.exists() else []
    for gigabytes in options.gigabytes:
        size = round(gigabytes * 1e9)
        with tempfile.TemporaryDirectory(dir=options.scratch, prefix="engines-") as folder:
            records = write_conversations(Path(folder) / "in", size)
            for name in options.rows:
                measured = _measured_apart(name, size, records, Path(folder), options.tokenizer)
                key = ("engine", "cores", "bytes")
                rows = [r for r in rows if any(r[k] != measured[k] for k in key)] + [measured]
                write_json(path, rows)
                print(json.dumps(measured), flush=True)
    if not options.write:
        return None
    command_line = "python -m scripts.benchmarks.bench_engines --gigabytes "
    command_line += " ".join(f"{size / 1e9:g}" for size in sorted({r["bytes"] for r in rows}))
    made = memory_rows(rows) if options.write == "engine_memory" else result_rows(rows)
    return renew(options.write, made, command=command_line)


def _parsed(name: str) -> tuple[str, int]:
    """Returns the engine and the number of cores in a row's name.

    Raises:
      UserError: it is not ENGINE:CORES.
    """
    engine, _, cores = name.partition(":")
    if engine not in ENGINES or not cores.isdecimal():
        raise UserError(f"--rows: found {name}; expected ENGINE:CORES, such as processes:2")
    return engine, int(cores)


def _measured_apart(
    name: str, size: int, records: int, folder: Path, tokenizer: Path
) -> dict[str, Any]:
    """Measures a row in a separate process.

    Args:
      name: the row.
      size: bytes of the data in `folder`/in.
      records: number of records in the data.
      folder: where the prepared data are kept until removed.
      tokenizer: folder of the tokenizer.

    Raises:
      UserError: the row's name is invalid, or the records read or dropped are not those written.
    """
    engine, cores = _parsed(name)
    measured = in_own_process(
        "bench_engines",
        f"--rows={name}",
        f"--sources={folder / 'in'}",
        f"--scratch={folder}",
        f"--tokenizer={tokenizer}",
    )
    if (measured["records"], measured["duplicates"]) != (records, records // REPEAT_EVERY):
        raise UserError(f"{name}: {records} records were written; found {measured}")
    return {"engine": engine, "cores": cores, "bytes": size, **measured}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    tokenizer: Path = option(
        "folder of a tokenizer", ROOT / "data/fixtures/tiny_tokenizer", metavar="DIR"
    )
    rows: tuple[str, ...] = option(
        "rows to measure, ENGINE:CORES", ("processes:1", "processes:2", "beam:1", "beam:2")
    )
    gigabytes: tuple[float, ...] = option("sizes of the data, 10^9 bytes", (0.25, 0.5, 1.0))
    write: str | None = option(
        "make this file in docs/results from the rows measured so far",
        None,
        choices=("engines", "engine_memory"),
    )
    scratch: Path = option(
        "folder for the generated data, which are removed", Path(tempfile.gettempdir())
    )
    output: Path = option("folder for results", Path("runs/bench/engines"))
    sources: Path | None = option("measure one row on the files in this folder", None)


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
