"""The search proposes nothing that train.py refuses."""

import pytest

from planning.plan import Job
from planning.search import meshes
from trainer.config.checks import check


def test_meshes_leave_rows_for_every_part_of_a_batch():
    """Of eight rows in four parts, two are computed at a time, and so fsdp is at most 2."""
    job = Job.of("llama-3.1-8b", "v5e:2x4", 8192, batch=8).changed(train={"accumulation": 4})
    candidates = meshes(job)
    assert {(mesh.fsdp, mesh.tensor, mesh.sequence) for mesh in candidates} == {
        (2, 1, 4),
        (2, 2, 2),
        (2, 4, 1),
        (1, 8, 1),
    }
    for mesh in candidates:
        check(job.changed(mesh=mesh).run, "plan")


def test_a_batch_that_does_not_divide_into_its_parts_is_refused():
    job = Job.of("llama-3.1-8b", "v5e:2x4", 8192, batch=6).changed(train={"accumulation": 4})
    with pytest.raises(
        ValueError,
        match=r"^train\.batch_size: found 6; a multiple of train\.accumulation = 4 would work",
    ):
        meshes(job)
