"""The TPU compiler's plan of the training step: LLaMA-7B at a million tokens fits, and no array of
length x length exists."""

import dataclasses
import itertools
import json
import math
import re

import jax
import pytest
import yaml

from model.attention import get_kernel, get_schedule
from model.attention.schedules.plan import Block, received
from model.config import TransformerConfig
from model.parameter_declarations import declare
from planning.compiled import GIB, memory
from planning.compiled.communication import communication
from planning.compiled.transfers import collectives
from planning.machines import memory_gib
from planning.parts import host_parts_gib, parts_gib
from planning.plan import DEFAULT_RECIPE, DoesNotFit, Job, plan
from planning.search import candidates, search
from planning.topology import topology_devices
from scripts.plan import main
from scripts.plan_options import job_of, mesh_of, parser
from tests.compiled_text import arrays_with, compile_step
from trainer.config.load import load
from trainer.config.schema import MeshConfig, OptimizerConfig, TrainConfig
from trainer.mesh import make_mesh

CONTEXT = 1_048_576
SMALL = TransformerConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def compiled():
    """Compiles once for all tests: it takes a minute."""
    return compile_step(
        TransformerConfig.preset("llama-7b"), topology_devices("v4:4x4x4"), CONTEXT, remat="nothing"
    )


@pytest.mark.slow
def test_llama_7b_at_a_million_tokens_fits_in_14_gib(compiled):
    plan = memory(compiled)
    assert plan["peak"] <= 14.0
    assert plan["host"] == 0.0


@pytest.mark.slow
def test_no_array_of_length_times_length_exists(compiled):
    """16384 tokens per device in tiles of 1024 x 1024. Only weights and activations have two axes
    of 4096 or more; their largest other axis is the hidden size 4096, the FFN width or the
    vocabulary."""
    tokens = CONTEXT // 64
    assert not arrays_with(compiled.as_text(), tokens)


@pytest.mark.slow
def test_the_ring_uses_permutes_and_no_all_to_all(compiled):
    text = compiled.as_text()
    assert collectives(text)["collective-permute"] > 0
    assert collectives(text)["all-to-all"] == 0


@pytest.mark.slow
def test_communication_of_the_step_matches_the_plan_and_is_hidden(compiled):
    """Each layer's ring runs forward twice (remat `nothing`) and backward once; all transfers but
    the hops home overlap a kernel."""
    sent = communication(compiled.as_text(), 64)
    block = Block(
        batch=1, tokens=CONTEXT // 64, query_heads=32, kv_heads=32, head_dim=128, itemsize=2
    )
    forward, backward = (
        received(rounds, 64).max() for rounds in get_schedule("ring", 64).plan(64, block)
    )
    assert sent["collective-permute"]["received_gib"] * GIB == pytest.approx(
        32 * (2 * forward + backward), rel=0.02
    )
    assert sent["collective-permute"]["hidden"] > 0.97
    weights = sum(
        math.prod(parameter.shape)
        for parameter in declare(TransformerConfig.preset("llama-7b")).values()
    )
    assert sent["all-gather"]["received_gib"] * GIB == pytest.approx(
        2 * 2 * weights * 63 / 64, rel=0.1
    )
    assert sent["reduce-scatter"]["received_gib"] * GIB == pytest.approx(
        4 * weights * 63 / 64, rel=0.1
    )
    assert sent["all-reduce"]["received_gib"] < 0.1 * sent["all-gather"]["received_gib"]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [False, True])
def test_offload_keeps_layer_inputs_in_host_memory(monkeypatch, prefetch):
    """Layers x tokens per device x hidden size in bfloat16, to the byte: 8 x 4096 x 512 x 2; a
    smaller host is refused."""
    job = Job.of(SMALL, "v5e:2x2", 4 * 4096, memory={"remat": "offload", "prefetch": prefetch})
    compiled, on_host = job.compile(), 8 * 4096 * 512 * 2
    assert (
        memory(compiled)["host"] * GIB
        == on_host
        == pytest.approx(sum(host_parts_gib(job.run, SMALL).values()) * GIB)
    )
    monkeypatch.setattr(Job, "compile_to_text", lambda job: (compiled, compiled.as_text()))
    assert plan(dataclasses.replace(job, host_gib=on_host / GIB))["host_gib"] * GIB == on_host
    with pytest.raises(DoesNotFit, match=r"needs 0.03 GiB of 0.03 of the host's memory") as refusal:
        plan(dataclasses.replace(job, host_gib=0.99 * on_host / GIB))
    assert refusal.value.needs_gib * GIB == on_host


