"""Shares of the slow tests: together they cover all tests, are disjoint, and have similar sizes."""

from collections import Counter

from tests.conftest import REPOSITORY
from tests.share import share_of

pytest_plugins = ["pytester"]

NAMES = [
    f"tests/model/test_{module}.py::test_{number}[{kind}]"
    for module in "abc"
    for number in range(200)
    for kind in "xyz"
]


def test_shares_have_similar_sizes_and_are_stable():
    sizes = Counter(share_of(name, 30) for name in NAMES)
    assert sorted(sizes) == list(range(30)) and sum(sizes.values()) == len(NAMES) == 1800
    assert min(sizes.values()) > 30 and max(sizes.values()) < 100
    assert share_of("tests/test_share.py::a", 30) == 20, "the hash must not depend on the process"


def test_names_that_differ_between_processes_are_refused(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makepyfile(
        "import pytest\n\n"
        "@pytest.mark.parametrize('fields', [{'a', 'b'}, {'a'}], ids=str)\n"
        "def test_fields(fields):\n    pass\n"
    )
    done = pytester.runpytest_subprocess("-p", "tests.share")
    assert done.ret != 0
    done.stderr.fnmatch_lines(["*sets print in another order*"])
    assert done.stderr.str().count("::test_fields[") == 1
