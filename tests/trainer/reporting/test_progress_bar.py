"""The progress bar without a terminal: which steps get a line."""

import pytest

from tests.trainer.reporting.clock import Clock
from trainer.reporting.progress_bar import ProgressBar


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.01, [8, 18, 28, 38, 40]),  # 5% of the run: ten steps
        (7, [8, 13, 18, 23, 28, 33, 38, 40]),  # 30 seconds: five steps
        (300, [*range(8, 41)]),
    ],
)
def test_a_log_file_gets_the_first_step_and_then_one_line_per_interval(seconds, shown, capsys):
    """The run has 200 steps and resumes after step 7; the step numbered 200 follows step 39."""
    clock = Clock()
    bar = ProgressBar(200, 7, clock)
    for step in range(8, 41):
        clock.tick(seconds)
        bar.update({"step": step if step < 40 else 200}, None)
    bar.close()
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()]
    assert steps == [*shown[:-1], 200]
