"""The attacks themselves: a few of every class, and that each detects failures."""

import pytest

from data.errors import UserError
from data.report import Report
from data.sources import read
from tests.soak import attacks, folders, records, saved
from tests.soak.attacks import Failed, Impossible, attack, merge, refusal
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


def lose_the_first(source, report, *rest):
    records = read(source, report, *rest)
    next(records)
    return records


def test_a_lost_record_is_a_failure(monkeypatch):
    monkeypatch.setattr(records, "read", lose_the_first)
    assert attack("records", range(3))["held"] == 0


def test_an_uncounted_record_is_a_failure(monkeypatch):
    monkeypatch.setattr(records, "read", lambda source, report: list(read(source, Report())))
    assert attack("records", range(3))["held"] == 0


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
    assert attack("checkpoints", range(3))["held"] == 0


def test_other_documents_are_a_failure(monkeypatch):
    calls = []
    monkeypatch.setattr(
        saved,
        "_bytes",
        lambda documents, number: calls.append(number) or len(calls).to_bytes(4, "big"),
    )
    assert attack("prepared", range(2))["held"] == 0


def test_an_error_that_names_nothing_is_a_failure(monkeypatch):
    def unnamed(path):
        raise UserError("something is wrong")

    monkeypatch.setattr(folders, "open_model", unnamed)
    monkeypatch.setattr(folders.cases, "read", unnamed)
    monkeypatch.setattr(folders, "read_episode", lambda path, task: unnamed(path))
    monkeypatch.setattr(folders, "read_config", unnamed)
    for name in ("models", "line_cases", "trajectories", "adapters"):
        assert attack(name, range(2))["held"] == 0


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


def test_parts_of_a_class_are_added(tmp_path, monkeypatch):
    monkeypatch.setattr(attacks, "FOLDER", tmp_path)
    result = {"tried": 5, "held": 5}
    for seeds in (range(5), range(5, 10), range(5)):
        path = merge("records", seeds, result)
    assert path.read_text().count('"tried": 5') == 2
