"""Times the engines that prepare data, and their peak memory, on generated conversations.

    python -m scripts.benchmarks.bench_engines --tokenizer DIR [--rows processes:1 beam:2 ...] \\
        [--gigabytes 0.25 0.5 1] [--write]

A row is ENGINE:CORES: `processes` on that many cores, or `beam` on Dask with as many worker
processes on as many cores (in the environment of `make beam`). Each is prepared in a process of
its own and added to OUTPUT/engines.json as it ends. --write makes docs/results/engines.json of all
rows there. The data are those of a size whatever machine makes them; every fiftieth record repeats
an earlier one.
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

from data.engine import PROCESSES, Engine
from data.errors import UserError
from data.outputs import output_files
from data.prepare import prepare
from data.prepared import INDEX
from data.sources import Source
from data.tokenizer import Tokenizer
from scripts.benchmarks.bench_data import peak_mib
from scripts.benchmarks.commands import in_own_process, read_json, write_json
from scripts.benchmarks.results import ROOT, Result, load, renew, row
from trainer.options import command, option

WORDS = ROOT / "data/fixtures/conversations.json"
FILE_BYTES = 1 << 24  # so that each of two workers has several
POOL_WORDS, LONGEST = 1 << 21, 1 << 16  # characters of the longest turn
REPEATED = 50  # every such record repeats another
CONTEXT = 8192
# Of the scale-up rule's seconds for rows that it was not made of; set before any was measured.
RULE_WITHIN = 0.2
WANTED = {"processes": 10**10, "beam": 10**9}  # bytes
FILE = "engines.json"


class Conversations:
    """Generated chats, each decided by its number alone: the words of our fixtures in random order,
    with a name that no tokenizer knows in every thirty of them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        records = json.loads(WORDS.read_text(encoding="utf-8"))
        words = np.array(
            [w for r in records for turn in r["conversations"] for w in turn["value"].split()]
        )
        pool = words[rng.integers(0, len(words), POOL_WORDS)].tolist()
        pool[::30] = [f"{number:08x}" for number in rng.integers(0, 1 << 32, len(pool[::30]))]
        self._pool = " ".join(pool)

    def __getitem__(self, number: int) -> str:
        """Returns a record as a line of JSON."""
        repeats = number % REPEATED == REPEATED - 1
        told = number // 2 // REPEATED * REPEATED if repeats else number
        rng = np.random.default_rng(told)
        lengths = np.clip(rng.lognormal(6.5, 1.0, 4), 8, LONGEST).astype(int)
        starts = rng.integers(0, len(self._pool) - LONGEST, 4)
        turns = [
            {"from": ("human", "gpt")[place % 2], "value": self._pool[start : start + length]}
            for place, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        return json.dumps({"id": f"{number}", "conversations": turns})


def write_conversations(folder: Path, size: int) -> int:
    """Writes files of conversations, of `size` bytes together; returns how many conversations."""
    chats, number, written = Conversations(), 0, 0
    folder.mkdir()
    while written < size:
        before = written
        with (folder / f"{before // FILE_BYTES:05d}.jsonl").open("w", encoding="ascii") as file:
            while written < size and written - before < FILE_BYTES:
                written += file.write(chats[number] + "\n")
                number += 1
    return number


def measure(engine: str, cores: int, sources: Path, tokenizer: Path, target: Path) -> dict:
    """Prepares data in this process and its workers; returns seconds, memory and what was made.

    Raises:
      UserError: this machine has fewer cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < cores:
        raise UserError(f"{engine}:{cores}: this process may use {len(allowed)} cores")
    os.sched_setaffinity(0, allowed[:cores])
    if engine == "processes":
        result = _prepared(PROCESSES, sources, tokenizer, target)
        used = [resource.getrusage(resource.RUSAGE_CHILDREN)]
        workers = [round(usage.ru_maxrss / 1024, 1) for usage in used if cores > 1]
        cpu = [time.process_time(), *(usage.ru_utime + usage.ru_stime for usage in used)]
    else:
        from distributed import Client, LocalCluster

        from data.beam import Beam

        cluster = LocalCluster(n_workers=cores, threads_per_worker=1, dashboard_address=None)
        with cluster, Client(cluster) as client:
            flag = f"--dask_client_address={client.scheduler.address}"
            result = _prepared(Beam("dask", (flag,)), sources, tokenizer, target)
            workers = [*client.run(peak_mib).values()]
            cpu = [time.process_time(), *client.run(time.process_time).values()]
    return {
        **result,
        "cpu_seconds": round(sum(cpu), 1),
        "peak_mib": peak_mib(),
        "worker_peak_mib": sorted(workers),
    }


def _prepared(engine: Engine, sources: Path, tokenizer: Path, target: Path) -> dict[str, Any]:
    started, load_before = time.monotonic(), os.getloadavg()[0]
    made = prepare(
        [Source(str(sources), template="tokenizer")],
        Tokenizer.load(tokenizer),
        CONTEXT,
        target,
        progress=False,
        engine=engine,
    )
    seconds = time.monotonic() - started
    digest = hashlib.sha256()  # not of index.npz, which has hashes of the others, below
    for path in sorted(path for path in made.folder.rglob("*") if path.name != INDEX):
        content = path.read_bytes() if path.is_file() else b""
        # The data of another measurement were elsewhere.
        content = content.replace(str(sources).encode(), b"")
        digest.update(f"{path.relative_to(made.folder)}\0".encode() + content)
    with np.load(made.folder / INDEX) as index:
        for name in sorted(set(index.files) - {"files"}):
            digest.update(name.encode() + index[name].tobytes())
    report = made.report.sources[0]
    return {
        "seconds": round(seconds, 1),
        "load_before": round(load_before, 2),
        "records": report.records,
        "duplicates": report.dropped["duplicate"],
        "documents": len(made.train),
        "sha256": digest.hexdigest(),
    }


def predicted(rows: Iterable[dict], engine: str, size: int, cores: int) -> float | None:
    """Returns the seconds of a row by the scale-up rule: a fixed time, and each core the same bytes
    a second. Both come from the two smallest sizes on one core; None without them."""
    known = sorted((r["bytes"], r["seconds"]) for r in rows if _is(r, engine, 1))[:2]
    if len(known) < 2:
        return None
    (small, first), (large, second) = known
    rate = (second - first) / (large - small)
    return first - small * rate + size * rate / cores


def _is(measured: dict, engine: str, cores: int) -> bool:
    return (measured["engine"], measured["cores"]) == (engine, cores)


def result_rows(rows: list[dict]) -> dict[str, dict[str, str]]:
    """Returns the rows of the result."""
    made: dict[str, dict[str, str]] = {}
    digests = {r["bytes"]: {o["sha256"] for o in rows if o["bytes"] == r["bytes"]} for r in rows}
    smallest = {e: sorted(r["bytes"] for r in rows if _is(r, e, 1))[:2] for e in ENGINES}
    for r in sorted(rows, key=lambda r: (r["engine"], r["cores"], r["bytes"])):
        speed = r["bytes"] / r["seconds"] / r["cores"] / 1e6
        memory = ", ".join(f"{mib:,.0f}" for mib in r["worker_peak_mib"])
        found = (
            f"{speed:.3g} MB/s a core ({r['bytes'] / r['cpu_seconds'] / 1e6:.3g} a CPU second), "
            f"{r['seconds']:,.0f} s; peak {r['peak_mib']:,.0f} MiB"
            + (f", workers {memory}" if memory else "")
        )
        guess = predicted(rows, r["engine"], r["bytes"], r["cores"])
        is_made_of = r["cores"] == 1 and r["bytes"] in smallest[r["engine"]]
        name = f"{r['engine']}_{r['cores']}_{r['bytes'] / 1e6:.0f}mb"
        what = f"{r['engine']}, cores {r['cores']}, {r['bytes'] / 1e9:.3g} GB"
        made[name] = row(what, found)
        if guess is not None and not is_made_of:
            off = guess / r["seconds"] - 1
            made[f"{name}_rule"] = row(
                f"{what}: the scale-up rule's seconds against the measured ones",
                f"{guess:,.0f} s, {off:+.0%}",
                f"within {RULE_WITHIN:.0%}",
                abs(off) <= RULE_WITHIN,
            )
    for engine, size in WANTED.items():
        largest = max((r["bytes"] for r in rows if r["engine"] == engine), default=0)
        goal = f"{size / 1e9:g} GB"
        made[f"{engine}_largest"] = row(
            f"{engine}: the largest data prepared whole",
            f"{largest / 1e9:g} GB",
            goal,
            largest >= size,
        )
    several = [size for size in digests if sum(r["bytes"] == size for r in rows) > 1]
    made["same"] = row(
        f"every file of {len(several)} sizes that several rows prepared",
        "the same" if all(len(digests[size]) == 1 for size in several) else "others",
        "the same",
        bool(several) and all(len(digests[size]) == 1 for size in several),
    )
    return made


ENGINES = ("processes", "beam")


def work(options: Options) -> Result | None:
    """Measures the rows, or only one of them.

    Raises:
      UserError: a row is none; or the records that were read or dropped are not those written.
    """
    if options.sources:
        [name] = options.rows
        engine, cores = name.split(":")
        with tempfile.TemporaryDirectory(dir=options.scratch, prefix="engines-") as target:
            print(
                json.dumps(
                    measure(engine, int(cores), options.sources, options.tokenizer, Path(target))
                )
            )
        return None
    output_files(options.output, {FILE: b'"sha256"'})
    path = options.output / FILE
    rows = read_json(path) if path.exists() else []
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory(dir=options.scratch, prefix="engines-") as folder:
            sources, size = Path(folder) / "in", round(gigabytes * 1e9)
            records = write_conversations(sources, size)
            for name in options.rows:
                engine, _, cores = name.partition(":")
                if engine not in ENGINES or not cores.isdecimal():
                    raise UserError(f"--rows: found {name}; processes:2 would work")
                words = (f"--rows={name}", f"--sources={sources}", f"--scratch={folder}")
                tokenizer = f"--tokenizer={options.tokenizer}"
                found = in_own_process("bench_engines", *words, tokenizer)
                measured = {"engine": engine, "cores": int(cores), "bytes": size, **found}
                if (found["records"], found["duplicates"]) != (records, records // REPEATED):
                    raise UserError(f"{name}: {records} records were written; found {found}")
                key = ("engine", "cores", "bytes")
                rows = [r for r in rows if any(r[k] != measured[k] for k in key)] + [measured]
                write_json(path, rows)
                print(json.dumps(measured), flush=True)
    if not options.write:
        return None
    command_line = "python -m scripts.benchmarks.bench_engines --gigabytes "
    command_line += " ".join(f"{size / 1e9:g}" for size in sorted({r["bytes"] for r in rows}))
    return renew("engines", result_rows(rows), command=command_line, facts=load("engines").facts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    tokenizer: Path = option(
        "folder of a tokenizer", ROOT / "data/fixtures/tiny_tokenizer", metavar="DIR"
    )
    rows: tuple[str, ...] = option(
        "ENGINE:CORES to measure", ("processes:1", "processes:2", "beam:1", "beam:2")
    )
    gigabytes: tuple[float, ...] = option("sizes of the data, 10^9 bytes", (0.25, 0.5, 1.0))
    write: bool = option("make docs/results/engines.json of the rows measured so far")
    scratch: Path = option("folder for the data, which are removed", Path(tempfile.gettempdir()))
    output: Path = option("folder for results", Path("runs/bench/engines"))
    sources: Path | None = option("folder to prepare, in place of data that are made", None)


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
