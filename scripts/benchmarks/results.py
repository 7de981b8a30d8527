"""Result files: what was measured, when, where, at which commit, and which files it depends on.

A result is docs/results/NAME.json; `Result` lists its fields. Fields that do not change from one
measurement to the next are kept only in the file: title, depends_on's patterns, note, facts. A new
result begins as {"title": "...", "depends_on": {"model/**/*.py": ""}}. BENCHMARKS.md is made from
these files by

    python -m scripts.benchmarks.page

tests/scripts/benchmarks/test_page.py lists the figures that other pages quote, and compares them
with the results.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data.folders import replacing
from scripts.benchmarks import freshness

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "results"
# "superseded": measured again, under the same conditions, by a later result.
VERDICTS = ("held", "short", "no goal", "not measured", "superseded")
PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cuda-nvcc",
    "torch",
    "transformers",
)
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")


@dataclasses.dataclass
class Result:
    """One measurement.

    Attributes:
      title: what was measured, one line.
      rows: row id -> texts `what`, `goal`, `found`, `verdict` (one of VERDICTS). A row may have its
        own `command`, `date`, `commit` or `note`.
      tables: table name -> {"columns": [...], "rows": [[...], ...]}: further figures that a program
        reads (a check, the cost model, the next run of the measurement).
      command: the command that measured it; `python` and `pytest` are the environment's.
      date: day of the measurement, YYYY-MM-DD.
      commit: commit of the measured code; for carried results the commit that recorded the figures.
      hardware, versions: of the measuring machine; None or absent if not recorded.
      depends_on: glob pattern -> digest of the programs in the matching files at that commit (see
        `freshness`).
      seconds: how long the command took, None if not recorded.
      carried: whether the figures come from the hand-written page that preceded the result files.
      note: page of docs/notes that says what was tried and why.
      facts: further figures and conditions, one sentence each.
    """

    title: str
    rows: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    command: str = ""
    date: str = ""
    commit: str = ""
    hardware: dict[str, object] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    depends_on: dict[str, str] = dataclasses.field(default_factory=dict)
    tables: dict[str, dict[str, list]] = dataclasses.field(default_factory=dict)
    seconds: float | None = None
    carried: bool = False
    note: str = ""
    facts: list[str] = dataclasses.field(default_factory=list)


def load(name: str) -> Result:
    """Reads the result `name`."""
    return Result(**json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def load_all() -> dict[str, Result]:
    """Reads all results, by name in alphabetical order."""
    return {path.stem: load(path.stem) for path in sorted(FOLDER.glob("*.json"))}


def save(name: str, result: Result) -> Path:
    """Writes the result `name` atomically, without empty optional fields; returns its path."""
    for row_id, row in result.rows.items():
        if row["verdict"] not in VERDICTS:
            raise ValueError(f"{name}.{row_id}: verdict {row['verdict']!r} is none of {VERDICTS}")
    optional = {"tables", "seconds", "carried", "note", "facts"}
    if result.seconds is not None:
        optional.remove("seconds")  # 0.0 seconds is a measurement
    fields = {
        key: value
        for key, value in dataclasses.asdict(result).items()
        if value or key not in optional
    }
    return write_whole(FOLDER / f"{name}.json", as_text(fields))


def write_whole(path: Path, text: str) -> Path:
    """Writes a file that appears complete; returns its path."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
    return path


def as_text(fields: Mapping[str, Any]) -> str:
    """Returns a result as JSON, with one line per row of the result and of its tables."""
    parts = []
    for name, value in fields.items():
        if name == "rows":
            text = _in_lines(
                "{", [f"{_json(row_id)}: {_json(row)}" for row_id, row in value.items()], "}"
            )
        elif name == "tables":
            tables = [
                f'{_json(table_name)}: {{"columns": {_json(table["columns"])}, "rows": '
                + _in_lines("[", map(_json, table["rows"]), "]")
                + "}"
                for table_name, table in value.items()
            ]
            text = _in_lines("{", tables, "}")
        else:
            text = _json(value)
        parts.append(f"{_json(name)}: {text}")
    return _in_lines("{", parts, "}") + "\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _in_lines(opening: str, lines: Iterable[str], closing: str) -> str:
    return opening + "\n" + ",\n".join(lines) + "\n" + closing


def renew(name: str, rows: Mapping[str, Mapping[str, str]], **changes: Any) -> Result:
    """Writes a new measurement on this machine, at this commit, into the result `name`.

    Args:
      rows: all rows of the result.
      changes: other fields of `Result` that change: command, facts, seconds, tables.

    Returns:
      The new result.
    """
    known = load(name)
    result = dataclasses.replace(
        known,
        rows={key: dict(row) for key, row in rows.items()},
        date=datetime.date.today().isoformat(),
        commit=commit(),
        hardware=hardware(),
        versions=versions(),
        depends_on={pattern: fingerprint(pattern) for pattern in known.depends_on},
        carried=False,
        **changes,
    )
    save(name, result)
    return result


def row(
    what: str, found: str, goal: str = "", held: bool | None = None, **rest: str
) -> dict[str, str]:
    """Returns a row whose verdict follows from `held`, which is None if there is no goal."""
    verdict = {True: "held", False: "short", None: "no goal"}[held]
    return {"what": what, "goal": goal, "found": found, "verdict": verdict, **rest}


def fingerprint(pattern: str) -> str:
    """Returns a digest of the programs in the files that match a glob pattern; see `freshness`."""
    return freshness.fingerprint(pattern, ROOT)


def changed(result: Result) -> list[str]:
    """Returns the patterns of `depends_on` whose programs have changed; empty if it is fresh."""
    return [
        pattern for pattern, known in result.depends_on.items() if fingerprint(pattern) != known
    ]


def commit() -> str:
    """Returns the checked-out commit's short id, with `+changes` if tracked files differ."""
    git = ("git", "-C", str(ROOT))
    without = (":!docs/results", ":!docs/*.png", ":!BENCHMARKS.md")
    try:
        head = _output(*git, "rev-parse", "--short", "HEAD")
        changes = _output(
            *git, "status", "--porcelain", "--untracked-files=no", "--", ".", *without
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changes else "")


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@functools.cache
def hardware() -> dict[str, object]:
    """Returns this machine's processor, vector features, cores, memory and NVIDIA GPUs."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    described = {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "features": [name for name in CPU_FEATURES if name in flags],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }
    try:
        gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    except (OSError, subprocess.CalledProcessError):
        gpus = ""
    return described | ({"gpus": gpus.splitlines()} if gpus else {})


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed PACKAGES."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def same_versions(result: Result, packages: Iterable[str]) -> bool:
    """Returns whether the installed versions made a result; prints the first that differs."""
    installed = versions()
    for package in packages:
        now, then = installed.get(package), result.versions.get(package)
        if now != then:
            print(f"{package} {now}: not compared; the stored figures are from {then}")
            return False
    return True
