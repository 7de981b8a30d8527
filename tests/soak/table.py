"""The table of what was attacked: docs/results/robustness.json, and the same in
docs/notes/robustness.md."""

import collections
import json
import pathlib
from typing import Any

from scripts.benchmarks.results import ROOT, commit, load, renew, row
from tests.soak.attacks import CLASSES, LONGER, LONGEST
from tests.soak.kills import count

PAGE = ROOT / "docs" / "notes" / "robustness.md"
BEGIN, END = "<!-- table: python -m tests.soak.attacks --record -->", "<!-- end of table -->"
ABOUT = {
    "recipes": "recipes: a field changed, misspelt or repeated; bytes flipped",
    "models": "Hugging Face folders: a file damaged; every weight read",
    "records": "bad data records among good ones",
    "line_cases": "line-retrieval case files damaged",
    "trajectories": "episodes: files and arrays damaged",
    "adapters": "PEFT adapters: either file damaged",
    "checkpoints": "a checkpoint file: removed, emptied, halved, a bit flipped, replaced by a folder",
    "prepared": "a file of prepared data: the same attacks",
    "runs": "a file of a run folder outside its checkpoints: the same attacks",
    "commands": "import, export, prepare, inspect, line retrieval: an input file damaged",
    "disk": "a disk that fills up at a random point and is then freed: same result",
    "races": "two starts of one run, racing or one of them stopped: bitwise",
    "accounts": "another user, who may read all or only some of the shared files",
    "kills": "runs of one or two processes, and exports, killed: bitwise",
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
    about = ABOUT[name]
    more = {"slowest": f"{max(part['slowest'] for part in parts):.1f}", "commit": commit()}
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
