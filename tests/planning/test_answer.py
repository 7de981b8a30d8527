"""Times and their reasons, and advice about a job that does not fit."""

import dataclasses

import numpy as np
import pytest

from model.attention import Mask
from model.config import TransformerConfig
from planning import answer
from planning.costs import HARDWARE
from planning.plan import Job
from planning.search import best_job
from scripts.plan_options import parser
from trainer.config.schema import MeshConfig
from trainer.flops import flops_per_step, pairs_per_layer


def test_shorter_rows_are_not_tried_when_another_plan_fits(monkeypatch):
    job = Job.of("smollm2-135m", "v5e:2x2", 8192, memory={"remat": "everything"})
    contexts = []

    def recorded(job):
        contexts.append(job.context)
        return best_job(job)

    monkeypatch.setattr(answer, "best_job", recorded)
    (line,) = answer.advice(job, answer.plan_flags)
    assert line.startswith("fits here with mesh") and contexts == [8192]


def test_the_advised_number_of_devices_is_the_least_that_fits():
    """Not only with all of them along the sequence: tensor fits on fewer."""
    job = Job.of("llama-3.1-8b", "rtx4090:1", 8192)
    assert "a row of this length fits on 2 of these devices" in list(
        answer.advice(job, answer.plan_flags)
    )
    two = Job.of("llama-3.1-8b", "rtx4090:2", 8192)
    assert best_job(two).fits == "yes"


def test_flags_of_a_plan_on_slices_name_the_axis_that_crosses_them():
    job = Job.of("smollm2-135m", "2xv5e:4x4", 4096, batch=2)
    chosen = best_job(job).job
    assert "--mesh fsdp=2,sequence=16,dcn.fsdp=2 " in answer.plan_flags(job, chosen)
    assert "--mesh.dcn '{\"fsdp\": 2}'" in answer.train_flags(job, chosen)
    assert "mesh fsdp 2 x sequence 16, dcn {fsdp: 2}, schedule ring" in answer.settings(chosen)


def test_hosts_of_few_gpus_wait_for_their_network():
    """Two hosts of four GPUs are not one host of eight; each GPU has a card of 50 GB/s."""
    one, two = (Job.of("llama-3.1-8b", f"h100:{shape}", 131072) for shape in ("8", "2x4"))
    assert two.estimate().step.exposed > 2 * one.estimate().step.exposed
    network = two.hardware.network
    assert (network.node, network.uplink) == (4, 4 * 50e9)
    assert Job.of("llama-3.1-8b", "h100:2x8", 131072).hardware == HARDWARE["h100-infiniband"]


def test_the_planner_accepts_the_flags_that_it_advises():
    """Chunk sizes stay the recipe's, and have no flag."""
    memory = {"loss_chunk": 512, "feed_forward_chunk": 0, "remat": "every_k", "every_k": 4}
    job = Job.of("smollm2-135m", "v5e:2x2", 8192, memory=memory)
    words = answer.plan_flags(job, job).split()
    assert words == ["--mesh", "sequence=4", "--remat", "every_k", "--every-k", "4"]
    assert parser().parse_args(words).every_k == 4


def test_advice_leaves_out_adapters_that_the_recipe_excludes():
    """They have no parameter that its `model.trainable` matches."""
    trained = {"trainable": "norm.weight"}
    job = Job.of("llama-3.1-70b", "rtx4090:1", 8192).changed(model=trained)
    lines = list(answer.advice(dataclasses.replace(job, host_gib=60.0), answer.plan_flags))
    assert lines and not any("LoRA" in line for line in lines)


@pytest.mark.parametrize("preset", ["gemma-3-12b", "phi-3-mini-4k", "olmo3-7b"])
def test_times_count_only_the_pairs_in_windows(preset):
    config, job = TransformerConfig.preset(preset), Job.of(preset, "h100:8", 131072)
    figures = answer.time_figures(job)
    pairs = pairs_per_layer(config, np.array([job.context]), Mask(window=config.common_window))
    needed = flops_per_step(config, job.context, pairs)
    seconds, mfu = figures["seconds of a step"][0], figures["MFU"][1]
    assert seconds * mfu * 8 * job.hardware.peak == pytest.approx(needed)


@pytest.mark.parametrize(
    ("topology", "dtype", "reason"),
    [
        ("gpu:8", "bfloat16", "the cost model does not list this machine"),
        ("2xv4:2x2x2", "bfloat16", "no bandwidth between slices of v4 is published"),
        (
            "h100:8",
            "float32",
            "the cost model's rates are bfloat16's, and model.compute_dtype is float32",
        ),
        ("2xv5e:2x4", "bfloat16", ""),
    ],
)
def test_a_time_that_is_not_estimated_says_why(topology, dtype, reason):
    job = Job.of("smollm2-135m", topology, 4096).changed(model={"compute_dtype": dtype})
    lines = answer.time_lines(job)
    assert job.untimed == reason and bool(answer.time_figures(job)) == (not reason)
    assert (lines == [f"time: not estimated; {reason}"]) == bool(reason)
    assert (job.training_step() is None) == bool(reason)


@pytest.mark.parametrize(
    ("preset", "changes", "extra"),
    [
        ("llama-3.1-8b", {}, 0),
        ("llama-3.1-8b", {"preference": {"loss": "kto"}}, 1),
        ("llama-3.1-8b", {"preference": {"loss": "dpo"}}, 0),
        ("qwen3-30b-a3b", {}, 1),
    ],
)
def test_the_cost_model_gets_the_parts_of_a_batch_and_what_crosses_slices(preset, changes, extra):
    """With accumulation, totals of the whole batch take a forward pass before: KTO's, and those of
    router losses."""
    config = TransformerConfig.preset(preset)
    if config.num_experts:
        config = dataclasses.replace(config, output_router_logits=True)
    mesh = MeshConfig(data=2, fsdp=16, dcn={"data": 2})
    job = Job.of(config, "2xv5e:4x4", 4096, batch=128, mesh=mesh).changed(**changes)
    assert job.training_step().extra_forwards == 0
    step = job.changed(train={"accumulation": 4}).training_step()
    assert (step.accumulation, step.rows, step.dcn) == (4, 1, {"data": 2})
    assert step.extra_forwards == extra