def test_estimated_parameters_and_moments_match_the_steps_arguments():
    """A step's arguments are parameters and moments, plus a batch of 256 tokens and counters."""
    recipe = dataclasses.replace(
        DEFAULT_RECIPE,
        optimizer=OptimizerConfig(moment_dtype="bfloat16"),
        model=dataclasses.replace(DEFAULT_RECIPE.model, trainable=r"layers\.mlp.*"),
    )
    job = Job.of(SMALL, "v5e:2x2", 256, mesh=MeshConfig(), recipe=recipe)
    compiled = compile_step(
        SMALL, jax.devices()[:1], 256, recipe=recipe, kernel=get_kernel("reference")
    )
    parts = parts_gib(job.run, SMALL)
    assert parts["parameters"] + parts["moments"] == pytest.approx(
        memory(compiled)["arguments"], rel=0.01
    )
    on_host = job.changed(memory={"moments_on_host": True}).run
    assert (
        host_parts_gib(on_host, SMALL)["moments"] == parts["moments"]
        and not parts_gib(on_host, SMALL)["moments"]
    )


def planned(*argv) -> Job:
    return job_of(parser().parse_args([str(word) for word in argv]))


def test_a_recipe_is_planned_as_written(repository):
    """Flags take precedence. Covers every shipped recipe, whatever its chunks, masks and
    schedule."""
    where = ["--model", "llama-7b", "--topology", "v4:4x4x4"]
    config = repository / "configs/sharegpt_llama7b_1m.yaml"
    job = planned("--config", config, *where, "--batch", 2, "--remat", "offload")
    run = job.run
    assert (job.context, job.batch, run.memory.remat, run.attention.schedule) == (
        1_048_576,
        2,
        "offload",
        "ring",
    )
    assert run.mesh == MeshConfig(sequence=64) and job.host_gib == 100
    for recipe in sorted((repository / "configs").glob("*.yaml")):
        job, run = planned("--config", recipe, *where), yaml.safe_load(recipe.read_text())
        assert job.context == run["data"][
            "context_length"
        ] and job.model == TransformerConfig.preset("llama-7b")
        assert job.run.attention.window == run.get("attention", {}).get("window")
        assert job.run.memory.loss_chunk == run.get("memory", {}).get("loss_chunk", 1024)
        assert job.run.attention.schedule == run["attention"]["schedule"]
    own = planned("--config", repository / "configs/quickstart.yaml", "--topology", "v4:2x2x2")
    assert (
        own.model.hidden_size
        == yaml.safe_load((repository / "configs/quickstart.yaml").read_text())["model"][
            "overrides"
        ]["hidden_size"]
    )


def test_the_planned_step_is_the_one_that_training_runs(repository):
    """Covers recipe options without a flag of the planner: precision, accumulation, trainable
    parameters."""
    flags = "--model.compute_dtype float32 --train.accumulation 2 --model.trainable norm.weight"
    recipe = load(["--config", str(repository / "configs/quickstart.yaml"), *flags.split()])
    whole = dataclasses.replace(recipe, train=TrainConfig(batch_size=2))
    mesh, tiny = MeshConfig(sequence=2), TransformerConfig.preset("tiny")
    compiled, at_once = (
        compile_step(tiny, jax.devices()[:2], 64, batch=2, mesh=mesh, recipe=each, remat="nothing")
        for each in (recipe, whole)
    )
    new_parameters = compiled.out_info[0]
    assert set(new_parameters) == {"norm.weight"} and "bf16[" not in compiled.as_text()
    assert compiled.as_text() != at_once.as_text(), "accumulation is ignored"


def test_a_models_folder_can_be_planned(tmp_path):
    config = dataclasses.replace(TransformerConfig.preset("smollm2-135m"), num_hidden_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert (
        planned(
            "--model", tmp_path, "--topology", "v5e:2x2", "--context", 64
        ).model.num_hidden_layers
        == 3
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--context", "4097"),
            "data.context_length: found 4097, which no mesh of v5e:2x2 divides; a multiple of 8",
        ),
        (
            ("--context", "4096", "--mesh", "fsdp=4"),
            "train.batch_size: found 1, needs a multiple of",
        ),
        (("--context", "4096", "--mesh", "fsdp"), "--mesh: found 'fsdp'; write axis=size"),
        (("--context", "4096", "--mesh", "tensor=3"), "sequence 1 = 3 devices, but v5e:2x2 has 4"),
        ((), "--context: missing"),
        (
            ("--context", "4096", "--schedule", "{name: ring, name: ulysses}"),
            "--schedule: name is written twice",
        ),
        (("--context", "4096", "--schedule", "{name: ring"), "--schedule: not valid YAML"),
    ],
)
def test_an_invalid_job_is_a_one_line_error(argv, message, capsys):
    assert main(["--model", "smollm2-135m", "--topology", "v5e:2x2", *argv]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(error) == 1 and message in error[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        ((1, 0) * 4, {}),
        ((1, 1, 0) * 2 + (1, 1), {}),
        ((1,) * 8, {"remat": "every_k", "every_k": 2}),
    ],
    ids=["two kinds", "three kinds, two layers left over", "groups of layers"],
)
def test_layers_are_streamed_one_by_one_from_a_tpus_host(kinds, options):
    """The TPU's compiler slices layers out of their period and their group, and the host holds 12
    bytes per parameter."""
    model = dataclasses.replace(SMALL, family="smollm3", no_rope_layers=kinds)
    sizes = memory(
        compile_step(
            model,
            topology_devices("v5e:2x2"),
            4 * 4096,
            moments_on_host=True,
            parameters_on_host=True,
            **{"remat": "nothing", **options},
        )
    )
    count = sum(math.prod(parameter.shape) for parameter in declare(model).values())
    assert sizes["host"] * 2**30 == pytest.approx(12 * count / 4, rel=0.01)


