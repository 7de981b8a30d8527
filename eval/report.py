"""One HTML file about a run, or two side by side: curves, evaluations, samples, cost.

    python -m eval.report RUN [RUN] [--evaluations DIR ...] [--output report.html]

A run is a folder written by train.py. Evaluations are read from the run's folder; with two runs,
--evaluations may be given once per run. The file has no scripts and loads nothing: it opens
anywhere, including phones, and prints.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from data.errors import UserError
from data.outputs import output_file, write_text
from eval.compare import Difference, Group, differences
from eval.compare import scores_of as case_scores
from eval.page import STYLE, chart, table, text
from eval.report_input import EvaluationResults, Run, Score, read_run, scores_by_run
from trainer import arguments, entry
from trainer.checkpoint.fetch import run_copy
from trainer.reporting.rows import is_number
from trainer.run.bucket import in_bucket

SAMPLES = 3  # right answers, and as many wrong ones
# Marks a report as ours.
GENERATOR = '<meta name="generator" content="eval.report of Longstripe">'
STEPS_SHOWN = 6  # of answers to the recipe's prompts
LONGEST_SAMPLE = 600  # characters of an answer
CHARTS = ("loss", "grad_norm", "learning_rate", "tokens_per_second")  # beginnings of names


# Cost


def cost(run: Run) -> dict[str, str]:
    """Returns a run's cost, as far as its metrics show."""
    rows, mesh = run.logs.get("metrics", []), run.config.get("mesh")
    mesh = mesh if isinstance(mesh, dict) else {}
    axes = ("data", "fsdp", "expert", "tensor", "sequence")
    last_mesh = math.prod(float(_number(mesh, axis) or 1) for axis in axes)
    steps = [row["step"] for row in rows]
    spans = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    seconds = [span * _number(row, "step_seconds") for span, row in zip(spans, rows, strict=True)]
    # Metrics of earlier versions lack tokens_seen.
    tokens = sum(
        time * _number(row, "tokens_per_second") for time, row in zip(seconds, rows, strict=True)
    )
    devices = [_devices(row, last_mesh) for row in rows] or [last_mesh]
    device_seconds = sum(time * count for time, count in zip(seconds, devices, strict=False))
    last = rows[-1] if rows else {}
    counts = " to ".join(f"{count:.0f}" for count in sorted({min(devices), max(devices)}))
    kind = ("simulated " if mesh.get("simulate") else "") + (
        "device" if counts == "1" else "devices"
    )
    values = {
        "steps": f"{steps[-1]:,}" if steps else "0",
        "tokens": f"{_number(last, 'tokens_seen', tokens):,.0f}",
        "training": _duration(sum(seconds)),
        "device hours": f"{device_seconds / 3600:,.2f} on {counts} {kind}",
        "compilation": _duration(_number(last, "compile_seconds")),
    }
    for name, label in (("mfu", "MFU, last"), ("peak_device_gib", "peak GiB per device")):
        if is_number(last.get(name)):
            values[label] = f"{last[name]:.3g}"
    return values


def _devices(row: dict[str, Any], otherwise: float) -> float:
    """Returns the devices of a row's step, which another start may change, by its two rates."""
    each = _number(row, "tokens_per_second_per_device")
    return round(_number(row, "tokens_per_second") / each) if each > 0 else otherwise


def _number(row: dict[str, Any], name: str, otherwise: float = 0.0) -> float:
    """Returns a finite number of a row or section, or else `otherwise`."""
    value = row.get(name)
    return value if is_number(value) and math.isfinite(value) else otherwise


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


# Parts of the page


def curves_of(runs: Sequence[Run]) -> str:
    """Returns charts of metrics: training, held-out data, and evaluations during training."""
    names: dict[tuple[str, str], None] = {}
    for run in runs:
        for log, rows in run.logs.items():
            keys = dict.fromkeys(
                key for row in rows for key, value in row.items() if is_number(value)
            )
            names |= {(log, key): None for key in keys if _is_drawn(log, key)}
    charts = []
    for log, key in names:
        series = {
            run.name: [
                (row["step"], row[key]) for row in run.logs.get(log, ()) if is_number(row.get(key))
            ]
            for run in runs
        }
        charts.append(chart({name: curve for name, curve in series.items() if curve}, "step", key))
    return '<div class="side">' + "".join(charts) + "</div>"


