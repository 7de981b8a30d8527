"""Errors of results against their references: `within` checks them, and pytest's option --errors
FILE writes the largest."""

import json
import pathlib

# What was compared -> its largest error, the limit, and the number of comparisons.
SEEN: dict[str, dict[str, float]] = {}


def within(error: float, limit: float, what: str = "error", where: object = "") -> None:
    """Asserts that an error is at most its limit, and records it for --errors.

    Args:
      what: errors with the same name have one limit, and the largest of them is written.
      where: printed when the assertion fails.
    """
    seen = SEEN.setdefault(what, {"largest": 0.0, "limit": limit, "cases": 0})
    seen["largest"] = max(seen["largest"], float(error))
    seen["cases"] += 1
    assert error <= limit, f"{what} {where}: {error:.2e}, at most {limit:.0e}"


def pytest_addoption(parser):
    """Adds the flag."""
    parser.addoption(
        "--errors", metavar="FILE", help="write the largest errors, and how many tests passed"
    )


def pytest_sessionfinish(session):
    """Writes the file."""
    if file := session.config.getoption("--errors"):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        seen = {"passed": len(reporter.stats.get("passed", [])), "errors": SEEN}
        pathlib.Path(file).write_text(json.dumps(seen), encoding="utf-8")
