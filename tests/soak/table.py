"""The table of what was attacked: docs/results/robustness.json, and the same in
docs/robustness.md."""

import collections
import json
import pathlib
from typing import Any

from scripts.benchmarks.results import ROOT, commit, load, renew, row
from tests.soak.attacks import CLASSES, LONGER, LONGEST
from tests.soak.kills import count

PAGE = ROOT / "docs" / "robustness.md"
BEGIN, END = "<!-- table: python -m tests.soak.attacks --record -->", "<!-- end of table -->"
ABOUT = {
    "recipes": "recipes: a field with another value, misspelt, doubled; bytes flipped",
    "models": "Hugging Face folders: a file damaged; every weight read",
    "records": "records of data among good ones",
    "line_cases": "files of line-retrieval cases",
    "trajectories": "episodes: files and arrays",
    "adapters": "PEFT's adapters: either file",
    "checkpoints": "a file of a checkpoint: removed, emptied, halved, a bit, a folder",
    "prepared": "a file of prepared data: the same",
    "runs": "a file of a run's folder beside its checkpoints: the same",
    "commands": "import, export, prepare, inspect, line retrieval: a file damaged",
    "disk": "a disk that fills up at a random place, then has room: the same result",
    "races": "two starts of one run that race, or of which one stands still: bitwise",
    "accounts": "another user, who may read what is shared, or not all of it",
    "kills": "runs of one process or two and exports killed: bitwise",
}


def record(folder: pathlib.Path) -> None:
    """Writes the result and the page's table from the counts in `folder`; classes without counts
    keep their row."""
    rows = load("robustness").rows
    for name in CLASSES:
        path = folder / f"{name}.json"
        parts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        if sum(part["tried"] for part in parts):
            rows[name] = _row(name, parts)
    rows = {name: rows[name] for name in CLASSES if name in rows}
    renew("robustness", rows)
    lines = ["| attacked | held | slowest, s | commit |", "|---|---|---|---|"]
    lines += [
        f"| {row['what']} | {row['found']} | {row['slowest']} | {row['commit']} |"
        for row in rows.values()
    ]
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(
        "\n".join([before + BEGIN, *lines, "", rows["kills"]["hits"], END + after]),
        encoding="utf-8",
    )


def _row(name: str, parts: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the row of a class from the counts of its parts, with the current commit."""
    tried, held = (sum(part[key] for part in parts) for key in ("tried", "held"))
    about, more = (
        ABOUT[name],
        {"slowest": f"{max(part['slowest'] for part in parts):.1f}", "commit": commit()},
    )
    if name == "kills":
        outcomes: collections.Counter[str] = collections.Counter()
        for part in parts:
            outcomes.update(part["outcomes"])
        kills = count(outcomes)
        about += f", {sum(kills.values())} kills"
        more["hits"] = (
            f"The kills hit {', '.join(f'{phase} {number}' for phase, number in kills.items())} "
            "times."
        )
    goal = f"all, each within {LONGER.get(name, LONGEST)} s"
    return row(about, f"{held:,} of {tried:,}", goal, held == tried, **more)
