"""The report: one self-contained file, the figures of both runs, escaped text, damaged files
named."""

import errno
import html.parser
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from data.errors import UserError
from eval import in_context, report
from eval.line_cases import LineCase
from eval.line_report import write as write_lines
from eval.page import number, ticks
from eval.report_input import Score
from eval.scoring import outcome, paired_interval
from model.config import TransformerConfig
from trainer.checkpoint.manifest import fingerprint
from trainer.huggingface.card import model_card
from trainer.run.results import foreign_run


class Reader(html.parser.HTMLParser):
    """Collects elements that could load something, open elements, and text."""

    def __init__(self):
        super().__init__()
        self.loads, self.open, self.text, self.charts = [], [], [], 0

    def handle_starttag(self, tag, attributes):
        self.loads += [
            pair for pair in attributes if pair[0] in ("src", "href", "srcset", "data")
        ] + [tag] * (tag in ("script", "link", "iframe", "img", "object"))
        self.charts += tag == "svg"
        if tag not in ("meta", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in ("line", "circle")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def runs(tmp_path, whole_run):
    """Two copies of a run, the second with three kinds of evaluations."""
    for name in ("before", "after"):
        shutil.copytree(whole_run, tmp_path / name)
    folder = tmp_path / "after" / "evaluation" / "ruler"
    folder.mkdir(parents=True)
    rows = [
        {
            "task": "vt <b>",
            "tokens": tokens,
            "depth": depth,
            "cases": 20,
            "score": 0.25,
            "low": 0.11,
            "high": 0.47,
            "prompt_tokens": tokens - 30,
            "beyond_trained_length": tokens > 5000,
        }
        for tokens in (4096, 8192)
        for depth in (None, 0.0, 0.5)
    ]
    (folder / "results.json").write_text(
        json.dumps(
            {
                "evaluation": "ruler",
                "results": rows,
                "about": {"command": ["python", "-m", "eval.ruler"], "versions": {"jax": "0.10.2"}},
            }
        )
    )
    cases = [
        {
            "task": "vt",
            "expected": ["ABCDE"],
            "generated": "<script>alert(1)</script>",
            "score": score,
            "prompt_tokens": 7,
        }
        for score in (1.0, 0.2, 0.0, 0.0, 0.0)
    ]
    (folder / "cases.jsonl").write_text(
        "".join(json.dumps(case) + "\n" for case in cases) + '{"task": "cut o'
    )
    write_lines(
        [
            outcome(LineCase("line a: 7\n?", 7, 20, "line a: 7\n"), answer, 400, 8192, 10)
            for answer in ("7", "8", "7")
        ],
        tmp_path / "after" / "lines",
        {"checkpoint": "after"},
    )
    (tmp_path / "curve").mkdir()
    curve = [
        {
            "tokens_before_from": 2**k,
            "tokens_before_to": 2 ** (k + 1) - 1,
            "loss_nats_per_target": 3 - k / 10,
        }
        for k in range(9)
    ]
    (tmp_path / "curve" / "loss_by_position.json").write_text(
        json.dumps({"curves": {"after": curve}})
    )
    return tmp_path


def test_two_runs_in_one_file(runs, capsys):
    path = runs / "out" / "report.html"
    words = f"{runs}/before {runs}/after --evaluations {runs}/before --evaluations {runs}/curve"
    assert report.main([*words.split(), "--output", str(path)]) == 0
    content = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(content)
    words = " ".join(reader.text)
    assert (
        not reader.loads
        and not reader.open
        and "http" not in content
        and "@import" not in content
        and "url(" not in content
    )
    assert 'name="viewport"' in content and "@media print" in content
    assert re.search(r"before: score\s+95% interval\s+cases\s+after: score", words)
    assert "vt <b>" in words and "<script>alert(1)</script>" in words
    assert re.search(r"0\.250\s+0\.11 to 0\.47\s+20", words) and "8,192 tokens *" in words
    assert "2/3" not in words and re.search(r"0\.667\s+0\.21 to 0\.94\s+3", words)
    assert (
        words.count("score 0.2\n") + words.count("score 0.0\n") == 4
        and "python -m eval.ruler" in words
    )
    assert reader.charts >= 5 and "Loss by position" in words and "nats per target" in words
    assert content.count('class="map"') == 2  # of the second run: RULER's and the lines by depth


def test_runs_that_answered_the_same_cases_have_their_differences(runs):
    """The cases of the lines: two of three right after, one before."""
    write_lines(
        [
            outcome(LineCase("line a: 7\n?", 7, 20, "line a: 7\n"), answer, 400, 8192, 10)
            for answer in ("7", "8", "8")
        ],
        runs / "before" / "lines",
        {"checkpoint": "before"},
    )
    drawn = report.differences_of([report.read_run(runs / name) for name in ("before", "after")])
    low, high = paired_interval(np.array([1.0, 0, 0]), np.array([1.0, 0, 1]))
    assert "after minus before, over the same cases" in drawn and drawn.count("<tr>") == 2
    for cell in ("20 lines", "3", "0.333", "0.667", "+0.333", f"{low:+.2f} to {high:+.2f}"):
        assert f"<td>{cell}</td>" in drawn, cell
    assert report.differences_of([report.read_run(runs / "after")]) == ""


def test_a_value_that_is_no_score_is_named(runs, capsys):
    """In the file of cases, from which the differences of two runs are computed."""
    for name in ("before", "after"):
        evaluate(runs / name / "vt", 2)
    cases = runs / "after" / "vt" / "cases.jsonl"
    cases.write_text(cases.read_text().replace('"score": 1.0', '"score": "x"'))
    command = [str(runs / "before"), str(runs / "after"), "--output", str(runs / "x.html")]
    assert report.main(command) == 2
    assert capsys.readouterr().err == (
        f"error: {cases}: found the score 'x', not 0 to 1; without it, the report can be made\n"
    )


def test_cases_of_one_length_on_both_sides_of_the_trained_length(runs):
    """Both scores are shown, and both maps' columns; the star is that of the score."""
    case = LineCase("line a: 7\n?", 7, 20, "line a: 7\n")
    answered = [
        outcome(case, answer, tokens, 8192, 10)
        for answer, tokens in (("7", 400), ("7", 400), ("8", 8190), ("8", 8190), ("7", 8190))
    ]
    write_lines(answered, runs / "after" / "lines", {"checkpoint": "after"})
    write_lines(answered[2:], runs / "before" / "lines", {"checkpoint": "before"})
    before, after = (report.read_run(runs / name) for name in ("before", "after"))

    def shown(runs):
        return [row[1:] for row in rows_of(report.scores_of(runs)) if row and "generated" in row[0]]

    within, beyond = ["1.000", "0.34 to 1.00", "2"], ["0.333 *", "0.06 to 0.79", "3"]
    nothing = ["", "", ""]
    assert shown([after]) == [["20 lines", *within], ["20 lines", *beyond]]
    assert shown([before, after]) == [
        ["20 lines", *nothing, *within],
        ["20 lines", *beyond, *beyond],
    ]
    assert "<th>20 lines</th><th>20 lines *</th>" in report.scores_of([after])
    write_lines(answered[:2], runs / "after" / "lines", {"checkpoint": "after"})
    after = report.read_run(runs / "after")
    assert shown([before, after]) == [["20 lines", *beyond, *within]]  # to be compared


def test_returns_of_episodes_played_in_context_are_shown(runs):
    """The expected numbers are those of two environments that earn 1, 9, 2 and 1, 3, 8."""
    returns = np.array([[1.0, 9.0, 2.0], [1.0, 3.0, 8.0]])
    facts = {"checkpoint": "after", "task": "walker_walk", "in_context": 3, "target": 9.0}
    data = {"data_best": 9.0, "data_mean": 4.0}
    for name, played in (("before", returns[:1]), ("after", returns)):
        scores = {"returns": played.tolist(), "scores": in_context.summary(played)}
        (runs / name / "in_context").mkdir()
        in_context.write(facts | data | scores, runs / name / "in_context")
    before, after = (report.read_run(runs / name) for name in ("before", "after"))
    assert [
        "walker_walk, last episode",
        "",
        "2.000",
        "none",
        "1",
        "5.000",
        "2.00 to 8.00",
        "2",
    ] in rows_of(report.scores_of([before, after]))
    [evaluation] = [each for each in after.evaluations if "target" in each.about]
    assert evaluation.about == facts | data  # how it was made


def test_losses_of_one_checkpoint_in_several_files_are_all_drawn(runs):
    """Such as of two splits; of two runs, too."""
    content = json.loads((runs / "curve" / "loss_by_position.json").read_text())
    for folder in ("after/a", "after/b", "before/a"):
        (runs / folder).mkdir(parents=True)
        (runs / folder / "loss_by_position.json").write_text(json.dumps(content))

    def curves_of(runs):
        return re.findall("<title>(.*?)</title>", report.positions_of(runs))

    before, after = (report.read_run(runs / name) for name in ("before", "after"))
    assert curves_of([before, after]) == ["after", "after (a)", "after (b)"]
    shutil.rmtree(runs / "after" / "b")
    after = report.read_run(runs / "after", [runs / "after" / "a"])  # the same file
    assert curves_of([before, after]) == ["before: after", "after: after"]


def test_depths_of_earlier_versions_are_shown(runs):
    """Their rows lack source and side."""
    path = runs / "after" / "lines" / "results.json"
    content = json.loads(path.read_text())
    for row in content["by_depth"]:
        del row["source"], row["beyond_trained_length"]
    path.write_text(json.dumps(content))
    assert "adjective-noun keys, by depth: length" in report.scores_of(
        [report.read_run(runs / "after")]
    )


def evaluate(folder, right):
    """Writes an evaluation of four cases and a map of one cell, with this many right."""
    folder.mkdir(parents=True)
    row = {
        "task": "vt",
        "tokens": 4096,
        "cases": 4,
        "score": right / 4,
        "low": 0.0,
        "high": 1.0,
        "prompt_tokens": 4000,
        "beyond_trained_length": False,
    }
    rows = [row | {"depth": None}, row | {"task": "one needle", "depth": 0.5}]
    (folder / "results.json").write_text(
        json.dumps({"evaluation": "ruler", "results": rows, "about": {}})
    )
    cases = [
        {
            "task": "vt",
            "tokens": 4096,
            "depth": None,
            "expected": [str(number)],
            "generated": "x",
            "prompt_tokens": 4000,
            "score": float(number < right),
        }
        for number in range(4)
    ]
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))


