"""Plans of adapters: memory by formula and by the compiled step, the recipe, and the proposed
alternatives."""

import math
import re

import jax
import pytest
import yaml

import train
from model.adapter import AdapterConfig
from planning import answer
from planning.memory_estimate import estimate_memory
from planning.plan import Job, compile_run
from planning.recipe import recipe_of
from planning.search import policies
from scripts import plan
from tests.small_model import CONFIG
from trainer.config.load import load
from trainer.config.schema import MeshConfig

GIB = 2**30
# Llama 3.1 8B: (inputs, outputs) of a layer's projections q, k, v, o, gate, up, down.
SIZES = [
    (4096, 4096),
    (4096, 1024),
    (4096, 1024),
    (4096, 4096),
    (4096, 14336),
    (4096, 14336),
    (14336, 4096),
]
LAYERS, VOCABULARY, NORMS = 32, 128256, 2 * 32 * 4096 + 4096


def lora(rank: int) -> int:
    """Returns the number of elements in LoRA's A [inputs, r] and B [r, outputs] of all
    projections."""
    return LAYERS * sum(rank * (inputs + outputs) for inputs, outputs in SIZES)


def run_plan(capsys, *argv) -> tuple[int, str]:
    status = plan.main([str(word) for word in argv])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def read_parts(output: str) -> dict[str, float]:
    rows = re.findall(r"^  ([a-z ]+?) +(\d+\.\d\d)(?: |$)", output, re.MULTILINE)
    return {name: float(size) for name, size in rows}


JOB = ["--model", "llama-3.1-8b", "--machine", "h100", "--context", "8K"]


def test_lora_counts_a_bfloat16_base_and_float32_adapters_with_moments(capsys):
    assert lora(16) == 41_943_040
    status, output = run_plan(capsys, *JOB, "--lora", 16, "--remat", "nothing")
    projections = LAYERS * math.fsum(a * b for a, b in SIZES)
    base = projections + 2 * VOCABULARY * 4096 + NORMS
    parts = read_parts(output)
    assert status == 0 and "LoRA of rank 16" in output
    assert parts["parameters"] == pytest.approx((2 * base + 4 * lora(16)) / GIB, abs=0.006)
    assert parts["moments"] == pytest.approx(2 * 4 * lora(16) / GIB, abs=0.006)


def test_qlora_counts_an_nf4_base(capsys):
    """Half a byte per weight and a byte of scale per 64; the embedding, head and norms in
    bfloat16."""
    status, output = run_plan(capsys, *JOB, "--qlora", 32, "--remat", "nothing")
    projections = LAYERS * math.fsum(a * b for a, b in SIZES)
    codes = projections * (0.5 + 1 / 64)
    others = 2 * (2 * VOCABULARY * 4096 + NORMS)
    parts = read_parts(output)
    assert status == 0 and "QLoRA of rank 32" in output
    assert parts["parameters"] == pytest.approx((codes + others + 4 * lora(32)) / GIB, rel=0.002)
    assert parts["moments"] == pytest.approx(2 * 4 * lora(32) / GIB, abs=0.006)


def test_estimated_parameters_and_moments_match_the_compiled_step():
    """A small model's parameters and moments are the compiled step's arguments besides the
    batch."""
    options = {"adapter": AdapterConfig(rank=4), "attention": {"kernel": "reference"}}
    job = Job.of(CONFIG, "gpu:1", 128, mesh=MeshConfig(), **options)
    compiled = compile_run(job.run, CONFIG, jax.devices()[:1])
    parts = estimate_memory(job).parts
    batch = 128 * 6 * 4  # tokens, targets, index, segment_ids, positions, loss_weights
    # Adam's count, the step number and similar scalars take a few bytes.
    taken = compiled.memory_analysis().argument_size_in_bytes - batch
    assert taken == pytest.approx((parts["parameters"] + parts["moments"]) * GIB, rel=0.01)


