"""The benchmark of preference tuning: kills, comparisons and rows."""

import json

from scripts.benchmarks.preference import (
    KILLS,
    right,
    rows_and_facts,
    same_metrics,
    train_killed,
)

# Logs one step at a time, and continues where the file ends, like a resumed run.
RUN = """
import pathlib, sys, time
log = pathlib.Path(sys.argv[1], "metrics.jsonl")
log.parent.mkdir(exist_ok=True)
with pathlib.Path(sys.argv[1], "starts").open("a") as starts:
    starts.write("x")
for _ in range(len(log.read_text().splitlines()) if log.exists() else 0, 18):
    with log.open("a") as file:
        file.write("{}\\n")
    time.sleep(0.05)
"""
RECORDS = [{"prompt": "Tin?", "chosen": "Sn."}, {"prompt": "Far?", "chosen": "Near."}]


def write_run(folder, answers, **metrics):
    folder.mkdir()
    for name, rows in {
        "metrics": [{"step": 1, "preference_loss": 0.5, "step_seconds": 1.0, **metrics}],
        "held_out": [{"held_out_rewards/accuracies": x} for x in (0.5, 0.95)],
        "samples": [{"step": step, **row} for step, row in zip((0, 1), answers, strict=True)],
    }.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_a_run_is_killed_after_each_step_and_then_ends(tmp_path):
    run = tmp_path / "killed"
    words = ["-c", RUN, str(run)]
    train_killed(words, run)
    assert json.loads((tmp_path / "killed.json").read_text()) == list(KILLS)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 18
    assert (run / "starts").read_text() == "xxx"
    train_killed(words, run)
    assert (run / "starts").read_text() == "xxxx", "finished kills are not repeated"


def test_metrics_except_times_are_compared_bitwise(tmp_path):
    answers = [{}, {}]
    first, second, third = (
        write_run(tmp_path / name, answers, **metrics)
        for name, metrics in (
            ("first", {}),
            ("second", {"step_seconds": 9.0, "peak_host_gib": 2.0}),
            ("third", {"preference_loss": 0.5000000000000001}),
        )
    )
    assert same_metrics([first, second]) and not same_metrics([first, third])


def test_an_answer_is_right_if_it_contains_the_whole_word():
    assert right({"Tin?": "It is SN, of course.", "Far?": "nearly"}, RECORDS) == 1


def test_rows_compare_answers_before_and_after(tmp_path):
    answers = [{"Tin?": "It is Sn.", "Far?": "It is here."}, {"Tin?": "Sn.", "Far?": "Near."}]
    run = write_run(tmp_path / "run", answers)
    rows, facts = rows_and_facts(run, RECORDS, [3.0, 3.06], bitwise=True)
    assert {name: (row["found"], row["verdict"]) for name, row in rows.items()} == {
        "accuracy": ("0.950", "held"),
        "words": ("3.0 -> 1.0", "held"),
        "right": ("1 -> 2", "held"),
        "book": ("3.000 -> 3.060", "short"),
        "resumed": ("the same bits", "held"),
    }
    assert facts == ["Tin? 'It is Sn.' -> 'Sn.'"]
