"""One HTML file about a run, or two side by side: curves, evaluations with intervals, maps, samples, cost, configuration.

    python -m eval.report RUN [RUN] [--evaluations DIR ...] [--output report.html]

A run is a folder that train.py wrote. Evaluations are looked for in the run's folder; with two runs, --evaluations may be given
once for each. The file loads nothing from a network and has no script: it opens anywhere, on a phone too, and prints.
"""
from __future__ import annotations

import argparse
import dataclasses
import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from data.errors import UserError
from data.paths import output_file
from trainer import entry

SAMPLES = 3  # of right answers, and as many of wrong ones
LONGEST_SAMPLE = 600  # characters of an answer
COLORS = ("#1f5fa8", "#c2571a")
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; } h3 { font-size: 1rem; }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.2rem; }
.side > * { min-width: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #e3e3e3; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.map td { text-align: center; border: 1px solid #fff; }
svg { width: 100%; height: auto; display: block; }
figure { margin: 0; } figcaption, .note { font-size: .85rem; color: #555; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: .6rem; font-size: .8rem; }
@media print { body { max-width: none; font-size: 11px; padding: 0; } details > * { display: block; } h2 { break-after: avoid; }
  figure, table, pre { break-inside: avoid; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


@dataclasses.dataclass(frozen=True)
class Score:
    """A row of an evaluation's results, whatever wrote it.

    Attributes:
      key: evaluation, task, length and depth, by which rows of two runs are compared.
    """

    evaluation: str
    task: str
    size: int
    unit: str
    depth: float | None
    cases: int
    score: float
    low: float
    high: float
    beyond: bool

    @property
    def key(self) -> tuple:
        """By which rows of two runs are compared."""
        return self.evaluation, self.task, self.unit, self.size, -1.0 if self.depth is None else self.depth


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One results.json, and the cases beside it."""

    path: Path
    scores: list[Score]
    about: dict[str, Any]
    samples: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
      logs: the rows of each JSONL file of metrics, by name.
      curves: losses by position, by the checkpoint's name.
    """

    folder: Path
    config: dict[str, Any]
    logs: dict[str, list[dict[str, Any]]]
    evaluations: list[Evaluation]
    curves: dict[str, list[dict[str, Any]]]

    @property
    def name(self) -> str:
        """Its name in the report, which is its folder's."""
        return self.folder.absolute().name


def read_run(folder: Path, evaluations: Sequence[Path] = ()) -> Run:
    """Returns what a run's folder holds, with the evaluations in other folders.

    Raises:
      UserError: it is no run, or a file in it cannot be read.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        raise UserError(f"{folder}: holds no run (config.yaml is missing); a folder that train.py wrote would work")
    for path in evaluations:
        if not path.is_dir():
            raise UserError(f"--evaluations: {path} is no folder")
    every = {path.stem: [row for row in _rows(path) if "step" in row] for path in sorted(folder.glob("*.jsonl"))}
    logs = {name: rows for name, rows in every.items() if rows}
    found = sorted({path for root in (folder, *evaluations) for path in root.rglob("results.json")})
    results = [evaluation for path in found if (evaluation := _evaluation(path))]
    curves = {}
    for root in (folder, *evaluations):
        for path in sorted(root.rglob("loss_by_position.json")):
            curves |= _json(path).get("curves", {})
    return Run(folder, yaml.safe_load(config.read_text(encoding="utf-8")) or {}, logs, results, curves)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a JSONL file that are whole objects."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a crash
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); without it, the report can be made") from None


def _evaluation(path: Path) -> Evaluation | None:
    """Returns the evaluation of a results.json, or None for one of another kind."""
    content = _json(path)
    if "results" in content and "evaluation" in content:
        scores = [Score(content["evaluation"], row["task"], row["tokens"], "tokens", row["depth"], row["cases"], row["score"],
                        row["low"], row["high"], row["beyond_trained_length"]) for row in content["results"]]
    elif "within_trained_length" in content:
        scores = [Score("line retrieval", f"{row['family']} ({row['source']})", row["num_lines"], "lines", None, row["cases"],
                        row["accuracy"], row["low"], row["high"], row["beyond_trained_length"])
                  for row in content["within_trained_length"] + content["beyond_trained_length"]]
        scores += [Score("line retrieval", f"{row['family']}, by depth", row["num_lines"], "lines", row["depth_from"],
                         row["cases"], row["accuracy"], row["low"], row["high"], False) for row in content.get("by_depth", ())]
    else:
        return None
    cases = _rows(path.parent / "cases.jsonl") if (path.parent / "cases.jsonl").is_file() else []
    return Evaluation(path, scores, content.get("about", {}), cases)


# Cost


def cost(run: Run) -> dict[str, str]:
    """Returns what a run took, as far as its metrics say."""
    rows, mesh = run.logs.get("metrics", []), run.config.get("mesh", {})
    devices = math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp", "tensor", "sequence"))
    steps = [row["step"] for row in rows]
    spans = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    seconds = sum(span * (row.get("step_seconds") or 0) for span, row in zip(spans, rows, strict=True))
    tokens = sum(span * (row.get("step_seconds") or 0) * (row.get("tokens_per_second") or 0)
                 for span, row in zip(spans, rows, strict=True))
    last = rows[-1] if rows else {}
    kind = "simulated devices" if mesh.get("simulate") else "devices"
    values = {"steps": f"{steps[-1]:,}" if steps else "0", "tokens": f"{tokens:,.0f}", "training": _duration(seconds),
              "device hours": f"{seconds * devices / 3600:,.2f} on {devices} {kind}",
              "compilation": _duration(last.get("compile_seconds") or 0)}
    for name, label in (("mfu", "MFU, last"), ("peak_device_gib", "peak GiB a device")):
        if last.get(name) is not None:
            values[label] = f"{last[name]:.3g}"
    return values


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


# HTML


def text(value: object) -> str:
    """Returns a value as HTML text."""
    return html.escape(str(value))


Series = dict[str, list[tuple[float, float]]]


def chart(series: Series, x_label: str, y_label: str, log: bool = False) -> str:
    """Returns a line chart as SVG: curves of points (x, y), by their names.

    Args:
      log: the x axis is logarithmic.
    """
    width, height, left, bottom, top, right = 640, 360, 62, 46, 14, 12
    points = [point for curve in series.values() for point in curve if math.isfinite(point[1]) and (point[0] > 0 or not log)]
    if not points:
        return ""
    scale = math.log2 if log else float
    x_low, x_high = (bound(scale(x) for x, _ in points) for bound in (min, max))
    y_low, y_high = (bound(y for _, y in points) for bound in (min, max))
    x_span, y_span = x_high - x_low or 1.0, y_high - y_low or 1.0

    def place(x: float, y: float) -> str:
        across = left + (scale(x) - x_low) / x_span * (width - left - right)
        down = height - bottom - (y - y_low) / y_span * (height - bottom - top)
        return f"{across:.1f},{down:.1f}"

    marks = []
    for i in range(5):
        y = y_low + y_span * i / 4
        _, down = place(points[0][0], y).split(",")
        marks.append(f'<line x1="{left}" x2="{width - right}" y1="{down}" y2="{down}" stroke="#ddd"/>'
                     f'<text x="{left - 6}" y="{down}" text-anchor="end" dominant-baseline="middle">{y:.3g}</text>')
        x = x_low + x_span * i / 4
        across = left + (x - x_low) / x_span * (width - left - right)
        marks.append(f'<text x="{across:.1f}" y="{height - bottom + 16}" text-anchor="middle">'
                     f"{2 ** x if log else x:,.0f}</text>")
    for number, (name, curve) in enumerate(series.items()):
        color, dash = COLORS[number % 2], ("", ' stroke-dasharray="6 4"', ' stroke-dasharray="2 3"')[number // 2 % 3]
        path = " ".join(place(x, y) for x, y in curve if math.isfinite(y) and (x > 0 or not log))
        marks.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}>'
                     f"<title>{text(name)}</title></polyline>")
        marks += [f'<circle cx="{dot.split(",")[0]}" cy="{dot.split(",")[1]}" r="3" fill="{color}"/>' for dot in path.split()
                  if len(curve) <= 24]
    marks.append(f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">{text(x_label)}</text>')
    squares = ("&#9632;", "&#9633;")
    legend = " ".join(f'<span style="color:{COLORS[number % 2]}">{squares[number > 1]} {text(name)}</span>'
                      for number, name in enumerate(series))
    return (f'<figure><figcaption>{text(y_label)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{text(y_label)} against {text(x_label)}" font-size="12" font-family="sans-serif">'
            f'{"".join(marks)}</svg>'
            f"<figcaption>{legend}</figcaption></figure>")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table; cells are text."""
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{text(cell)}</th>" for cell in head)}</tr>{body}</table></div>'


def curves_of(runs: Sequence[Run]) -> str:
    """Returns a chart of each metric worth looking at: of training, of held-out data, of evaluations during training."""
    names: dict[tuple[str, str], None] = {}
    for run in runs:
        for log, rows in run.logs.items():
            keys = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, int | float))
            chosen = ("loss", "grad_norm", "learning_rate", "tokens_per_second") if log == "metrics" else ()
            for key in keys:
                worth = key.startswith(chosen) and key != "tokens_per_second_per_device" if chosen else True
                if key != "step" and worth and not key.endswith("target_tokens"):
                    names[log, key] = None
    charts = []
    for log, key in names:
        series = {run.name: [(row["step"], row[key]) for row in run.logs.get(log, ()) if isinstance(row.get(key), int | float)]
                  for run in runs}
        charts.append(chart({name: curve for name, curve in series.items() if curve}, "step", key))
    return '<div class="side">' + "".join(charts) + "</div>"


def scores_of(runs: Sequence[Run]) -> str:
    """Returns the table of all scores without depth, and the maps of those with one."""
    by_run = [{score.key: score for evaluation in run.evaluations for score in evaluation.scores} for run in runs]
    every = {key: score for scores in by_run for key, score in scores.items()}
    parts = []
    for name in dict.fromkeys(score.evaluation for score in every.values()):
        parts.append(f"<h3>{text(name)}</h3>")
        keys = sorted(key for key, score in every.items() if score.evaluation == name and score.depth is None)
        if keys:
            head = ["task", "length", *(column for run in runs for column in (f"{run.name}: score", "95% interval", "cases"))]
            rows = [[every[key].task, f"{every[key].size:,} {every[key].unit}{' *' if every[key].beyond else ''}",
                     *(cell for scores in by_run for cell in _cells(scores.get(key)))] for key in keys]
            parts.append(table(head, rows))
        tasks = dict.fromkeys(score.task for score in every.values() if score.evaluation == name and score.depth is not None)
        for task in tasks:
            maps = [_map([score for score in scores.values() if (score.evaluation, score.task) == (name, task)], run.name)
                    for run, scores in zip(runs, by_run, strict=True)]
            parts.append(f'<p>{text(task)}: length against depth</p><div class="side">{"".join(maps)}</div>')
    if any(score.beyond for score in every.values()):
        parts.append('<p class="note">* beyond the trained length</p>')
    return "".join(parts) or "<p>No evaluation was found.</p>"


def _cells(score: Score | None) -> list[str]:
    return ["", "", ""] if score is None else [f"{score.score:.3f}", f"{score.low:.2f} to {score.high:.2f}", str(score.cases)]


def _map(scores: list[Score], title: str) -> str:
    """Returns a table of depths and lengths whose cells are coloured from red (0) to green (1)."""
    if not scores:
        return ""
    sizes, depths = sorted({score.size for score in scores}), sorted({score.depth or 0.0 for score in scores})
    cells = {(score.size, score.depth or 0.0): score for score in scores}
    rows = []
    for depth in depths:
        row = [f"<td>{depth:.0%}</td>"]
        for size in sizes:
            score = cells.get((size, depth))
            hover = f"{score.low:.2f} to {score.high:.2f}, {score.cases} cases" if score else ""
            color = f"hsl({120 * score.score:.0f} 60% 75%)" if score else "#eee"
            row.append(f'<td style="background:{color}" title="{hover}">{f"{score.score:.2f}" if score else ""}</td>')
        rows.append("<tr>" + "".join(row) + "</tr>")
    head = "".join(f"<th>{size:,}</th>" for size in sizes)
    return (f'<figure class="wide"><figcaption>{text(title)}</figcaption><table class="map"><tr><th>depth</th>{head}</tr>'
            f'{"".join(rows)}</table></figure>')


def positions_of(runs: Sequence[Run]) -> str:
    """Returns the chart of losses by position, or nothing."""
    series = {name: [(math.sqrt(row["tokens_before_from"] * row["tokens_before_to"]), row["loss_nats_per_target"])
                     for row in rows] for run in runs for name, rows in run.curves.items()}
    drawn = chart(series, "tokens of the text before the target", "loss, nats per target", log=True)
    return f"<h2>Loss by position</h2>{drawn}" if drawn else ""


def samples_of(run: Run) -> str:
    """Returns a few right and wrong answers of each evaluation."""
    parts = []
    for evaluation in run.evaluations:
        chosen: list[dict] = []
        for is_right in (True, False):
            group = [row for row in evaluation.samples if (row.get("right", row.get("score", 0) == 1)) == is_right]
            chosen += group[:SAMPLES]
        blocks = []
        for row in chosen:
            expected = row.get("expected", row.get("expected_number"))
            verdict = row.get("right", row.get("score"))
            label = row.get("task") or f"{row.get('num_lines')} lines"
            facts = f"{label}, {row.get('prompt_tokens')} tokens; expected {json.dumps(expected)}; score {float(verdict or 0)}"
            blocks.append(f"<pre>{text(facts)}\n\n{text(str(row.get('generated'))[:LONGEST_SAMPLE])}</pre>")
        if blocks:
            parts.append(f"<details><summary>{text(evaluation.path.parent)}</summary>{''.join(blocks)}</details>")
    return "".join(parts)


def about_of(run: Run) -> str:
    """Returns the cost of a run, how its evaluations were made, and its configuration."""
    parts = [table(["", run.name], cost(run).items())]
    for evaluation in run.evaluations:
        about = evaluation.about
        command = " ".join(map(str, about.get("command", ())))
        facts = {key: value for key, value in about.items() if key != "command"}
        parts.append(f"<details><summary>{text(evaluation.path.parent)}: how it was made</summary><pre>{text(command)}\n\n"
                     f"{text(json.dumps(facts, indent=1))}</pre></details>")
    configuration = yaml.safe_dump(run.config, sort_keys=False)
    command = f"python train.py --config {run.folder}/config.yaml --run_dir {run.folder}"
    parts.append(f"<details><summary>Configuration and command</summary><pre>{text(command)}\n\n{text(configuration)}</pre>"
                 "</details>")
    return "".join(parts)


def page(runs: Sequence[Run]) -> str:
    """Returns the report as HTML."""
    title = " and ".join(run.name for run in runs)
    columns = "".join(f"<section><h3>{text(run.name)}</h3><p class=\"note\">{text(run.folder)}</p>{about_of(run)}</section>"
                      for run in runs)
    samples = "".join(f"<section><h3>{text(run.name)}</h3>{samples_of(run) or '<p>None.</p>'}</section>" for run in runs)
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
            f'initial-scale=1"><title>{text(title)}</title><style>{STYLE}</style></head><body><h1>{text(title)}</h1>'
            f"<h2>Cost and configuration</h2><div class=\"side\">{columns}</div><h2>Evaluations</h2>{scores_of(runs)}"
            f'{positions_of(runs)}<h2>Curves</h2>{curves_of(runs)}<h2>Samples</h2><div class="side">{samples}</div></body>'
            "</html>\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; two are shown side by side")
    parser.add_argument("--evaluations", nargs="+", action="append", type=Path, default=[], metavar="DIR", help="folders with "
                        "results of evaluations; the first --evaluations are of the first run, the second of the second")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the file (default report.html)")
    args = parser.parse_args(argv)
    if len(args.runs) > 2:
        parser.error(f"found {len(args.runs)} runs; one, or two side by side, would work")
    if len(args.evaluations) > len(args.runs):
        parser.error(f"argument --evaluations: given {len(args.evaluations)} times for {len(args.runs)} runs")
    return args


def write(args: argparse.Namespace) -> None:
    """Writes the report."""
    path = output_file(args.output)
    evaluations = [*args.evaluations, *([] for _ in args.runs)]
    runs = [read_run(folder, found) for folder, found in zip(args.runs, evaluations, strict=False)]
    if len({run.name for run in runs}) < len(runs):
        raise UserError(f"{args.runs[0]} and {args.runs[1]}: the report tells runs apart by the names of their folders, which "
                        "are equal; a link of another name would work")
    path.write_text(page(runs), encoding="utf-8")
    print(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = parse(argv)
    return entry.run(lambda: write(args))


if __name__ == "__main__":
    entry.leave(main())
