"""Options of schedules: validated when the model is created, in one line with the field, its value
and a valid one."""

import dataclasses
import re

import pytest

from model.attention.schedules import SCHEDULES, Attention2D, Local, Ring, Ulysses, get_schedule

from .build import llama, mesh_of, tiny

USP = {"name": "ulysses", "degree": 2}
REFUSED = [  # schedule, ranks, message
    (
        "local",
        2,
        "schedule: 'local' serves 1 rank, found 2; it would ignore the others' keys; 'ring' "
        "and 'all_gather' ",
    ),
    (USP | {"inner": "local"}, 4, "schedule: 'local' serves 1 rank, found 2"),
    (Ulysses(2, inner=Ulysses(2, inner=Local())), 8, "schedule: 'local' serves 1 rank, found 2"),
    (
        USP | {"degree": 3},
        2,
        "ulysses.degree: 3 does not divide 2 sequence shards; those do: [1, 2]",
    ),
    (
        USP | {"inner": Attention2D(columns=3)},
        4,
        "attention2d.columns: 3 does not divide 2 sequence shards; those do: [1, 2]",
    ),
    (
        {"name": "attention2d", "columns": 3},
        8,
        "attention2d.columns: 3 does not divide 8 sequence shards; those do: [1, 2,",
    ),
    ({"name": ["ring"]}, 2, "schedule: found ['ring']; known: local, ring, all_gather"),
    ({}, 2, "schedule: found None; known: local, ring, all_gather"),
    (7, 2, "schedule: found 7; known: local, ring, all_gather"),
    (USP | {"inner": None}, 4, "schedule.inner: found None; known: local, ring, all_gather"),
    (
        USP | {"inner": {"name": "ring", "both": True}},
        4,
        "schedule.inner.both: ring has no such option; it has: bidirectional",
    ),
]
SERVED = [
    ("local", 1),
    (USP | {"inner": "local"}, 2),
    (USP | {"degree": 4, "inner": {"name": "attention2d", "columns": 2}}, 8),
    ({"name": "attention2d", "columns": 0, "overlap": True}, 8),
    ({"name": "ring", "bidirectional": False}, 2),
]


def wrong_values():
    """Yields every option of every schedule with values of wrong types."""
    wrong = {
        "bool": ["no", 1, None],
        "int": ["two", -1, -2, 2.0, True, None],
        "Schedule": [None, 3, True, ["ring"], "rings"],
    }
    for name, schedule in SCHEDULES.items():
        for option in dataclasses.fields(schedule):
            for value in wrong[option.type]:
                if option.name != "ordered":
                    yield (
                        {"name": name, option.name: value},
                        2,
                        rf"{option.name}: found {value!r}; ",
                    )


@pytest.mark.parametrize(("schedule", "ranks", "message"), [*REFUSED, *wrong_values()], ids=str)
def test_an_invalid_schedule_is_refused(schedule, ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        get_schedule(schedule, ranks)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("schedule", "ranks", "message"), REFUSED, ids=str)
def test_a_model_refuses_an_invalid_schedule_before_tracing(schedule, ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        llama(tiny(), {"sequence": ranks}, schedule=schedule)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [{"degree": "two"}, {"degree": -1}, {"degree": True}, {"inner": "ring"}, {"inner": None}],
)
def test_a_schedule_constructed_in_python_is_validated(values):
    with pytest.raises(ValueError, match=rf"ulysses\.{next(iter(values))}: found .*; needs "):
        Ulysses(**values)


@pytest.mark.parametrize(("schedule", "ranks"), SERVED, ids=str)
def test_valid_schedules_are_accepted(schedule, ranks):
    assert isinstance(
        get_schedule(schedule, ranks), Local if ranks == 1 else SCHEDULES[schedule["name"]]
    )
    assert llama(tiny(), {"sequence": ranks}, schedule=schedule).mesh == mesh_of(
        {"sequence": ranks}
    )


def test_a_schedule_is_the_same_by_name_by_mapping_and_in_python():
    both = {"name": "ring", "bidirectional": True}
    assert get_schedule(USP | {"inner": both}, 4) == get_schedule(Ulysses(2, Ring(True)), 4)
    assert get_schedule("ulysses", 4) == get_schedule({"name": "ulysses"}, 4) == Ulysses()
