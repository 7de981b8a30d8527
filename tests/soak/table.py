"""The table of what was attacked: docs/results/robustness.json, and the same in docs/robustness.md."""

import collections
import json
import pathlib

from scripts.benchmarks.results import ROOT, measured, row, save
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
DEPENDS_ON = ("tests/soak/*.py", "data/*.py", "trainer/**/*.py", "eval/line_cases.py")


def record(folder: pathlib.Path) -> None:
    """Writes the result and the page's table from the counts of every class in `folder`."""
    rows, hits, lines = {}, "", ["| attacked | cases | held | slowest, s |", "|---|---|---|---|"]
    for name in CLASSES:
        path = folder / f"{name}.json"
        parts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        tried, held = (sum(part[key] for part in parts) for key in ("tried", "held"))
        if not tried:
            continue
        about = ABOUT[name]
        if name == "kills":
            outcomes: collections.Counter[str] = collections.Counter()
            for part in parts:
                outcomes.update(part["outcomes"])
            kills = count(outcomes)
            about += f", {sum(kills.values())} kills"
            hits = f"\nThe kills hit {', '.join(f'{phase} {number}' for phase, number in kills.items())} times.\n"
        goal = f"all, each within {LONGER.get(name, LONGEST)} s"
        rows[name] = row(about, f"{held:,} of {tried:,}", goal, held == tried)
        lines.append(f"| {about} | {tried:,} | {held:,} | {max(part['slowest'] for part in parts):.1f} |")
    save("robustness", measured("Attacks on what users and machines get wrong", rows, "python -m tests.soak.attacks CLASS",
                                DEPENDS_ON, note="docs/robustness.md"))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + hits + END + after, encoding="utf-8")
