"""The first line of an error's message, as our own errors quote it."""

import pytest

from data.errors import first_line


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n one"), "one"),
        (ValueError("what:\n  Why: x\nmore"), "what: Why: x"),
        (ValueError("what:"), "what:"),
        (ValueError(), "ValueError"),
        (ValueError(" \n"), "ValueError"),
        (FileNotFoundError(2, "No such file", "a.npy"), "No such file"),
        (OSError("a store's"), "a store's"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_the_first_line_is_never_empty(error, expected):
    assert first_line(error) == expected
