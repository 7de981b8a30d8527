"""The soak runner: its parts cover every slow test, and an interrupted part resumes with the
remaining tests."""

import pytest

from tests.soak import parts as soak
from tests.test_rooms import imported_modules, module_of, tracked


class Item:
    def __init__(self, nodeid):
        self.nodeid = nodeid


class Config:
    class hook:
        pytest_deselected = staticmethod(lambda items: None)


class Report:
    when, passed = "call", True

    def __init__(self, nodeid):
        self.nodeid = nodeid


def selected(plugin, count=10):
    items = [Item(f"test_{number}") for number in range(count)]
    plugin.pytest_collection_modifyitems(Config, items)
    return [item.nodeid for item in items]


def test_an_interrupted_part_resumes(tmp_path):
    first = soak.Resume(tmp_path / "part", "code")
    assert len(selected(first)) == 10
    for number in range(4):
        first.pytest_runtest_logreport(Report(f"test_{number}"))
    assert selected(soak.Resume(tmp_path / "part", "code")) == [
        f"test_{number}" for number in range(4, 10)
    ]
    assert len(selected(soak.Resume(tmp_path / "part", "changed code"))) == 10


def test_every_path_of_a_part_exists():
    for part in soak.PARTS.values():
        assert all((soak.ROOT / path).exists() for path in part.paths + part.ignored)


@pytest.mark.parametrize(
    "name", [name for name, part in soak.PARTS.items() if part.code != ("*.py",)]
)
def test_a_part_names_all_code_that_its_tests_import(name):
    part, modules = soak.PARTS[name], {module_of(path): path for path in tracked("*.py")}
    named = {path for pathspec in part.code for path in tracked(pathspec)}
    remaining = [
        path
        for path in named
        if any(path.is_relative_to(soak.ROOT / tests) for tests in part.paths)
    ]
    reached = set(remaining)
    while remaining:
        # `from model.attention import Keys` gives model.attention.Keys, which begins with the
        # module's name.
        parts = [name.split(".") for name in imported_modules(remaining.pop())]
        names = {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}
        new = {modules[name] for name in names & set(modules)} - reached
        reached |= new
        remaining += new
    assert len(reached) > 20
    assert reached <= named


def test_an_unknown_part_is_named(capsys):
    with pytest.raises(SystemExit):
        soak.main(["nothing"])
    assert "nothing is not a part; the parts are attention," in capsys.readouterr().err


@pytest.fixture
def too_large(tmp_path, monkeypatch):
    """Returns a function that makes a part of three slow tests, one of which fails, in processes
    that are too large after any test."""
    monkeypatch.setattr(soak, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(soak, "code_hash", lambda pathspecs: "code")
    monkeypatch.setattr(soak, "resident_bytes", lambda: soak.MOST_MEMORY + 1)
    monkeypatch.setitem(soak.PARTS, "part", soak.Part((str(tmp_path),)))

    def make(failing):
        (tmp_path / "test_slow.py").write_text(
            "import pytest\n\n@pytest.mark.slow\n@pytest.mark.parametrize('number', range(3))\n"
            f"def test(number):\n    assert number != {failing}\n"
        )
        return lambda: soak.run_part("part")

    return make


@pytest.mark.slow
def test_a_part_that_grows_too_large_continues_in_a_new_process(too_large, tmp_path):
    run = too_large(failing=2)
    assert [run() for _ in range(4)] == [soak.UNFINISHED, soak.UNFINISHED, 1, 1], (
        "one test per process, then the failing one"
    )
    assert len((tmp_path / "records" / "part.passed").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_failing_test_that_is_too_large_ends_the_part(too_large):
    assert too_large(failing=0)() == pytest.ExitCode.INTERRUPTED