def rows_of(page):
    return [re.findall("<td[^>]*>(.*?)</td>", row) for row in page.split("<tr>")[1:]]


def test_evaluations_of_the_same_task_are_distinguished_by_their_folders(tmp_path, whole_run):
    """Within a run, and in the differences between two: by equal folders if both runs have them,
    otherwise by all folders."""
    for name, folders in (
        ("a", {"early": 0, "late": 2}),
        ("b", {"early": 1, "late": 4}),
        ("c", {"once": 3}),
    ):
        shutil.copytree(whole_run, tmp_path / name)
        for folder, right in folders.items():
            evaluate(tmp_path / name / folder, right)
    a, b, c = (report.read_run(tmp_path / name) for name in "abc")
    shown = report.scores_of([a, b])
    cells = {row[0]: (row[2], row[5]) for row in rows_of(shown) if row and row[0].startswith("vt")}
    assert cells == {"vt (early)": ("0.000", "0.250"), "vt (late)": ("0.500", "1.000")}
    assert (
        shown.count('class="map"') == 4
        and "one needle (early): length" in shown
        and "one needle (late): length" in shown
    )
    differences = {row[0]: row[5] for row in rows_of(report.differences_of([a, b])) if row}
    assert differences == {"vt (early)": "+0.250", "vt (late)": "+0.500"}
    differences = {row[0]: row[5] for row in rows_of(report.differences_of([a, c])) if row}
    assert differences == {"vt (early, once)": "+0.750", "vt (late, once)": "+0.250"}
    assert "<td>vt</td>" in report.scores_of([c]) and "vt (" not in report.scores_of([c])