@pytest.mark.slow
def test_parameters_and_moments_on_the_host_are_never_whole_on_a_device():
    """The host holds 12 bytes per parameter besides the layer inputs, once: updates are in
    place."""
    sizes = memory(
        compile_step(
            SMALL,
            topology_devices("v5e:2x2"),
            4 * 4096,
            remat="offload",
            attention_groups=2,
            moments_on_host=True,
            parameters_on_host=True,
        )
    )
    count = sum(math.prod(parameter.shape) for parameter in declare(SMALL).values())
    assert sizes["host"] * 2**30 == pytest.approx(8 * 4096 * 512 * 2 + 12 * count / 4, rel=0.01)
    assert sizes["arguments"] * 2**30 <= 64 * 4096  # the batch: six arrays of 4 bytes per token


@pytest.mark.slow
def test_query_chunks_never_hold_the_queries_of_all_tokens():
    """Attention's output and its gradient, each tokens x hidden size in bfloat16, do not exist; nor
    do whole queries."""
    config = TransformerConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    tokens = 16384
    groups, chunks = (
        compile_step(
            config,
            topology_devices("v5e:2x2"),
            4 * tokens,
            remat="nothing",
            attention_groups=2,
            query_chunks=count,
        )
        for count in (1, 8)
    )
    saved = memory(groups)["temporaries"] - memory(chunks)["temporaries"]
    assert saved * 2**30 >= 2 * tokens * 1024 * 2
    all_queries = f"bf16[1,{tokens},8,128]"
    assert all_queries in groups.as_text() and all_queries not in chunks.as_text()


def test_an_unknown_topology_is_a_one_line_error(capsys):
    assert main(["--model", "llama-7b", "--topology", "v9:1x1", "--context", "1024"]) == 2
    assert "unknown device v9" in capsys.readouterr().err
    with pytest.raises(ValueError, match="write generation:shape"):
        topology_devices("v9:1x1")


def test_a_compiled_plan_that_does_not_fit_prints_its_memory(capsys):
    """The compiler's refusal becomes sizes and names, without a traceback."""
    job = "--model smollm2-135m --topology v5e:2x2 --context 4M --remat everything --compile"
    assert main(job.split()) == 1
    output = capsys.readouterr().err
    needs, has = re.search(
        r"needs ([\d.]+) GiB of ([\d.]+); of it products [\d.]+, attention outputs", output
    ).groups()
    assert float(needs) > float(has) == 15.75


def test_a_mesh_flag_is_parsed():
    assert mesh_of("data=4,fsdp=8,dcn.data=2") == MeshConfig(data=4, fsdp=8, dcn={"data": 2})
    for text, message in (
        ("fsdp=8,dcn.data=2", r"mesh\.dcn: found .*; \{fsdp: 2\} would work"),
        ("dcn.data=2", r"mesh\.dcn: found .*; no axes have factors whose product is 2"),
        ("fsdp=0", r"mesh\.fsdp: found 0"),
        ("rows=2", r"--mesh: found 'rows=2'; write axis=size"),
        ("dcn=2", r"--mesh: found 'dcn=2'; write axis=size"),
    ):
        with pytest.raises(ValueError, match=message):
            mesh_of(text)


