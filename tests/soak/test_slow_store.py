"""A run on a slow store: a save that waits for the previous one reports it, and no step waits for a
file."""

import pytest

import train
from tests import small_run
from tests.soak.slow_store import slow_store


@pytest.mark.slow
def test_a_save_that_waits_is_reported(small_recipe, tmp_path, capfd):
    run = tmp_path / "run"
    flags = ("--train.steps", 6, "--train.evaluate_every", 0, "--checkpoint.every", 2)
    with slow_store(run / "checkpoints", 0.2) as waits:
        assert train.main(small_run.command(small_recipe, run, *flags)) == 0
    output = [
        line
        for line in capfd.readouterr().err.splitlines()
        if "for the previous checkpoint" in line
    ]
    assert [line.split(": waited")[0] for line in output] == ["step 4", "step 6"]
    assert waits.others() and not waits.main()