def _is_drawn(log: str, key: str) -> bool:
    """Returns whether a number of a log has a chart; of the metrics, only some have one."""
    if log == "metrics" and not key.startswith(CHARTS):
        return False
    return not (key in ("step", "tokens_per_second_per_device") or key.endswith("target_tokens"))


def scores_of(runs: Sequence[Run]) -> str:
    """Returns the table of scores without depth, and the maps of those with one."""
    by_run = scores_by_run(runs)
    every = [score for scores in by_run for score in scores]
    parts = []
    for name in dict.fromkeys(score.evaluation for score in every):
        of_name = [[score for score in scores if score.evaluation == name] for scores in by_run]
        parts += [f"<h3>{text(name)}</h3>", _scores_by_length(runs, of_name)]
        parts += _scores_by_depth(runs, of_name)
    if any(score.beyond for score in every):
        parts.append('<p class="note">* beyond the trained length</p>')
    return "".join(parts) or "<p>No evaluation was found.</p>"


def _scores_by_length(runs: Sequence[Run], by_run: Sequence[Sequence[Score]]) -> str:
    """Returns the table of an evaluation's scores without depth; "" if there are none."""
    keys = sorted({score.key for scores in by_run for score in scores if score.depth is None})
    if not keys:
        return ""
    head = ["task", "length"]
    for run in runs:
        head += [f"{run.name}: score", "95% interval", "cases"]
    rows = []
    for scores in (row for key in keys for row in _aligned(key, by_run)):
        first = next(filter(None, scores))
        cells = [cell for score in scores for cell in _cells(score)]
        rows.append([first.label, first.length, *cells])
    return table(head, rows)


def _scores_by_depth(runs: Sequence[Run], by_run: Sequence[Sequence[Score]]) -> list[str]:
    """Returns the maps of an evaluation's scores with a depth, task after task."""
    deep = [[score for score in scores if score.depth is not None] for scores in by_run]
    parts = []
    for task in dict.fromkeys(score.label for scores in deep for score in scores):
        maps = [
            _map([score for score in scores if score.label == task], run.name)
            for run, scores in zip(runs, deep, strict=True)
        ]
        parts.append(
            f'<p>{text(task)}: length against depth</p><div class="side">{"".join(maps)}</div>'
        )
    return parts


def _aligned(key: tuple, by_run: Sequence[Sequence[Score]]) -> list[list[Score | None]]:
    """Returns the rows of a task and length, a score per run; two if a run has one within and one
    beyond its trained length."""
    found = [[score for score in scores if score.key == key] for scores in by_run]
    if all(len(scores) < 2 for scores in found):
        return [[next(iter(scores), None) for scores in found]]
    rows = [
        [next((score for score in scores if score.beyond == beyond), None) for scores in found]
        for beyond in (False, True)
    ]
    return [row for row in rows if any(row)]


def differences_of(runs: Sequence[Run]) -> str:
    """Returns the table of two runs' paired differences on the same cases, or nothing."""
    if len(runs) != 2:
        return ""
    rows = [(label, row) for pairs in _pairs(*runs).values() for label, row in _labelled(pairs)]
    if not rows:
        return ""
    before, after = (run.name for run in runs)
    cells = [
        [
            label,
            f"{row.size:,} {row.unit}",
            str(row.cases),
            f"{row.before:.3f}",
            f"{row.after:.3f}",
            f"{row.difference:+.3f}",
            f"{row.low:+.2f} to {row.high:+.2f}",
        ]
        for label, row in rows
    ]
    return f"<h3>{text(after)} minus {text(before)}, over the same cases</h3>" + table(
        ["task", "length", "cases", before, after, "difference", "95% interval"], cells
    )


Pair = tuple[str, str, Difference]
"""Each run's folder of an evaluation, and how their scores differ."""


def _pairs(before: Run, after: Run) -> dict[Group, list[Pair]]:
    """Returns, by task and length, the evaluations of two runs that share a case."""
    pairs: dict[Group, list[Pair]] = {}
    for first in before.evaluations:
        for second in after.evaluations:
            for row in differences(_case_scores(first), _case_scores(second)):
                pair = before.folder_of(first), after.folder_of(second), row
                pairs.setdefault(Group(row.task, row.size, row.unit), []).append(pair)
    return pairs