def test_an_evaluation_found_twice_is_shown_once(tmp_path, whole_run, monkeypatch):
    """In the run's folder, and through --evaluations with a different spelling of the path."""
    shutil.copytree(whole_run, tmp_path / "a")
    evaluate(tmp_path / "a" / "ruler", 2)
    monkeypatch.chdir(tmp_path)
    run = report.read_run(tmp_path / "a", [Path("a/ruler")])
    assert [run.folder_of(evaluation) for evaluation in run.evaluations] == ["ruler"]


def test_a_folder_that_may_not_be_read_is_named(tmp_path, whole_run, monkeypatch, capsys):
    """Such as a colleague's, below the run's folder."""
    run = shutil.copytree(whole_run, tmp_path / "a")
    for name in ("ours", "theirs"):
        evaluate(run / name, 2)
    scandir = os.scandir

    def refused(path):
        if os.path.basename(path) == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    read = report.read_run(run)
    assert [read.folder_of(evaluation) for evaluation in read.evaluations] == ["ours"]
    assert capsys.readouterr().err == (
        f"warning: {run}/theirs: cannot be read (Permission denied); evaluations in it are not in "
        "the report\n"
    )


def test_evaluations_of_another_model_are_refused_or_named(tmp_path, whole_run, capsys):
    """Those passed by --evaluations or below the run's folder; evaluations of its own checkpoints
    are recognized after the run has moved."""
    run = shutil.copytree(whole_run, tmp_path / "b")
    newest = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    header = {
        "own": {"checkpoint": "moved/since", "model": fingerprint(newest)},
        "adapter": {
            "checkpoint": "base",
            "adapter": "moved/since",
            "model": f"{'0' * 32}+{fingerprint(newest)}",
        },
        "removed": {"checkpoint": str(run / "checkpoints/5"), "model": "1" * 32},
        "other": {"checkpoint": "runs/a", "model": "2" * 32},
    }
    for name, facts in header.items():
        for parent in (run, tmp_path / "elsewhere"):
            evaluate(parent / name, 2)
            path = parent / name / "results.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"about": facts}))
    assert report.main([str(run)]) == 0
    warnings = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")
    ]
    assert warnings == [
        f"warning: {run}/other/results.json: evaluates runs/a, which is not a checkpoint of {run}; the report shows it anyway"
    ]
    assert [foreign_run(header[name], run / "results" / name) for name in header] == [
        None,
        None,
        None,
        run,
    ]
    assert foreign_run(header["other"], tmp_path / "elsewhere" / "other") is None
    shutil.rmtree(run / "other")
    outside = [str(tmp_path / "elsewhere" / name) for name in header]
    assert (
        report.main([str(run), "--evaluations", *outside[:3]]) == 0 and not capsys.readouterr().err
    )
    assert report.main([str(run), "--evaluations", *outside]) == 2
    assert (
        f"--evaluations: {outside[3]}/results.json: evaluates runs/a, which is not a checkpoint of "
        f"{run}; an evaluation of " in (capsys.readouterr().err)
    )
    evaluate(run / "other", 1)
    path = run / "other" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"about": header["other"]}))
    card = model_card(newest, TransformerConfig.from_hf(newest / "assets"))
    assert "4,096 tokens: 0.500" in card and "4,096 tokens: 0.250" not in card
    assert (
        f"warning: {path}: evaluates runs/a, not {newest}; the card leaves it out"
        in capsys.readouterr().err
    )


