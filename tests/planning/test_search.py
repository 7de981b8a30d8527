"""The search proposes nothing that train.py refuses, and both commands propose the same."""

import dataclasses
import re

import pytest
import yaml

from data.errors import UserError
from model.config import TransformerConfig
from model.families import FAMILIES
from planning.auto import Machine, machine_named, plan_on
from planning.machines import topology_of
from planning.memory_estimate import estimate_memory
from planning.plan import Job, check_dcn
from planning.search import (
    allowed_policies,
    best_every_k,
    best_job,
    candidates,
    choices,
    every_choice,
    meshes,
    no_candidate,
    no_mesh,
    policies,
    refusal,
    search,
)
from scripts import plan
from trainer.build import build_language_model
from trainer.config.checks import check
from trainer.config.load import load
from trainer.devices import GPU_MEMORY_SHARE
from trainer.mesh import abstract_mesh


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


@pytest.mark.parametrize(
    "optimizer", [{"weight_dtype": "bfloat16"}, {"moment_dtype": "8bit"}, {"name": "muon"}], ids=str
)
def test_an_optimizer_that_needs_its_moments_on_the_device_is_planned(optimizer):
    """Without the policies that put them on the host, which training refuses."""
    job = Job.of("llama-3.1-8b", "h100:8", 8192, optimizer=optimizer)
    memory = [each.run.memory for each in allowed_policies(job)]
    assert memory and not any(options.moments_on_host for options in memory)
    small = dataclasses.replace(job, topology="rtx4090:2")
    assert best_job(small).job is None and "moments" in refusal(policies(small)[-1])


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


@pytest.fixture
def auto_recipe(small_recipe, tmp_path):
    """Returns a function that writes a recipe with `mesh: auto` and `memory: auto` for a model from
    scratch, and returns its path."""

    def write(model, length, rows):
        fields = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
        tokenizer = fields["model"].get("tokenizer") or fields["model"]["path"]
        fields["data"]["context_length"], fields["train"]["batch_size"] = length, rows
        fields |= {"model": {"preset": model, "tokenizer": tokenizer}}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**fields, "mesh": "auto", "memory": "auto"}))
        return str(path)

    return write


QUESTIONS = {
    "one mesh certainly fits": ("llama-3.1-8b", "8xH100", None, 131072, 8),
    "devices of two slices": ("llama-3.1-8b", "2xv5e-8", None, 4096, 8),
    "nothing fits": ("llama-3.1-8b", "RTX4090", None, 32768, 1),
    "the time is unknown": ("llama-3.2-1b", "gpu", 24, 8192, 2),
    # To these both once had different answers.
    "the fastest mesh that may fit is not the first": ("llama-3.1-8b", "4xL40S", 8, 32768, 1),
    "the batch may fit, and certainly does in parts": ("llama-3.1-8b", "8xH100", 24, 131072, 16),
    "the batch fits only in parts": ("llama-3.2-1b", "RTX4090", None, 131072, 16),
    "training refuses what certainly fits": ("smollm3-3b", "RTX4090", None, 8192, 1),
}


@pytest.mark.parametrize(
    ("model", "machine", "gpu_memory", "length", "rows"), QUESTIONS.values(), ids=QUESTIONS
)
def test_train_and_plan_choose_the_same(
    model, machine, gpu_memory, length, rows, auto_recipe, capsys
):
    recipe = auto_recipe(model, length, rows)
    usable = None if gpu_memory is None else GPU_MEMORY_SHARE * gpu_memory
    topology = topology_of(machine, any_gpu=gpu_memory is not None)
    try:
        _, reason = plan_on(load(["--config", recipe]), machine_named(topology, usable))
    except UserError as error:
        reason = str(error)
    words = ["--config", recipe, "--machine", machine, "--best"]
    words += [] if gpu_memory is None else ["--gpu-memory", str(gpu_memory)]
    status = plan.main(words)
    output = capsys.readouterr().out
    if status == 0:
        assert reason.splitlines()[0].partition(": ")[2] == output.splitlines()[1]
    else:
        assert "do not fit on" in reason and "does not fit, by the estimate" in output


def test_plan_chooses_what_a_recipe_leaves_to_the_planner(auto_recipe, tmp_path, capsys):
    """Unless an option sets the section; the written recipe leaves nothing to it."""
    written = str(tmp_path / "written.yaml")
    words = ["--config", auto_recipe("llama-3.1-8b", 32768, 8), "--machine", "8xH100"]
    assert plan.main([*words, "--write", written]) == 0
    assert "\nmesh fsdp 8, remat " in capsys.readouterr().out
    planned = load(["--config", written])
    assert planned.mesh.fsdp == 8 and planned.auto == ()
    assert plan.main([*words, "--sequence", "8", "--remat", "nothing"]) == 0
    assert "\nmesh sequence 8, schedule ring, remat nothing" in capsys.readouterr().out


