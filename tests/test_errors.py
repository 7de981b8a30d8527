"""Errors above their limit fail a test, and --errors writes the largest, its limit and their
number."""

import json

from tests.conftest import REPOSITORY

pytest_plugins = ["pytester"]


def test_the_largest_error_is_written(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makepyfile(
        "from tests.errors import within\n\n"
        "def test_small():\n    within(1e-7, 1e-5, 'loss')\n    within(3e-6, 1e-5, 'loss')\n\n"
        "def test_large():\n    within(2e-4, 1e-4, 'gradients', 'of a')\n\n"
        "def test_no_number():\n    within(float('nan'), 1e-4, 'gradients')\n"
    )
    done = pytester.runpytest_subprocess("-p", "tests.errors", "--errors", "errors.json")
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(["*gradients of a: 2.00e-04, at most 1e-04*"])
    written = json.loads((pytester.path / "errors.json").read_text(encoding="utf-8"))
    assert written["passed"] == 1
    assert written["errors"]["loss"] == {"largest": 3e-6, "limit": 1e-5, "cases": 2}
    assert written["errors"]["gradients"]["largest"] == 2e-4