def _labelled(pairs: list[Pair]) -> list[tuple[str, Difference]]:
    """Returns the named differences of a task and length.

    Of several pairs, those with equal folders are preferred, and names include the folders.
    """
    if len(pairs) == 1:
        return [(row.task, row) for _, _, row in pairs]
    alike = [pair for pair in pairs if pair[0] == pair[1]]
    return [
        (f"{row.task} ({', '.join(dict.fromkeys((first, second)))})", row)
        for first, second, row in alike or pairs
    ]


def _case_scores(evaluation: EvaluationResults) -> dict:
    try:
        return case_scores(evaluation.samples)
    except (KeyError, TypeError):  # cases of another kind, such as episodes
        return {}
    except ValueError as error:
        raise UserError(
            f"{evaluation.path.parent / 'cases.jsonl'}: {error}; without it, the report can be made"
        ) from None


def _cells(score: Score | None) -> list[str]:
    if score is None:
        return ["", "", ""]
    star = " *" if score.beyond else ""
    return [f"{score.score:.3f}{star}", score.interval, str(score.cases)]


def _map(scores: list[Score], title: str) -> str:
    """Returns a table of depths and lengths, with cells coloured from red (0) to green (1)."""
    if not scores:
        return ""
    sizes = sorted({(score.size, bool(score.beyond)) for score in scores})
    depths = sorted({score.depth or 0.0 for score in scores})
    cells = {(score.size, bool(score.beyond), score.depth or 0.0): score for score in scores}
    rows = []
    for depth in depths:
        row = [f"<td>{depth:.0%}</td>"]
        for size in sizes:
            score = cells.get((*size, depth))
            hover = f"{score.interval}, {score.cases} cases" if score else ""
            color = f"hsl({120 * score.score:.0f} 60% 75%)" if score else "#eee"
            shown = f"{score.score:.2f}" if score else ""
            row.append(f'<td style="background:{color}" title="{hover}">{shown}</td>')
        rows.append("<tr>" + "".join(row) + "</tr>")
    head = "".join(
        f"<th>{size:,} {text(scores[0].unit)}{' *' if beyond else ''}</th>"
        for size, beyond in sizes
    )
    return (
        f'<figure class="wide"><figcaption>{text(title)}</figcaption><table class="map">'
        f"<tr><th>depth</th>{head}</tr>{''.join(rows)}</table></figure>"
    )


def positions_of(runs: Sequence[Run]) -> str:
    """Returns the chart of losses by position, or nothing; runs tell apart equal names."""
    counts = collections.Counter(name for run in runs for name in run.curves)
    series = {
        f"{run.name}: {name}" if counts[name] > 1 else name: [
            (
                math.sqrt(row["tokens_before_from"]) * math.sqrt(row["tokens_before_to"]),
                row["loss_nats_per_target"],
            )
            for row in rows
        ]
        for run in runs
        for name, rows in run.curves.items()
    }
    drawn = chart(series, "tokens of the text before the target", "loss, nats per target", log=True)
    return f"<h2>Loss by position</h2>{drawn}" if drawn else ""


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns at most STEPS_SHOWN rows: the first, the last, and evenly spaced ones between."""
    if len(rows) <= STEPS_SHOWN:
        return rows
    return [
        rows[round(number * (len(rows) - 1) / (STEPS_SHOWN - 1))] for number in range(STEPS_SHOWN)
    ]


def _live_samples(run: Run) -> list[str]:
    """Returns the answers during training to each prompt of the recipe."""
    rows = run.logs.get("samples", [])
    parts = []
    for prompt in dict.fromkeys(key for row in rows for key in row if key != "step"):
        answers = _spread([row for row in rows if prompt in row])
        blocks = "".join(
            f"<pre>step {row['step']:,}\n\n{text(str(row[prompt])[:LONGEST_SAMPLE])}</pre>"
            for row in answers
        )
        parts.append(
            f"<details><summary>During training: {text(prompt)}</summary>{blocks}</details>"
        )
    return parts


def samples_of(run: Run) -> str:
    """Returns answers to the recipe's prompts, and some right and wrong ones of evaluations."""
    parts = _live_samples(run)
    for evaluation in run.evaluations:
        chosen: list[dict] = []
        for is_right in (True, False):
            group = [
                row
                for row in evaluation.samples
                if (row.get("right", row.get("score", 0) == 1)) == is_right
            ]
            chosen += group[:SAMPLES]
        blocks = []
        for row in chosen:
            expected = row.get("expected", row.get("expected_number"))
            verdict = row.get("right", row.get("score"))
            label = row.get("task") or f"{row.get('num_lines')} lines"
            points = float(verdict) if isinstance(verdict, int | float) else verdict
            facts = (
                f"{label}, {row.get('prompt_tokens')} tokens; expected {json.dumps(expected)}; "
                f"score {0.0 if points is None else points}"
            )
            blocks.append(
                f"<pre>{text(facts)}\n\n{text(str(row.get('generated'))[:LONGEST_SAMPLE])}</pre>"
            )
        if blocks:
            parts.append(
                f"<details><summary>{text(run.folder_of(evaluation))}</summary>{''.join(blocks)}</details>"
            )
    return "".join(parts)


