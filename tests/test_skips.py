"""With --skips, a skipped test fails unless the list names it; every line of the list has a
reason."""

import pytest

from tests.conftest import REPOSITORY
from tests.skips import unlisted_skips

pytest_plugins = ["pytester"]


def test_an_unlisted_skip_fails(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makepyfile(
        test_listed="import pytest\npytest.importorskip('no_such_module', reason='not here')",
        test_other="import pytest\n\n\n"
        "@pytest.mark.skip(reason='too hard')\ndef test_it():\n    pass\n\n\ndef test_good():\n    pass",
    )
    (pytester.path / "some.txt").write_text(
        "# a comment\ntest_listed.py  has another environment\n"
    )
    (pytester.path / "all.txt").write_text(
        "test_listed.py  has another environment\ntest_other.py::test_it  is hard\n"
    )
    for flags, code in ((["--skips", "some.txt"], 1), (["--skips", "all.txt"], 0), ([], 0)):
        result = pytester.runpytest_inprocess("-p", "tests.skips", *flags)
        assert result.ret == code
        lines = [line for line in result.outlines if "and not in" in line]
        assert lines == (
            ["skipped, and not in some.txt: test_other.py::test_it: Skipped: too hard"]
            if code
            else []
        )


def test_every_listed_test_has_a_reason_and_a_file():
    lines = (REPOSITORY / "tests/skips.txt").read_text(encoding="utf-8").splitlines()
    assert unlisted_skips([], lines) == []
    for line in lines[1:]:
        assert (REPOSITORY / line.partition("  ")[0].partition("::")[0]).is_file()
    with pytest.raises(ValueError, match="without a reason: test_x"):
        unlisted_skips([], ["test_x.py"])
