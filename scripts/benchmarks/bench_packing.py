"""Measures the time and peak memory of planning how many documents are packed.

    python -m scripts.benchmarks.bench_packing --documents 10000000

Makes only an index, of documents from three sources with up to 32,768 tokens; then opens it as
training does, up to the first row.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from data.loader import Loader
from data.prepared import INDEX, Documents, StoredIndex
from data.record_store import RECORDS_IN_A_FILE
from scripts.benchmarks.bench_data import peak_mib
from scripts.benchmarks.commands import in_own_process
from trainer.options import Tokens, command, option


def write_index(path: Path, count: int) -> None:
    """Writes an index of documents whose lengths are distributed like those of chats."""
    rng = np.random.default_rng(0)
    names = ("length", "trained", "held_out", "chosen", "chosen_trained", "label", "shared")
    columns = {name: np.zeros(count, np.int32) for name in names}
    for start in range(0, count, RECORDS_IN_A_FILE):
        part = columns["length"][start : start + RECORDS_IN_A_FILE]
        part[:] = np.clip(rng.lognormal(6.5, 1.2, len(part)), 2, 32768)
    sources = np.repeat(
        np.arange(3, dtype=np.int32), np.diff([0, count // 2, count * 4 // 5, count])
    )
    columns = {**columns, "source": sources, "files": np.array("{}")}
    np.savez(path, **columns)  # type: ignore[arg-type]  # by numpy's own types


def plan_index(path: Path, context_length: int) -> dict:
    """Plans the packing of an index's documents; returns this process's times and peak memory."""
    started, before = time.process_time(), peak_mib()
    index = StoredIndex(path)
    count = len(index["held_out"])
    documents = Documents(path.parent, np.arange(count, dtype=np.int32), index, np.ones(3), "train")
    loader = Loader(documents, context_length, 1, 0)
    rows = len(loader)
    counted = time.process_time()
    loader.lengths(0)
    return {
        "documents": count,
        "rows": rows,
        "padding_share": round(loader.padding_share, 5),
        "cpu_seconds_to_plan": round(counted - started, 1),
        "cpu_seconds_to_first_row": round(time.process_time() - started, 1),
        "peak_mib": peak_mib(),
        "peak_mib_before": before,
    }


def measure(options: Options) -> None:
    """Prints the figures as JSON; the index is planned in a separate process."""
    if options.index:
        print(json.dumps(plan_index(options.index, options.context_length)))
        return
    with tempfile.TemporaryDirectory(prefix="longstripe-index-") as folder:
        path = Path(folder) / INDEX
        write_index(path, options.documents)
        length = f"--context_length={options.context_length}"
        print(json.dumps(in_own_process("bench_packing", f"--index={path}", length)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    documents: int = option("documents in the index", 10_000_000)
    context_length: Tokens = option("tokens per row", 32768)
    index: Path | None = option("index.npz to plan instead of a generated one", None)


main = command(Options, measure)


if __name__ == "__main__":
    sys.exit(main())
