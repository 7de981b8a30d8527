"""What may be said of a schedule: checked when the model is made, in one line with the field, what was found, what would do."""
import re

import pytest

from model.attention.schedules import SCHEDULES, Attention2D, Local, Ulysses, get_schedule

from .build import llama, mesh_of, tiny

USP = {"name": "ulysses", "degree": 2}
REFUSED = [  # schedule, ranks, what is said
    ("local", 2, "schedule: 'local' serves 1 rank, found 2, and would leave out the others' keys; 'ring' and 'all_gather' "),
    (USP | {"inner": "local"}, 4, "schedule: 'local' serves 1 rank, found 2"),
    (Ulysses(2, inner=Ulysses(2, inner=Local())), 8, "schedule: 'local' serves 1 rank, found 2"),
    (USP | {"degree": 3}, 2, "ulysses.degree: 3 does not divide 2 sequence shards; those do: [1, 2]"),
    (USP | {"inner": Attention2D(columns=3)}, 4, "attention2d.columns: 3 does not divide 2 sequence shards; those do: [1, 2]"),
    ({"name": "attention2d", "columns": 3}, 8, "attention2d.columns: 3 does not divide 8 sequence shards; those do: [1, 2,"),
]
SERVED = [("local", 1), (USP | {"inner": "local"}, 2), (USP | {"degree": 4, "inner": {"name": "attention2d", "columns": 2}}, 8),
          ({"name": "attention2d", "columns": 0, "overlap": True}, 8), ({"name": "ring", "bidirectional": False}, 2)]


@pytest.mark.parametrize(("schedule", "ranks", "words"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_before_anything_is_traced(schedule, ranks, words):
    for make in (lambda: get_schedule(schedule, ranks), lambda: llama(tiny(), {"sequence": ranks}, schedule=schedule)):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            make()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("schedule", "ranks"), SERVED, ids=str)
def test_what_can_be_is_served(schedule, ranks):
    assert isinstance(get_schedule(schedule, ranks), Local if ranks == 1 else SCHEDULES[schedule["name"]])
    assert llama(tiny(), {"sequence": ranks}, schedule=schedule).mesh == mesh_of({"sequence": ranks})