def test_token_counts_match_the_metrics(runs):
    """Where a run was resumed, or logs rarely, the last step's rate differs from the total."""
    path = runs / "before" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps(row | {"tokens_seen": 1000 * row["step"]}) + "\n" for row in rows)
    )
    assert report.cost(report.read_run(runs / "before"))["tokens"] == f"{1000 * rows[-1]['step']:,}"


def test_answers_during_training_are_shown_from_the_first_to_the_last(runs):
    rows = [{"step": step, "Who <are> you?": f"answer {step}."} for step in range(0, 1000, 10)] + [
        {"step": 999, "New?": "yes"}
    ]
    (runs / "before" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = report.read_run(runs / "before")
    reader = Reader()
    reader.feed(report.samples_of(run))
    words = " ".join(reader.text)
    assert "Who <are> you?" in words and re.findall(r"answer (\d+)\.", words) == [
        "0",
        "200",
        "400",
        "590",
        "790",
        "990",
    ]
    assert re.search(r"New\?\s+step 999\s+yes", words) and "answer" not in report.curves_of([run])


def test_the_cost_is_the_sum_over_the_steps(runs):
    run = report.read_run(runs / "before")
    rows = [
        json.loads(line) for line in (runs / "before" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    cost = report.cost(run)
    seconds = sum(row["step_seconds"] for row in rows)
    tokens = sum(row["step_seconds"] * row["tokens_per_second"] for row in rows)
    assert cost["tokens"] == f"{tokens:,.0f}" and cost["training"] == report._duration(seconds)
    assert cost["steps"] == str(rows[-1]["step"]) and "simulated devices" in cost["device hours"]


def test_device_hours_count_the_devices_of_each_start(runs):
    """config.yaml has only the last start's mesh."""
    run = report.read_run(runs / "before")
    rows = run.logs["metrics"]
    for index, row in enumerate(rows):
        row |= {"step": index + 1, "step_seconds": 3600.0, "tokens_per_second": 800.0}
        row["tokens_per_second_per_device"] = 200.0 if index else 100.0
    hours = 8 + 4 * (len(rows) - 1)
    expected = f"{hours:,.2f} on 4 to 8 simulated devices"
    assert report.cost(run)["device hours"] == expected


def test_a_run_with_stages_reports_all_of_them(runs):
    """Curves and cost continue from stage to stage; a run whose last stage has not begun is
    reported too."""
    one_stage = report.cost(report.read_run(runs / "after"))
    shutil.copytree(runs / "before", runs / "staged" / "stages" / "1")
    assert report.cost(report.read_run(runs / "staged")) == one_stage
    for stage in ("2", "10"):
        shutil.copytree(runs / "before", runs / "staged" / "stages" / stage)
    for path in (runs / "before").iterdir():
        if path.is_file():
            shutil.copy(path, runs / "staged")
    run = report.read_run(runs / "staged")
    steps, total = int(one_stage["steps"]), report.cost(run)
    assert [row["step"] for row in run.logs["metrics"]] == list(range(1, 4 * steps + 1))
    assert total["steps"] == str(4 * steps)
    seconds = sum(
        json.loads(line)["step_seconds"]
        for line in (runs / "before" / "metrics.jsonl").read_text().splitlines()
    )
    hours, _, devices, *_ = total["device hours"].split()
    # Printed with two decimals; four times a stage's printed hours would differ by more.
    assert float(hours) == pytest.approx(4 * seconds * int(devices) / 3600, abs=0.0051)


def test_curves_have_every_logged_point(runs):
    rows = report.read_run(runs / "before").logs["metrics"]
    drawn = report.chart(
        {"loss": [(row["step"], row["loss_nats_per_target"]) for row in rows]}, "step", "loss"
    )
    (points,) = re.findall(r'points="([^"]*)"', drawn)
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert len(heights) == len(rows)
    losses = [row["loss_nats_per_target"] for row in rows]
    falling = [heights[i] for i in sorted(range(len(rows)), key=losses.__getitem__)]
    assert falling == sorted(falling, reverse=True) and falling[0] > falling[-1]
    assert report.chart({}, "x", "y") == ""


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.33, 7.04, ["0", "2", "4", "6", "8"]),
        (0.00003, 0.0010000000475, ["0", "0.0005", "0.001"]),
        (551, 6130, ["0", "2,000", "4,000", "6,000", "8,000"]),
        (3, 3, ["3", "4"]),
        (0, 0, ["0", "0.5"]),
    ],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert [number(tick) for tick in ticks(low, high)] == expected


def test_a_curve_leaves_out_non_finite_points():
    assert not re.search(r"\bnan\b", report.chart({"a": [(1, 1.0), (2, float("nan"))]}, "x", "y"))


RESULTS = "evaluation/ruler/results.json"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.yaml", None, "not a run (config.yaml is missing)"),
        ("config.yaml", "a: [", "config.yaml: cannot be read"),
        ("config.yaml", "- 1", "config.yaml: has no sections"),
        ("config.yaml", "mesh: {tensor: <b>}", "mesh.tensor: found '<b>'; a number is needed"),
        ("config.yaml", "mesh: 7", "config.yaml: mesh expects the fields"),
        (RESULTS, "{", "results.json: cannot be read"),
        (RESULTS, "[]", "results.json: found list"),
        (RESULTS, '{"evaluation": "ruler", "results": [{"task": "a"}]}', "result has no 'tokens'"),
    ],
)
def test_unreadable_files_are_named(runs, capsys, name, content, words):
    path = runs / "after" / name
    path.unlink() if content is None else path.write_text(content)
    assert report.main([str(runs / "after"), "--output", str(runs / "x.html")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (runs / "x.html").exists()
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)  # to itself
    assert report.main([str(runs / "after"), "--output", str(runs / "x.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_only_a_report_is_overwritten(runs, capsys):
    config = runs / "after" / "config.yaml"
    before = config.read_text()
    assert report.main([str(runs / "after"), "--output", str(config)]) == 2
    assert (
        f"error: {config}: exists, but was not written by this command" in capsys.readouterr().err
    )
    assert config.read_text() == before
    for _ in range(2):
        assert report.main([str(runs / "after"), "--output", str(runs / "x.html")]) == 0


HOSTILE = (
    None,
    True,
    -1,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "x",
    "<img src=x onerror=alert(1)>",
    "| a |\n\n# H\n````\n<b>",
    "a\x1b]8;;http://evil\x07b\x1b]8;;\x07",
    "~nobody/x",
    [],
    [1],
    {},
    {"a": 1},
)


def paths_of_values(value, path=()):
    """Yields the paths of the values inside a value of JSON."""
    if path:
        yield path
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, part in value.items() if isinstance(value, dict) else listed:
        yield from paths_of_values(part, (*path, key))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_any_value_anywhere_in_a_runs_files(runs, capsys, seed):
    """The report is made, or one line names the file; no value becomes markup, there or in a model
    card."""
    rng, after = random.Random(seed), runs / "after"
    curve = after / "loss_by_position.json"
    shutil.copy(runs / "curve" / "loss_by_position.json", curve)
    checkpoint = max((after / "checkpoints").iterdir(), key=lambda path: int(path.name))
    names = [
        *after.rglob("results.json"),
        *after.rglob("cases.jsonl"),
        *after.glob("*.jsonl"),
        after / "config.yaml",
        checkpoint / "assets" / "run.yaml",
        curve,
    ]
    for _ in range(25):
        path, value = rng.choice(names), rng.choice(HOSTILE)
        before = path.read_text(encoding="utf-8")
        if path.suffix == ".yaml":
            content = yaml.safe_load(before)
        elif path.suffix == ".json":
            content = json.loads(before)
        else:
            content = [json.loads(line) for line in before.splitlines() if line.endswith("}")]
        *outer, last = rng.choice([*paths_of_values(content)])
        inside = content
        for key in outer:
            inside = inside[key]
        inside[last] = value
        path.write_text(
            yaml.safe_dump(content)
            if path.suffix == ".yaml"
            else "".join(json.dumps(row) + "\n" for row in content)
            if path.suffix == ".jsonl"
            else json.dumps(content)
        )
        page = runs / "x.html"
        page.unlink(missing_ok=True)
        code = report.main([str(after), "--output", str(page)])
        error = capsys.readouterr().err
        assert code == 0 or (code == 2 and path.name in error and error.count("\n") == 1), error
        if code == 0:
            reader = Reader()
            reader.feed(page.read_text(encoding="utf-8"))
            assert not reader.loads and not reader.open and "\x1b" not in page.read_text()
        try:
            card = model_card(checkpoint, TransformerConfig.preset("llama-7b"))
        except UserError as error:
            assert path.name in str(error)
        else:
            prose = re.sub(r"(?ms)^(`{3,})yaml\n.*?^\1$", "", card.split("\n---", 1)[1])
            assert "# H" not in prose.splitlines() and "\x1b" not in card
            assert "<" not in prose.replace("\\<", "")
        capsys.readouterr()
        path.write_text(before, encoding="utf-8")


def test_a_score_without_an_interval_is_shown():
    """As lm-eval's perplexities."""
    score = Score("lm-eval", "wikitext", 0, "tokens", None, 62, 12.5, None, None, False)
    assert report._cells(score) == ["12.500", "none", "62"]


def test_products_beyond_floats_do_not_end_the_report(runs):
    """Of numbers that each are within them, in the configuration and in a curve."""
    large = 10**200
    (runs / "after" / "config.yaml").write_text(f"mesh: {{fsdp: {large}, tensor: {large}}}")
    bounds = dict.fromkeys(("tokens_before_from", "tokens_before_to"), large)
    curves = {"after": [{**bounds, "loss_nats_per_target": 3.0}]}
    (runs / "after" / "loss_by_position.json").write_text(json.dumps({"curves": curves}))
    assert report.main([str(runs / "after"), "--output", str(runs / "x.html")]) == 0
