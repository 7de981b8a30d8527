"""The attacks themselves: a few of every class, and that each detects failures."""

import pytest

from data.errors import UserError
from data.sources import read
from tests.soak import attacks, folders, records, saved
from tests.soak.attacks import Failed, Impossible, attack, error_line, merge, refusal
from trainer.checkpoint.store import CheckpointStore

QUICK = [name for name in attacks.CLASSES if name not in (*attacks.LONGER, "commands")]


@pytest.mark.parametrize("name", QUICK)
def test_a_few_cases_of_every_class_hold(name):
    result = attack(name, range(10**6, 10**6 + 12))
    assert result["fell"] == [] and result["held"] == result["tried"] == 12 == sum(
        result["outcomes"].values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", attacks.LONGER)
def test_one_case_of_every_longer_class_holds(name):
    try:
        result = attack(name, range(10**6, 10**6 + 1), longest=attacks.LONGER[name])
    except Impossible as error:
        pytest.skip(str(error))
    assert result["fell"] == [] and result["held"] == 1


def every_case_fails(name, count):
    """Whether the class finds the fault in all of its cases, and none ends by another error."""
    what = [case["what"] for case in attack(name, range(count))["fell"]]
    return len(what) == count and all(text.startswith("Failed: ") for text in what)


def test_a_lost_record_is_a_failure(monkeypatch):
    monkeypatch.setattr(records, "read", lambda *args, **order: list(read(*args, **order))[1:])
    assert every_case_fails("records", 3)


def test_an_uncounted_record_is_a_failure(monkeypatch):
    def uncounted(source, report, **order):
        yield from read(source, report, **order)
        report.sources[0].kept -= 1

    monkeypatch.setattr(records, "read", uncounted)
    assert every_case_fails("records", 3)


def test_vanished_fields_are_a_failure(monkeypatch):
    """As when a cleaner reported none of them."""
    assert attack("records", range(300))["fell"] == []
    monkeypatch.setattr("data.turns.unread_of", lambda *_: set())
    assert attack("records", range(300))["fell"] != []


def test_a_checkpoint_with_other_numbers_is_a_failure(monkeypatch):
    restore = CheckpointStore.restore

    def changed(store, step, *abstract):
        restored = restore(store, step, *abstract)
        return restored._replace(model={name: value + 1 for name, value in restored.model.items()})

    monkeypatch.setattr(CheckpointStore, "restore", changed)
    assert every_case_fails("checkpoints", 3)


def test_other_documents_are_a_failure(monkeypatch):
    calls = []
    monkeypatch.setattr(
        saved,
        "_bytes",
        lambda documents, number: calls.append(number) or len(calls).to_bytes(4, "big"),
    )
    assert every_case_fails("prepared", 2)


def test_an_error_that_names_nothing_is_a_failure(monkeypatch):
    def unnamed(path):
        raise UserError("something is wrong")

    monkeypatch.setattr(folders, "open_model", unnamed)
    monkeypatch.setattr(folders.cases, "read", unnamed)
    monkeypatch.setattr(folders, "read_episode", lambda path, task: unnamed(path))
    monkeypatch.setattr(folders, "read_config", unnamed)
    for name in ("models", "line_cases", "trajectories", "adapters"):
        assert every_case_fails(name, 2)


def test_a_traceback_and_a_hang_are_failures(monkeypatch):
    monkeypatch.setattr(folders.cases, "read", lambda path: {}[path])
    assert "KeyError" in attack("line_cases", range(1))["fell"][0]["what"]

    def hangs(path):
        while True:
            pass

    monkeypatch.setattr(folders.cases, "read", hangs)
    assert "took longer than 1 s" in attack("line_cases", range(1), longest=1)["fell"][0]["what"]


def test_a_message_of_several_lines_is_a_failure():
    with pytest.raises(Failed, match="names none"), refusal("a.json"):
        raise UserError("b.json: wrong")
    with refusal("a.json") as messages:
        raise ValueError("a.json: wrong")
    assert messages == ["a.json: wrong"]


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (0, "error: a.json: wrong\n"),
        (2, "wrong\n"),
        (2, "error: a\nerror: b\n"),
        (2, "error: a\nTraceback (most recent call last)\n"),
        (1, "error: a\n"),
        (75, "error: a\n"),
        (None, ""),
    ],
)
def test_a_command_that_ends_otherwise_is_a_failure(code, output):
    with pytest.raises(Failed, match=f"a case: ended with {code}"):
        error_line(code, output, "a case")
    assert error_line(75, "step 1\nerror: a\n", "a case", (75,)) == "error: a"
    assert not error_line(0, "step 1\n", "a case")


def test_parts_of_a_class_are_added(tmp_path, monkeypatch):
    monkeypatch.setattr(attacks, "FOLDER", tmp_path)
    result = {"tried": 5, "held": 5}
    for seeds in (range(5), range(5, 10), range(5)):
        path = merge("records", seeds, result)
    assert path.read_text().count('"tried": 5') == 2
