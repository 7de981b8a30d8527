"""No command prints control sequences to a terminal, whatever is in data, names, paths and
flags."""

import importlib
import json
import random
import re

import pytest

from data.printable import printable
from tests.conftest import REPOSITORY
from tests.scripts.test_help import COMMANDS as REGISTRY
from tests.scripts.test_help import INNER

EVIL = "\x1b]0;title\x07\x1b[2J\u202e\x9b31m"
MODEL = ["--checkpoint", EVIL, "--output", "{out}"]
TEXTS = 14  # per command
# Command -> arguments, some of which are replaced by such texts.
COMMANDS = {
    "train": ["--config", EVIL],
    "eval.needle": [*MODEL, "--tokens", "9"],
    "eval.ruler": [*MODEL, "--tokens", "9"],
    "eval.coreference": [*MODEL, "--tokens", "9"],
    "eval.line_retrieval": [*MODEL, "--lines", "5"],
    "eval.in_context": [*MODEL],
    "eval.compare": [EVIL, EVIL],
    "eval.report": [EVIL],
    "scripts.chat": [EVIL],
    "scripts.inspect_data": [EVIL],
    "scripts.prepare": ["--config", EVIL],
    "scripts.loss_by_position": [EVIL],
    "scripts.inspect_trajectories": ["--task", "walker_walk", EVIL],
    "scripts.make_short_tasks": [EVIL, "--output", "{out}"],
    "scripts.import_hf": [EVIL, "{out}"],
    "scripts.export_hf": [EVIL, "{out}"],
    "scripts.quantize_hf": [EVIL, "{out}"],
    "scripts.push_to_hub": [EVIL, "me/model"],
    "scripts.plan": ["--config", EVIL],
    "scripts.collect_trajectories": ["--task", EVIL, "--output", "{out}"],
    "scripts.download_trajectories": ["--domain", EVIL, "--algorithm", EVIL, "--output", "{out}"],
    "scripts.launch_local": ["--processes", EVIL],
    "scripts.launch_tpu": ["run", EVIL, "--zone", EVIL],
    "scripts.restarts": [EVIL, "--checkpoint", EVIL],
    "eval.harness": [*MODEL, "--tasks", EVIL],
    "scripts.benchmarks.identity": [EVIL, "--unseen", EVIL],
    "scripts.benchmarks.bench_schedules.__main__": [EVIL],
    "trainer.xla_flags": ["gpu", "--plan", EVIL],
}
ALL = ["train", "trainer.xla_flags", *REGISTRY]
# Modules that only say which command to use when they are run; and how all others print.
NO_COMMAND = r'raise SystemExit\(\s*"'
FRAME = r"entry\.run\(|printable_output\(\)|^main = (runner\.)?command\("


def control_characters(text: str) -> set[str]:
    """Returns the characters of a command's output that a terminal would interpret."""
    return set(text) - set(printable(text)) - {"\r"}


def run_command(command: str, words, capsys) -> tuple[int, str]:
    """Runs a command in this process; returns its exit code and output."""
    try:
        code = importlib.import_module(command).main(list(words))
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def evil_text(rng: random.Random) -> str:
    """Returns words with control sequences between them."""
    parts = (
        *(EVIL, "\x1b[A", "\x1b]52;c;aGk=\x07", "\x08\x08", "\x9b2J", "\u2066"),
        *("a", "word ", "\x1bc", "\x1b[8m", "\r", "é"),
    )
    return "".join(rng.choices(parts, k=12))


def test_every_program_of_the_tree_prints_through_the_frame():
    """A new command belongs here as soon as it can be started; it gets evil names below."""
    programs = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): text
        for room in ("", "data", "model", "trainer", "planning", "eval", "scripts")
        for path in (REPOSITORY / room).glob("**/*.py" if room else "*.py")
        if 'if __name__ == "__main__":' in (text := path.read_text(encoding="utf-8"))
    }
    commands = {name for name, text in programs.items() if not re.search(NO_COMMAND, text)}
    unframed = {name for name in commands if not re.search(FRAME, programs[name], re.MULTILINE)}
    assert unframed == INNER
    assert commands - INNER == set(ALL)


@pytest.mark.parametrize("command", ALL)
def test_evil_names_and_flags(command, tmp_path, capsys, monkeypatch):
    """TEXTS per command: as its paths and names if it takes any, and as a flag."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(command)
    for _ in range(TEXTS):
        evil = evil_text(rng)
        words = [
            evil if word == EVIL else word.format(out=tmp_path / "out")
            for word in COMMANDS.get(command, ())
        ]
        for arguments in (words, [*words, f"--x{evil}"]) if words else ([f"--x{evil}"],):
            code, output = run_command(command, arguments, capsys)
            assert code not in (0, 1, None) and not control_characters(output), output
            assert re.search("error: ", output) and "Traceback" not in output, output


def test_at_least_a_thousand_texts_are_tried():
    assert TEXTS * sum(1 + (command in COMMANDS) for command in ALL) >= 1000
    assert set(COMMANDS) <= set(ALL)


def conversations(count: int, seed: int = 0) -> list[dict]:
    """Returns conversations whose fields' names, ids and texts are evil."""
    rng = random.Random(seed)
    return [
        {
            "id": evil_text(rng),
            evil_text(rng): evil_text(rng),
            "conversations": [
                {"from": "human", "value": evil_text(rng)},
                {"from": "gpt" if rng.random() < 0.8 else evil_text(rng), "value": evil_text(rng)},
            ],
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_evil_conversations(count, small_recipe, tmp_path, capsys):
    data = tmp_path / f"{EVIL}.json"
    data.write_text(json.dumps(conversations(count)))
    flags = ["--data.path", str(data), "--data.prepared", str(tmp_path / "prepared")]
    flags += ["--data.held_out_fraction", "0"]
    shown = [str(small_recipe), *flags, "--rows", str(count), "--tokens", "9999"]
    for command, words in (
        ("scripts.inspect_data", shown),
        ("scripts.prepare", ["--config", str(small_recipe), *flags]),
    ):
        code, output = run_command(command, words, capsys)
        assert code == 0 and not control_characters(output) and "documents" in output
        assert "\ufffd" in output or command == "scripts.prepare"
