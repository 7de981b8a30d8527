"""A run whose mesh the planner chooses resumes on more or fewer devices."""

import pytest

from tests import small_run

AUTO = ("--mesh", "auto", "--memory", "auto")
CHECKPOINTS = (7, 21, 28)  # after which the first three starts are killed


@pytest.mark.slow
def test_a_run_restarted_on_8_4_2_and_8_devices_equals_the_run_on_8(
    small_recipe, repository, whole_run, tmp_path
):
    run = tmp_path / "run"

    def start(devices, *flags):
        return small_run.start(
            repository, small_recipe, run, *AUTO, "--mesh.simulate", str(devices), *flags
        )

    # On 2 devices also with accumulation, as when memory is short.
    starts = ((8, ()), (4, ()), (2, ("--train.accumulation", "2")))
    for (devices, flags), step in zip(starts, CHECKPOINTS, strict=True):
        manifest = run / "checkpoints" / str(step) / "manifest.json"
        assert small_run.kill_when(start(devices, *flags), run, manifest.exists), "killed too late"
    output = small_run.finish(start(8), run)
    for planned in (
        "8 x CPU: mesh fsdp 4 x sequence 2",
        "4 x CPU: mesh fsdp 4",
        "2 x CPU: mesh fsdp 2",
    ):
        assert f"planned for {planned}" in output
    assert "batches in 2 parts" in output and output.count("continuing from step") == 3
    rows, undisturbed = (small_run.rows(path / "metrics.jsonl") for path in (run, whole_run))
    # The same rows of data in the same order: each step has seen as many tokens, and has the same
    # loss.
    for name in ("step", "tokens_seen"):
        assert [row[name] for row in rows] == [row[name] for row in undisturbed]
    assert [row["loss_nats_per_target"] for row in rows] == pytest.approx(
        [row["loss_nats_per_target"] for row in undisturbed], rel=1e-5
    )
