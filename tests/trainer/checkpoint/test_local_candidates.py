import pytest

from trainer.checkpoint.local_candidates import (
    Candidate,
    Expected,
    FoundPart,
    candidates,
    keeper_of,
    kept_for,
)

EXPECTED = Expected("run", "fsdp 3", ["a", "b", "c"])


def local_part(step, part, **changes):
    fields = {
        "run": "run",
        "location": "runs/x",
        "attempt": "first",
        "step": step,
        "part": part,
        "processes": 3,
        "mesh": "fsdp 3",
        "layout": "abc"[part],
    }
    return FoundPart(**fields | changes)


def complete_step(step, **changes):
    """Each host has its part, and a copy of the previous host's."""
    return [
        [local_part(step, i, **changes), local_part(step, (i - 1) % 3, **changes)] for i in range(3)
    ]


def test_the_newest_complete_step_comes_first():
    hosts = [
        older + newer for older, newer in zip(complete_step(8), complete_step(10), strict=True)
    ]
    whole, refused = candidates(hosts, EXPECTED, after=5)
    assert whole == [Candidate(step, "first", [[0, 1], [1, 2], [0, 2]]) for step in (10, 8)]
    assert refused == [] and candidates(hosts, EXPECTED, after=9)[0] == whole[:1]
    assert candidates(hosts, EXPECTED, after=10) == ([], [])


@pytest.mark.parametrize("lost", range(3))
def test_one_host_may_be_lost(lost):
    hosts = complete_step(10)
    hosts[lost] = []
    [candidate] = candidates(hosts, EXPECTED, after=0)[0]
    assert candidate.holders[lost] == [(lost + 1) % 3]


def test_hosts_may_be_renumbered_after_a_restart():
    hosts = complete_step(10)
    [candidate] = candidates([hosts[2], hosts[0], hosts[1]], EXPECTED, after=0)[0]
    assert candidate.holders == [[1, 2], [0, 2], [0, 1]]


def test_two_lost_neighbours_are_named():
    whole, [line] = candidates([[], [], complete_step(10)[2]], EXPECTED, after=0)
    assert whole == []
    assert (
        line == "the local checkpoint of step 10 is incomplete: no host has the part of process 0"
    )


def test_parts_of_two_starts_are_not_combined():
    hosts = [complete_step(10)[0], complete_step(10, attempt="second")[1], []]
    whole, refused = candidates(hosts, EXPECTED, after=0)
    assert whole == [] and len(refused) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"processes": 4}, "was saved by 4 processes, and 3 are here"),
        ({"mesh": "tensor 3"}, "was saved on another mesh (tensor 3; now fsdp 3)"),
        ({"layout": "z"}, "has other arrays, or divides them differently"),
    ],
)
def test_parts_that_do_not_match_the_run_are_named(changes, reason):
    line = f"the local checkpoint of step 10 {reason}; it is not used"
    assert candidates(complete_step(10, **changes), EXPECTED, after=0) == ([], [line])


def test_a_part_of_another_run_is_named():
    line = (
        "found a local checkpoint of another run (runs/x); if that run no longer needs it, delete "
        "it to free its space"
    )
    assert candidates(complete_step(10, run="other"), EXPECTED, after=0) == ([], [line])


@pytest.mark.parametrize(
    ("hosts", "keepers"),
    [
        (["a"], [None]),
        (["a", "b", "c"], [1, 2, 0]),
        (["a", "a", "b", "b"], [2, 3, 0, 1]),
        (["a", "b", "a", "b"], [1, 0, 3, 2]),
        (["a", "a", "b"], [2, 2, 0]),
        (["a", "a", "a"], [1, 2, 0]),  # simulated: one host
    ],
)
def test_the_copy_is_on_another_host(hosts, keepers):
    assert [keeper_of(part, hosts) for part in range(len(hosts))] == keepers
    for process in range(len(hosts)):
        assert list(kept_for(process, hosts)) == [
            part for part, keeper in enumerate(keepers) if keeper == process
        ]
