"""The soak runner: its parts hold every slow test once, and an interrupted part goes on with the tests that remain."""

import itertools

import pytest

from tests.soak import parts as soak


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


def test_shares_hold_every_test_once(tmp_path):
    shares = [selected(soak.Resume(tmp_path / f"{share}", f"{share}/3", "code")) for share in (1, 2, 3)]
    assert sorted(itertools.chain(*shares)) == sorted(f"test_{number}" for number in range(10))


def test_an_interrupted_part_goes_on(tmp_path):
    first = soak.Resume(tmp_path / "part", "1/1", "code")
    assert len(selected(first)) == 10
    for number in range(4):
        first.pytest_runtest_logreport(Report(f"test_{number}"))
    assert selected(soak.Resume(tmp_path / "part", "1/1", "code")) == [f"test_{number}" for number in range(4, 10)]
    assert len(selected(soak.Resume(tmp_path / "part", "1/1", "changed code"))) == 10


def test_every_path_of_a_part_exists():
    for paths, _, ignored in soak.PARTS.values():
        assert all((soak.ROOT / path).exists() for path in paths + ignored)


def test_an_unknown_part_is_named(capsys):
    with pytest.raises(SystemExit):
        soak.main(["nothing"])
    assert "nothing is not a part; the parts are attention-1" in capsys.readouterr().err
