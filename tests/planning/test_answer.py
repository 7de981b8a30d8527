"""Advice about a job that does not fit."""

import numpy as np
import pytest

from model.attention import Mask
from model.config import TransformerConfig
from planning import answer
from planning.plan import Job
from trainer.flops import flops_per_step, pairs_per_layer


def test_shorter_rows_are_not_tried_when_another_plan_fits(monkeypatch):
    job = Job.of("smollm2-135m", "v5e:2x2", 8192, memory={"remat": "everything"})
    contexts, choose = [], answer.choose

    def recorded(job):
        contexts.append(job.context)
        return choose(job)

    monkeypatch.setattr(answer, "choose", recorded)
    (line,) = answer.advice(job)
    assert line.startswith("fits here with mesh") and contexts == [8192]


def test_the_advised_number_of_devices_is_the_least_that_fits():
    """Not only with all of them along the sequence: tensor fits on fewer."""
    job = Job.of("llama-3.1-8b", "rtx4090:1", 8192)
    assert "a row of this length fits on 2 of these devices" in list(answer.advice(job))
    two = Job.of("llama-3.1-8b", "rtx4090:2", 8192)
    assert answer.choose(two) is not None


def test_flags_of_a_plan_on_slices_name_the_axis_that_crosses_them():
    chosen = answer.choose(Job.of("smollm2-135m", "2xv5e:4x4", 4096, batch=2))
    assert "--mesh fsdp=2,sequence=16,dcn.fsdp=2 " in answer.flags(chosen)
    assert "mesh fsdp 2 x sequence 16, dcn {fsdp: 2}, schedule ring" in answer.settings(chosen)


@pytest.mark.parametrize("preset", ["gemma-3-12b", "phi-3-mini-4k"])
def test_times_count_only_the_pairs_in_windows(preset):
    config, job = TransformerConfig.preset(preset), Job.of(preset, "h100:8", 131072)
    figures = answer.time_figures(job)
    pairs = pairs_per_layer(config, np.array([job.context]), Mask(window=config.common_window))
    needed = flops_per_step(config, job.context, pairs)
    seconds, mfu = figures["seconds of a step"][0], figures["MFU"][1]
    assert seconds * mfu * 8 * job.hardware.peak == pytest.approx(needed)
