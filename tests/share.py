"""pytest's option --share K/N: the K-th of N shares of the tests, by a hash of their names; N runs
cover all tests."""

import hashlib

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        metavar="K/N",
        help="run the K-th (from 0) of N shares of the tests, chosen by their names",
    )


def pytest_collection_modifyitems(config, items):
    """Deselects the tests of other shares."""
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


def share_of(name: str, shares: int) -> int:
    """Returns the share that a test of this name belongs to."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % shares
