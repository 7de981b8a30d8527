"""The search proposes nothing that train.py refuses."""

import re

import pytest

from planning.plan import Job, check_dcn
from planning.search import meshes, no_mesh
from trainer.config.checks import check


def test_fsdp_is_at_most_the_rows_of_an_accumulation_step():
    """Eight rows accumulated in four parts are computed two at a time, so fsdp is at most 2."""
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


@pytest.mark.parametrize(("layout", "meshes_of_fsdp"), [("striped", 1), ("zigzag", 0)])
def test_whole_rows_may_have_an_odd_length(layout, meshes_of_fsdp):
    """8,191 tokens cannot be split over devices, nor into zigzag's two pieces, but each of four
    devices may take a whole row."""
    job = Job.of("llama-3.1-8b", "h100:4", 8191, batch=4, attention={"layout": layout})
    candidates = [mesh for mesh in meshes(job) if mesh.fsdp == 4]
    assert len(candidates) == meshes_of_fsdp
    for mesh in candidates:
        check(job.changed(mesh=mesh).run, "plan")


def test_a_batch_not_divisible_by_accumulation_is_refused():
    job = Job.of("llama-3.1-8b", "v5e:2x4", 8192, batch=6).changed(train={"accumulation": 4})
    with pytest.raises(
        ValueError,
        match=r"^train\.batch_size: found 6; a multiple of train\.accumulation = 4 would work",
    ):
        meshes(job)


def test_rows_of_a_mixture_are_also_split_over_experts():
    """For 4 rows on 8 chips expert is 1, 2 or 4, dividing the model's experts; for a dense model
    always 1."""
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


def test_every_mesh_on_slices_has_factors_that_cross_them():
    job = Job.of("llama-3.1-8b", "2xv5e:4x4", 4096, batch=2)
    for mesh in (job.run.mesh, *meshes(job)):
        check_dcn(mesh, job.topology)
        assert mesh.dcn
    for topology in ("v5e:4x4", "h100:2x8"):
        assert not any(mesh.dcn for mesh in meshes(Job.of("llama-3.1-8b", topology, 4096)))


@pytest.mark.parametrize(("machine", "length"), [("h100:3", 10000), ("h100:6", 9999)])
def test_the_advised_length_and_the_advised_batch_have_a_mesh(machine, length):
    job = Job.of("llama-3.1-8b", machine, length)
    assert not meshes(job)
    longer, rows = map(
        int,
        re.search(
            r"a multiple of (\d+) would work, or a batch of (\d+) rows", no_mesh(job, "it")
        ).groups(),
    )
    assert rows == 3 and meshes(job.changed(train={"batch_size": rows}))
    assert meshes(job.changed(data={"context_length": longer}))
