"""Times and their reasons, and advice about a job that does not fit."""

import dataclasses

import numpy as np
import pytest

from model.attention import Mask
from model.config import TransformerConfig
from planning import answer
from planning.plan import Job
from planning.search import best_job
from trainer.config.schema import MeshConfig
from trainer.flops import flops_per_step, pairs_per_layer


def test_shorter_rows_are_not_tried_when_another_plan_fits(monkeypatch):
    job = Job.of("smollm2-135m", "v5e:2x2", 8192, memory={"remat": "everything"})
    contexts = []

    def recorded(job):
        contexts.append(job.context)
        return best_job(job)

    monkeypatch.setattr(answer, "best_job", recorded)
    (line,) = answer.advice(job)
    assert line.startswith("fits here with mesh") and contexts == [8192]


def test_the_advised_number_of_devices_is_the_least_that_fits():
    """Not only with all of them along the sequence: tensor fits on fewer."""
    job = Job.of("llama-3.1-8b", "rtx4090:1", 8192)
    assert "a row of this length fits on 2 of these devices" in list(answer.advice(job))
    two = Job.of("llama-3.1-8b", "rtx4090:2", 8192)
    assert best_job(two).fits == "yes"


def test_flags_of_a_plan_on_slices_name_the_axis_that_crosses_them():
    chosen = best_job(Job.of("smollm2-135m", "2xv5e:4x4", 4096, batch=2)).job
    assert "--mesh fsdp=2,sequence=16,dcn.fsdp=2 " in answer.flags(chosen)
    assert "mesh fsdp 2 x sequence 16, dcn {fsdp: 2}, schedule ring" in answer.settings(chosen)


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


def test_a_schedule_without_a_rule_is_the_reason_for_no_time():
    job = Job.of(
        "smollm2-135m", "h100:8", 4096, attention={"schedule": {"name": "ulysses", "degree": 3}}
    )
    (line,) = answer.time_lines(job)
    assert line.startswith("time: not estimated; ") and "degree: 3" in line


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