def test_the_search_ends_at_the_longest_context_that_fits(monkeypatch):
    """A fake compiler: 1 GiB per 1000 tokens, half of it under `nothing`, 7 GiB available."""
    import planning.plan

    def plan(job):
        remat = job.run.memory.remat
        gib = job.context / 1000 * (0.5 if remat == "nothing" else 1.0)
        if gib > 7:
            raise DoesNotFit(gib, 7.0)
        return {"context": job.context, "remat": remat, "peak_gib": gib}

    monkeypatch.setattr(planning.plan, "plan", plan)
    tried = []

    def two_policies(job):
        return [job.changed(memory={"remat": remat}) for remat in ("save_attention", "nothing")]

    longest, best, refusal = search(
        Job.of("tiny", "v5e:2x2", 1000),
        two_policies,
        lambda job, _: tried.append((job.context, job.run.memory.remat)),
    )
    assert (longest.context, best["context"], best["remat"], refusal.needs_gib) == (
        8000,
        8000,
        "nothing",
        8.0,
    )
    assert tried == [
        (1000, "save_attention"),
        (2000, "save_attention"),
        (4000, "save_attention"),
        (8000, "save_attention"),
        (8000, "nothing"),
        (16000, "nothing"),
    ]


def test_the_written_recipe_is_the_plan_that_compiled(monkeypatch, tmp_path, capsys):
    import planning.plan

    def plan(job):
        if job.context > 32768:
            raise DoesNotFit(16.0, 15.75)
        return {
            "model": job.name,
            "topology": job.topology,
            "devices": 4,
            "device_gib": 15.75,
            "host_gib": 0.0,
            "mesh": {},
            "context": job.context,
            "peak_gib": 8.0,
            "communication": None,
        }

    monkeypatch.setattr(planning.plan, "plan", plan)
    recipe = tmp_path / "mine.yaml"
    words = ["--model", "smollm2-135m", "--machine", "v5e-4", "--compile", "--write", str(recipe)]
    assert main([*words, "--context", "8K", "--search"]) == 0
    assert yaml.safe_load(recipe.read_text(encoding="utf-8"))["data"]["context_length"] == 32768
    recipe.unlink()
    assert main([*words, "--context", "64K"]) == 1
    assert not recipe.exists() and "does not fit, by the compiler" in capsys.readouterr().err


def test_candidates_of_a_job_use_all_chips_and_come_fastest_first():
    """Llama 3.1 8B, four rows on 16 chips: every candidate uses all chips, rows go to fsdp first,
    and none is slower than the next."""
    job = Job.of("llama-3.1-8b", "v5e:4x4", 8192, batch=4)
    jobs = candidates(job)
    meshes = {
        (candidate.run.mesh.fsdp, candidate.run.mesh.tensor, candidate.run.mesh.sequence)
        for candidate in jobs
    }
    assert meshes == {(4, 1, 4), (4, 2, 2), (4, 4, 1), (2, 8, 1)}
    runs = [candidate.run for candidate in jobs]
    prefetched = {
        (run.attention.schedule, run.memory.remat, run.mesh.sequence > 1)
        for run in runs
        if run.memory.prefetch
    }
    assert prefetched == {
        ("ring", remat, True)
        for remat in (
            "save_attention",
            "nothing",
            "offload",
            "offload_save_attention",
            "offload_attention",
        )
    }
    seconds = [candidate.time_range().high for candidate in jobs]
    assert all(later > 0.9 * earlier for earlier, later in itertools.pairwise(seconds)), (
        "order holds up to rounding to two digits"
    )
    assert len(jobs) > 10 and seconds[-1] > 1.2 * seconds[0]
    assert all(
        sum(parts_gib(candidate.run, candidate.model).values()) < memory_gib(job.topology)
        for candidate in jobs
    )


def test_heads_that_tensor_does_not_divide_take_the_time_of_those_computed():
    """Qwen2.5 0.5B on 8 ranks computes 56 query and 8 key heads, but has 14 and 2: a step takes as
    long as that of a model with as many, and its MFU counts the work of 14."""
    own = TransformerConfig.preset("qwen2.5-0.5b")
    padded = dataclasses.replace(own, num_attention_heads=56, num_key_value_heads=8)
    (seconds, mfu), (computed, mfu_of_padded) = (
        (step.seconds, step.mfu)
        for step in (
            Job.of(model, "h100:8", 65536, mesh=MeshConfig(tensor=8)).estimate()
            for model in (own, padded)
        )
    )
    assert seconds == computed
    assert mfu < 0.5 * mfu_of_padded


def test_a_mesh_axis_may_be_part_of_a_physical_axis():
    """8 x 4 x 2 devices on a 4 x 4 x 4 torus, each device once."""
    mesh = make_mesh(MeshConfig(fsdp=8, tensor=4, sequence=2), topology_devices("v5p:4x4x4"))
    assert (
        mesh.devices.shape == (1, 8, 1, 4, 2)
        and len({device.id for device in mesh.devices.flat}) == 64
    )
