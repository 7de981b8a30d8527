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


def test_rows_of_a_mixture_go_to_experts_too():
    """Of 4 rows on 8 chips expert is 1, 2 or 4, as it divides the model's experts; never of a dense
    model."""
    mixture, dense = (
        Job.of(model, "v5e:2x4", 8192, batch=4) for model in ("mixtral-8x7b", "llama-3.1-8b")
    )
    one_tensor = {
        (mesh.fsdp, mesh.expert, mesh.sequence) for mesh in meshes(mixture) if mesh.tensor == 1
    }
    assert one_tensor == {(4, 1, 2), (2, 2, 2), (1, 4, 2)}
    for mesh in meshes(mixture):
        job = mixture.changed(mesh=mesh)
        check(job.run, "plan")
        assert job.time_range().high > job.time_range().low > 0
    assert all(mesh.expert == 1 for mesh in meshes(dense))