def test_the_written_recipe_has_the_adapter_and_loads(tmp_path, capsys):
    recipe = tmp_path / "qlora.yaml"
    assert run_plan(capsys, *JOB, "--qlora", 16, "--write", recipe)[0] == 0
    expected = {"rank": 16, "alpha": 32.0, "targets": ["all-linear"], "quantize": "nf4"}
    written = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    assert written["adapter"] == expected and written["optimizer"]["learning_rate"] == 1e-4
    config = load(["--config", str(recipe), "--model.path", "x", "--data.path", "y"])
    assert (config.adapter.rank, config.adapter.quantize) == (16, "nf4")
    # Planning it again changes nothing, and a flag takes precedence.
    job = Job.of("llama-3.1-8b", "h100:1", 8192, adapter=config.adapter)
    assert recipe_of(job, written, None)["adapter"] == expected
    _, output = run_plan(capsys, "--config", recipe, *JOB[:4], "--lora", 8)
    assert ", LoRA of rank 8" in output
    assert run_plan(capsys, *JOB, "--lora", 8, "--qlora", 8) == (
        2,
        "error: --lora: found together with --qlora; keep one of them\n",
    )


def test_adapters_that_fit_are_proposed_where_full_fine_tuning_does_not(capsys):
    """Each proposal fits when planned with its flags; what is reported not to fit does not."""
    large = ["--model", "llama-3.1-70b", "--machine", "h100", "--context", "8K", "--host-gib", 100]
    status, output = run_plan(capsys, *large)
    (line,) = re.findall(r"^  QLoRA fits: (--qlora 16 .*)$", output, re.MULTILINE)
    assert status == 1 and "  LoRA fits" not in output
    assert run_plan(capsys, *large, *line.split())[0] == 0
    _, output = run_plan(capsys, *large, "--lora", 16)
    assert "does not fit" in output and "  QLoRA fits: --qlora 16 " in output
    assert "LoRA" not in run_plan(capsys, *JOB)[1], "a full fine-tune fits"


def test_a_frozen_base_stays_on_the_device():
    """The TPU's compiler cannot slice one layer of bfloat16 parameters out of host memory."""
    full = Job.of("llama-3.1-8b", "h100:1", 8192)
    adapted = full.changed(adapter=AdapterConfig(rank=4))
    on_host = [
        [candidate.run.memory.parameters_on_host for candidate in policies(job)]
        for job in (full, adapted)
    ]
    assert any(on_host[0]) and not any(on_host[1])


def test_no_adapter_is_proposed_that_the_model_cannot_use():
    job = Job.of(CONFIG, "h100:1", 128, adapter=AdapterConfig(rank=4))
    assert not list(answer._adapter_advice(job, answer.plan_flags)), (
        "NF4's blocks of 64 do not fill 32 inputs"
    )


def test_one_gpu_gets_its_share_of_the_hosts_memory(capsys):
    job = ["--model", "llama-3.1-8b", "--context", "128K", "--remat", "offload"]
    _, output = run_plan(capsys, *job, "--machine", "h100", "--lora", 16)
    assert " of 240.00 " in output and "assumed: each GPU has its share of a host with 8" in output
    _, output = run_plan(capsys, *job, "--machine", "h100", "--lora", 16, "--host-gib", 60)
    assert " of 60.00 " in output and "assumed" not in output
    _, output = run_plan(capsys, *job, "--machine", "8xh100", "--lora", 16)
    assert " of 240.00 " in output and "assumed" not in output
    _, output = run_plan(capsys, *job, "--machine", "rtx4090", "--qlora", 16)
    assert "not checked: this host's memory is unknown" in output


def test_an_unlisted_gpu_with_gpu_memory_is_planned_as_a_generic_gpu(
    small_recipe, tmp_path, capsys
):
    job = ["--model", "llama-3.1-8b", "--context", "32K", "--gpu-memory", "192"]
    answers = {run_plan(capsys, *job, "--machine", name) for name in ("8xMI300X", "8xgpu", "gpu:8")}
    ((status, output),) = answers
    assert status == 0 and "on gpu:8: 8 devices" in output and "182.40" in output
    assert run_plan(capsys, *job[:4], "--machine", "8xMI300X")[0] == 2
    words = ["--config", str(small_recipe), "--run_dir", str(tmp_path), "--dry-run"]
    assert train.main([*words, "8xMI300X", "--gpu-memory", "192"]) == 0
    assert "fits, by the estimate" in capsys.readouterr().out
