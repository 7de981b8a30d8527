"""No command overwrites or deletes a file that it did not write: the user's file stays as it is,
and one line names it."""

import importlib
import json
import os
import re
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from data.errors import UserError
from eval.journal import Journal
from tests.conftest import REPOSITORY

MODEL = "--checkpoint none --output {out}"
EVALUATION = ("results.json", "cases.jsonl")
# Command -> its arguments, and the files that it writes into the folder {out}.
WRITERS = {
    "eval.needle": (f"{MODEL} --tokens 9", (*EVALUATION, "needle.png")),
    "eval.ruler": (f"{MODEL} --tokens 9", (*EVALUATION, "ruler.png")),
    "eval.coreference": (f"{MODEL} --tokens 9", (*EVALUATION, "coreference.png")),
    "eval.line_retrieval": (
        f"{MODEL} --lines 5",
        (*EVALUATION, "line_retrieval.png", "line_depth.png"),
    ),
    "eval.in_context": (MODEL, ("results.json", "in_context.png", "episode.gif")),
    "eval.harness": (f"{MODEL} --tasks arc_easy", ("results.json", "lm_eval.json")),
    "eval.compare": ("a b --output {out}/table.json", ("table.json",)),
    "eval.report": ("{run} --output {out}/report.html", ("report.html",)),
    "scripts.loss_by_position": (
        "--checkpoint none --config none --output {out}",
        ("loss_by_position.json", "loss_by_position.png"),
    ),
    "scripts.draw_schedule": (
        "--schedules ring ulysses --output {out}",
        ("ring_4.png", "ulysses_4.png"),
    ),
    "scripts.inspect_trajectories": (
        "none --task walker_walk --plot {out}/a.png --coverage {out}/c.png --json {out}/a.json",
        ("a.png", "c.png", "a.json"),
    ),
    "scripts.make_preferences": ("{out}", ("train.jsonl", "held_out.jsonl")),
    "scripts.make_short_tasks": (
        "README.md --output {out}",
        ("book_next_sentence.json", "book_next_sentence.yaml", "book_last_word.yaml"),
    ),
    "scripts.plan": (
        "--model llama-7b --machine v4-8 --context 64K --output {out}/plan.json --write {out}/recipe.yaml",
        ("plan.json", "recipe.yaml"),
    ),
    "scripts.compare_schedules": (),  # of scripts.plan --compare
    "scripts.import_hf": ("none {out}", ("any",)),
    "scripts.export_hf": ("none {out}", ("any",)),
    "scripts.quantize_hf": ("none {out}", ("any",)),
    "scripts.make_smollm2": ("{out}", ("any",)),
    "scripts.make_gemma3": ("{out}", ("any",)),
    "scripts.make_fixtures": ("{out}", ("any",)),
    "scripts.restarts": ("{out}/a.starts", ("a.starts",)),
    "scripts.benchmarks.bench_schedules.__main__": ("bytes --output {out}/a.json", ("a.json",)),
    "scripts.benchmarks.identity": ("none --output {out}/a.json", ("a.json",)),
    "scripts.benchmarks.shared_prompts": ("--output {out}/a.json", ("a.json",)),
    "scripts.benchmarks.table3.__main__": (
        "--show --output {out}/a.json --compilations {out}/b.json",
        ("a.json", "b.json"),
    ),
    "scripts.benchmarks.bench_kernels.__main__": (
        "--output {out}",
        ("bench_kernels.json", "bench_kernels.txt"),
    ),
    "scripts.benchmarks.bench_qlora": ("--output {out}", ("qlora.jsonl",)),
    "scripts.benchmarks.gpu_results": (
        "--book a --other-book b --cases c --output {out}",
        ("steps.jsonl",),
    ),
    "scripts.benchmarks.bench_step": ("--output {out}", ("step.json",)),
    "scripts.profile_step": ("--output {out}", ("profile.json", "profile.png")),
    "scripts.benchmarks.bench_data": ("--output {out}", ("bench_data.json", "dropped.jsonl")),
    "scripts.benchmarks.bench_engines": ("--output {out}", ("engines.json",)),
    "scripts.benchmarks.kernel_parts": ("--output {out}", ("kernel_parts.json",)),
    "scripts.benchmarks.kernel_exactness": ("--output {out}", ("kernel_exactness.json",)),
    "scripts.benchmarks.gpu_call": ("--output {out}", ("rows.jsonl",)),
    "scripts.benchmarks.measured_steps": ("--output {out}", ("measured_steps.json",)),
    "scripts.benchmarks.papers.__main__": ("--output {out}", ("papers.json",)),
    "scripts.benchmarks.kernel_registers": ("--into {out}", ("any",)),
    "scripts.benchmarks.adapter_contexts": ("--output {out}", ("compilations.json",)),
}
# Commands that pass their folder to another command here or to train.py, and write nothing else
# there.
PASS_ON = {
    "eval.runner",  # the options that evaluations share
    "scripts.quickstart",
    "scripts.push_to_hub",  # writes only to the hub
    "scripts.launch_tpu",  # this and those below write into a separate temporary folder
    "scripts.benchmarks.kernel_cycles",
    "scripts.benchmarks.bench_kernels.case",  # resets this process's memory statistics
    "scripts.benchmarks.page",  # the repository's own BENCHMARKS.md
    "scripts.plan_options",
    "scripts.benchmarks.commands",
    "scripts.benchmarks.curriculum",
    "scripts.benchmarks.extension",
    "scripts.benchmarks.in_context",
    "scripts.benchmarks.exploration.__main__",
    "scripts.benchmarks.checkpoint_stores",  # a checkpoint in a separate folder, removed afterwards
    "scripts.benchmarks.preference",
    "scripts.benchmarks.evidence",
    "scripts.benchmarks.retrieval",
    "scripts.benchmarks.__main__",
    "scripts.collect_trajectories",  # continues only a folder with the same options
    "scripts.download_trajectories",  # archives unpack into folders that do not exist yet
}