def test_the_least_parts_of_a_batch_win_even_if_more_would_be_as_fast():
    job = Job.of("llama-3.1-8b", "h100:8", 8192, batch=16)
    assert best_job(job).job.run.train.accumulation == 1
    given = job.changed(train={"accumulation": 2})
    assert best_job(given).job.run.train.accumulation == 2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_policy_on_every_mesh_makes_a_model(family):
    """For a published size of each family, on machines of several shapes. A period of layers that
    does not divide them has no interval for offload_every_k."""
    for preset in family.presets:
        period = len(TransformerConfig.preset(preset).layer_kinds)
        layers = TransformerConfig.preset(preset).num_hidden_layers
        for machine, length, rows in (
            ("h100:1", 8192, 1),
            ("h100:6", 9000, 2),
            ("2xv5e:2x4", 4096, 4),
            ("3xv5e:2x2", 4104, 1),
        ):
            job = Job.of(preset, machine, length, batch=rows)
            for each in choices(job):
                run = dataclasses.replace(each.run, memory=each.memory)
                build_language_model(check(run, "plan"), job.model, abstract_mesh(run.mesh))
                check_dcn(run.mesh, machine)
            remats = {each.run.memory.remat for each in choices(job)}
            assert ("offload_every_k" in remats) == (layers % period == 0)


@pytest.mark.parametrize(
    ("layers", "period", "best"), [(36, 1, 6), (36, 4, 4), (48, 6, 6), (26, 6, None), (24, 2, 4)]
)
def test_the_interval_suits_layers_and_period(layers, period, best):
    assert best_every_k(layers, period) == best


def test_the_interval_need_not_divide_layers_of_several_stacks():
    assert best_every_k(89) == 1 and best_every_k(89, divides=False) == 9


@pytest.mark.parametrize("model", ["smollm3-3b", "olmo2-7b", "olmo3-7b", "gemma-3-1b"])
def test_on_the_smallest_machine_the_plan_is_one_that_train_accepts(model, auto_recipe):
    """Where only the policies with the least memory may fit."""
    config = load(["--config", auto_recipe(model, 8192, 1)])
    job = Job(config, TransformerConfig.preset(model), "gpu:1", host_gib=500.0)
    least = min(policies(job), key=lambda each: estimate_memory(each).low)
    gib = 1.01 * estimate_memory(least).low
    planned, _ = plan_on(config, Machine("gpu:1", "one device", gib, 500.0))
    assert planned.memory.parameters_on_host
    build_language_model(planned, job.model, abstract_mesh(planned.mesh))


def test_the_compiler_is_not_asked_about_what_train_refuses(monkeypatch):
    """Groups of heads given by the recipe, which remat everything cannot have."""
    job = Job.of("llama-3.1-8b", "h100:8", 131072).changed(memory={"attention_groups": 2})
    refused = [each for each in policies(job) if refusal(each) is not None]
    assert {each.run.memory.remat for each in refused} == {"everything"}
    assert not any(each.run.memory.remat == "everything" for each in candidates(job))
    monkeypatch.setattr("planning.plan.plan", lambda job: {"peak_gib": 1.0})
    asked = []
    monkeypatch.setattr("planning.search.refusal", lambda job: asked.append(job) or refusal(job))
    for make in (allowed_policies, candidates):
        longest, _, _ = search(job, make, most=job.context)
        assert longest.run.memory.remat != "everything" and len(asked) == len(set(map(repr, asked)))
        asked.clear()


def test_a_search_without_candidates_says_why(monkeypatch, capsys):
    """None fits by its known parts: 25.1 GiB of parameters and twice as much of moments, of which a
    host of 20 GiB holds none."""
    large = dataclasses.replace(Job.of("llama-7b", "v5e:1x1", 4096), host_gib=20.0)
    assert candidates(large) == []
    flags = ["--model", "llama-7b", "--machine", "v5e-1", "--context", "4096", "--best"]
    assert plan.main([*flags, "--host-gib", "20", "--compile"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("does not fit, by its known parts: needs 5") and "moments 50.2" in line
    job = Job.of("llama-3.1-8b", "h100:8", 4097, attention={"layout": "zigzag"})
    assert str(no_candidate(job, [])) == no_mesh(job, job.topology)
    monkeypatch.setattr("planning.search.refusal", lambda job: f"{job.run.mesh.tensor} is refused")
    jobs = [each for _, each in every_choice(Job.of("llama-3.1-8b", "h100:8", 4096))]
    message = r"[1248] is refused \(\d+ of \d+ choices\); [1248] is refused \(\d+ of \d+ choices\)"
    assert re.fullmatch(message, str(no_candidate(job, jobs)))
    monkeypatch.setattr("planning.search.refusal", lambda job: "memory: found 3; 2 would work")
    assert str(no_candidate(job, jobs)) == "memory: found 3; 2 would work"
