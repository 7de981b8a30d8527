"""The order of work within a training step."""

from types import SimpleNamespace

import jax
import numpy as np

from trainer import loop


def test_the_hosts_work_on_a_step_is_done_before_it_waits_for_the_device(monkeypatch):
    done = []

    def lengths(step):
        done.append(f"lengths of step {step}")
        return np.array([5, 3])

    def device_get(metrics):
        done.append("waited for the device")
        return metrics

    monkeypatch.setattr(jax, "device_get", device_get)
    training = object.__new__(loop._Training)
    training.config = SimpleNamespace(train=SimpleNamespace(steps=8, log_every=1))
    training.watchdog = SimpleNamespace(begin_step=lambda step: None)
    training.compiled_step = lambda *arguments: ({}, {}, "metrics")
    training._next_batch = lambda *arguments: "next"
    training.objective = SimpleNamespace(
        lengths=lengths, shared_lengths=lengths, tokens_per_batch=16
    )
    training.meter = SimpleNamespace(
        when_computed=lambda metrics: None, count=lambda *counts: done.append(counts[1])
    )
    training.state = SimpleNamespace(
        step=2,
        trainable={},
        frozen={},
        optimizer_state={},
        tokens_seen=100,
        finite=SimpleNamespace(count=lambda step, metrics: None),
        due=lambda every: False,
    )
    assert training._train_step({}, iter(())) == "next"
    assert done == ["lengths of step 2", "lengths of step 2", "waited for the device", 16]
    assert (training.state.step, training.state.tokens_seen) == (3, 108)