def users_file(path):
    """Writes a file that a user may have under this name: a photograph, or settings."""
    if path.suffix in (".png", ".gif"):
        Figure().savefig(path.with_suffix(".png"))
        path.with_suffix(".png").rename(path)
    else:
        path.write_text(json.dumps({"mine": [1, 2, 3]}) + "\n")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command, writer in WRITERS.items() if writer for name in writer[1]],
)
def test_a_file_of_the_user_stays(command, name, tmp_path, capsys):
    out, run = tmp_path / "out", tmp_path / "run"
    out.mkdir()
    run.mkdir()
    (run / "config.yaml").write_text("model: {}\n")
    if command == "eval.harness":
        pytest.importorskip("lm_eval")
    before = users_file(out / name)
    words = WRITERS[command][0].format(out=out, run=run).split()
    try:
        code = importlib.import_module(command).main(words)
    except SystemExit as left:
        code = left.code
    stderr = capsys.readouterr().err
    assert code == 2 and len(stderr.splitlines()) == 1, stderr
    assert f"{name}: exists, but was not written by this command" in stderr or (
        name == "any" and "exists and is not an empty folder" in stderr
    )
    assert (out / name).read_bytes() == before
    assert sorted(os.listdir(out)) == [name]


EVALUATIONS = {
    "eval.needle": '{"evaluation": "needle", "about": {}}',
    "eval.ruler": '{"evaluation": "ruler", "about": {}}',
    "eval.coreference": '{"evaluation": "coreference", "about": {}}',
    "eval.line_retrieval": '{"about": {}, "within_trained_length": []}',
    "eval.harness": '{"evaluation": "lm-eval", "about": {}}',
    "eval.in_context": '{"about": {}, "returns": []}',
}


@pytest.mark.parametrize("other", EVALUATIONS)
@pytest.mark.parametrize("command", EVALUATIONS)
def test_another_evaluations_results_stay(command, other, tmp_path, monkeypatch, capsys):
    """The cases and pictures beside them would be of two evaluations."""
    if command == "eval.harness":
        pytest.importorskip("lm_eval")
        known = SimpleNamespace(all_tasks=["arc_easy"])  # to list all takes half a minute
        monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: known)
    (tmp_path / "results.json").write_text(EVALUATIONS[other])
    words = WRITERS[command][0].format(out=tmp_path).split()
    assert importlib.import_module(command).main(words) != 0
    refused = "results.json: exists, but was not written" in capsys.readouterr().err
    assert refused == (command != other)
    assert (tmp_path / "results.json").read_text() == EVALUATIONS[other]


@pytest.mark.parametrize(
    "content", [b"mine\n", b"mine", b"{}\n", b"[1]\n", b'{"model": "m"}\n{"mine": 1}\n', b"\xff\n"]
)
def test_a_users_file_is_not_truncated_as_a_journal(content, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"answers\.jsonl: "):
        Journal(path, {"model": "m"})
    assert path.read_bytes() == content


def test_a_journal_whose_first_line_is_truncated_starts_over(tmp_path):
    path = tmp_path / "answers.jsonl"
    for content in (b"", b'{"mod'):
        path.write_bytes(content)
        Journal(path, {"model": "m"}).close()
        assert path.read_bytes() == b'{"model": "m"}\n'


def test_every_command_that_writes_is_listed():
    """By the calls through which its module writes or removes, or the options that name an
    output."""
    writes = re.compile(
        r"\b(output_files?|output_folder|results_folder|new_folder|building|replace_file|savefig|"
        r"write_(text|bytes|json|hf)|save_(file|checkpoint)|rmtree|unlink)\(|open\([^)]*\"[wax]|"
        r"^ +(output|plot|json|write|folder|hf_dir)\b[^=\n]*= option\(|"
        r'"--(output|plot|json|write)"',
        re.MULTILINE,
    )
    writers = set()
    for path in [*REPOSITORY.glob("eval/*.py"), *REPOSITORY.glob("scripts/**/*.py")]:
        text = path.read_text()
        if 'if __name__ == "__main__":' in text and writes.search(text):
            writers.add(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    assert writers - WRITERS.keys() - PASS_ON == set()
    assert {"eval.report", "scripts.plan", "scripts.export_hf"} <= writers