def about_of(run: Run) -> str:
    """Returns how a run's evaluations were made, and its configuration."""
    parts = []
    for evaluation in run.evaluations:
        about = evaluation.about
        command = " ".join(map(str, about.get("command", ())))
        facts = {key: value for key, value in about.items() if key != "command"}
        parts.append(
            f"<details><summary>{text(run.folder_of(evaluation))}: how it was made</summary>"
            f"<pre>{text(command)}\n\n{text(json.dumps(facts, indent=1))}</pre></details>"
        )
    configuration = yaml.safe_dump(run.config, sort_keys=False)
    command = f"python train.py --config {run.folder}/config.yaml --run_dir {run.location}"
    parts.append(
        "<details><summary>Configuration and command</summary>"
        f"<pre>{text(command)}\n\n{text(configuration)}</pre></details>"
    )
    return "".join(parts)


def page(runs: Sequence[Run]) -> str:
    """Returns the report as HTML."""
    title = " and ".join(run.name for run in runs)
    costs = "".join(
        f"<section>{table(['', run.name], cost(run).items())}"
        f'<p class="note">{text(run.location)}</p></section>'
        for run in runs
    )
    about = "".join(f"<section><h3>{text(run.name)}</h3>{about_of(run)}</section>" for run in runs)
    samples = "".join(
        f"<section><h3>{text(run.name)}</h3>{samples_of(run) or '<p>None.</p>'}</section>"
        for run in runs
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{GENERATOR}<title>{text(title)}</title><style>{STYLE}</style></head>"
        f'<body><h1>{text(title)}</h1><h2>Cost</h2><div class="side">{costs}</div>'
        f"<h2>Evaluations</h2>{scores_of(runs)}{differences_of(runs)}{positions_of(runs)}"
        f'<h2>Curves</h2>{curves_of(runs)}<h2>Samples</h2><div class="side">{samples}</div>'
        f'<h2>How it was made</h2><div class="side">{about}</div></body></html>\n'
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = arguments.CommandParser(
        prog="python -m eval.report", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=arguments.store_path,
        metavar="RUN",
        help="folder of a run, here or in a bucket; two are shown side by side",
    )
    parser.add_argument(
        "--evaluations",
        nargs="+",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help=(
            "folders with evaluation results; give --evaluations twice for two runs, in their order"
        ),
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="the file (default: report.html in the last run's folder; here for a bucket)",
    )
    args = parser.parse_args(argv)
    args.output = args.output or (
        Path("report.html") if in_bucket(args.runs[-1]) else Path(args.runs[-1]) / "report.html"
    )
    if len(args.runs) > 2:
        parser.error(f"found {len(args.runs)} runs; one, or two side by side, would work")
    if len(args.evaluations) > len(args.runs):
        parser.error(
            f"argument --evaluations: given {len(args.evaluations)} times for {len(args.runs)} runs"
        )
    return args


def write(args: argparse.Namespace) -> None:
    """Writes the report to `args.output` and prints its path; `args` come from `parse`."""
    evaluations = [*args.evaluations, *([] for _ in args.runs)]
    runs = [
        read_run(run_copy(run), folders)
        for run, folders in zip(args.runs, evaluations, strict=False)
    ]
    if len({run.name for run in runs}) < len(runs):
        raise UserError(
            f"{args.runs[0]} and {args.runs[1]}: both folders have the same name, by which the "
            "report tells runs apart; a link with another name would work"
        )
    path = output_file(args.output, GENERATOR.encode())
    write_text(path, page(runs))
    print(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = parse(argv)
    return entry.run(lambda: write(args), args.output)


if __name__ == "__main__":
    entry.leave(main())
