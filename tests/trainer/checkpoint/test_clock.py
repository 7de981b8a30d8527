"""Tests of trainer/checkpoint/clock.py: all processes save after the same steps, by the clock of
process 0."""

import pytest

from trainer.checkpoint.clock import SaveClock
from trainer.run import cluster


class Service:
    """The part of JAX's key-value store that the clock uses."""

    def __init__(self):
        self.values = {}
        self.calls = 0

    def key_value_set(self, key, value):
        self.values[key] = value
        self.calls += 1

    def key_value_dir_get(self, folder):
        assert folder.endswith("/"), "step 1's folder would be a prefix of step 10's"
        self.calls += 1
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


@pytest.fixture
def as_process(monkeypatch):
    """Makes the following code run as one of several processes."""
    service = Service()
    monkeypatch.setattr(cluster, "client", lambda: service)

    def become(number, count=3):
        monkeypatch.setattr(cluster, "process", lambda: number)
        monkeypatch.setattr(cluster, "processes", lambda: count)

    become.service = service
    return become


def test_one_process_saves_the_step_that_ends_after_the_interval(as_process):
    as_process(0, 1)
    seconds = 0.0
    clock = SaveClock(2, lambda: seconds)
    saved = []
    for step in range(1, 11):
        seconds += 50
        if clock.due(step):
            saved.append(step)
            clock.saved()
    assert saved == [3, 6, 9]
    assert as_process.service.calls == 0


def test_all_processes_save_the_same_steps_whatever_their_clocks(as_process):
    """The other clocks stand still or run ahead; process 0 may be one step ahead of a process that
    has not looked yet."""
    seconds = 0.0
    clocks = [
        SaveClock(2, lambda: seconds),
        SaveClock(2, lambda: 0.0),
        SaveClock(2, lambda: seconds**9),
    ]
    for clock in clocks:
        clock._folder = clocks[0]._folder  # each process counts its own clocks
    saved = [[], [], []]
    for step in range(1, 13):
        seconds += 50
        for number in (0, 1, 2):
            as_process(number)
            # Process 0 has announced the next step and saved before the others look for this one.
            if clocks[number].due(step):
                saved[number].append(step)
                clocks[number].saved()
    assert saved[0] == saved[1] == saved[2] == [4, 8, 12]


def test_without_an_interval_no_process_is_asked(as_process):
    as_process(1)
    assert not any(SaveClock(0).due(step) for step in range(1, 5))
    assert as_process.service.calls == 0
