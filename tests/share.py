"""pytest's option --share K/N: the K-th of N shares of the tests, by a hash of their names; N runs
cover all tests. A test whose name contains a set is refused."""

import hashlib

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        metavar="K/N",
        help="run the K-th (from 0) of N shares of the tests, chosen by their names",
    )


def pytest_collection_modifyitems(config, items):
    """Deselects the tests of other shares.

    Raises:
      UsageError: the share is not one, or a test's name differs from process to process.
    """
    if unstable := [item.nodeid for item in items if contains_a_set(item)]:
        raise pytest.UsageError(
            f"sets print in another order in each process, so pytest-xdist fails: {unstable}"
        )
    if not (share := config.getoption("--share")):
        return
    number, _, of = share.partition("/")
    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise pytest.UsageError(
            f"--share: found {share}, needs K/N with K from 0 to N - 1, such as 3/30"
        )
    chosen = [item for item in items if share_of(item.nodeid, int(of)) == int(number)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def contains_a_set(item) -> bool:
    """Returns whether a test's name contains a set of several members."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(
        isinstance(value, set | frozenset) and len(value) > 1 and str(value) in item.name
        for value in parameters
    )


def share_of(name: str, shares: int) -> int:
    """Returns the share that a test of this name belongs to."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % shares
