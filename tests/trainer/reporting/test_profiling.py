"""Which steps are profiled; profiles themselves are in test_boards."""

import pytest

from trainer.reporting.profiling import session_of, warn_if_passed
from trainer.run.directory import RunDirectory


@pytest.mark.parametrize(
    ("step", "kept", "named"), [(9, False, True), (9, True, False), (8, False, False)]
)
def test_steps_to_profile_that_have_passed_are_named(tmp_path, capsys, step, kept, named):
    """Unless an earlier start has profiled them."""
    run = RunDirectory(tmp_path)
    if kept:
        run.keep_profile(f"{session_of((7, 9))}/host.xplane.pb", b"")
    warn_if_passed((7, 9), step, run)
    found = "warning: logging.profile_steps: found [7, 9], but the run continues from step 9"
    assert (found in capsys.readouterr().err) == named
