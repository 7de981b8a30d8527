"""A pytest plugin: --skips FILE fails the session if a test is skipped that the file
(tests/skips.txt) does not name."""

import pathlib

import pytest

UNLISTED = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    """Adds the flag."""
    parser.addoption(
        "--skips", metavar="FILE", help="fail if a test is skipped that this list does not name"
    )


def unlisted_skips(reports, lines) -> list[str]:
    """Returns the skipped tests of these reports that no line of the list names, each with its
    reason for skipping.

    Args:
      lines: the beginning of a pytest id (a file or a test), then at least two spaces and why it
        may be skipped.

    Raises:
      ValueError: a line has no reason.
    """
    listed = [line.partition("  ") for line in lines if line.strip() and not line.startswith("#")]
    if unexplained := [test for test, _, why in listed if not why.strip()]:
        raise ValueError(f"skips without a reason: {', '.join(unexplained)}")
    return sorted(
        {
            f"{report.nodeid}: {report.longrepr[2]}"
            for report in reports
            if not any(report.nodeid.startswith(test) for test, _, _ in listed)
        }
    )


def pytest_sessionfinish(session):
    """Fails the session in the process that prints the summary."""
    file = session.config.getoption("--skips")
    if not file or hasattr(session.config, "workeroutput"):
        return
    reports = session.config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped", [])
    unlisted = unlisted_skips(reports, pathlib.Path(file).read_text(encoding="utf-8").splitlines())
    session.config.stash[UNLISTED] = unlisted
    if unlisted:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Names the tests that were skipped without permission."""
    for skipped in config.stash.get(UNLISTED, []):
        terminalreporter.write_line(
            f"skipped, and not in {config.getoption('--skips')}: {skipped}", red=True
        )
