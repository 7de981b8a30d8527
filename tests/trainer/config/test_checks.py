"""A learning rate that never reaches its peak is a warning, in training and in a dry run."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from trainer import loop
from trainer.config.checks import peak_warning
from trainer.config.schema import OptimizerConfig, RunConfig, TrainConfig
from trainer.optimizer import learning_rate


def run_of(steps, **optimizer):
    return RunConfig(train=TrainConfig(steps), optimizer=OptimizerConfig(**optimizer))


@pytest.mark.parametrize(
    ("steps", "optimizer", "advice"),
    [
        (
            3,
            {"warmup_steps": 500},
            "optimizer.warmup_steps 3 or less, or optimizer.warmup_fraction",
        ),
        (20, {"warmup_steps": 21, "schedule": "constant"}, "optimizer.warmup_steps 20 or less"),
        (100, {"warmup_steps": 90, "schedule": "wsd"}, "optimizer.warmup_steps 80 or less"),
        (100, {"warmup_fraction": 0.9, "schedule": "wsd"}, "optimizer.warmup_steps 80 or less"),
        (10, {"warmup_steps": 30, "schedule": "wsd", "final_fraction": 0.0}, "warmup_steps 8"),
        (10, {"warmup_steps": 3, "schedule": "wsd", "decay_fraction": 1.0}, "warmup_steps 0"),
    ],
)
def test_the_warning_names_the_share_of_the_peak(steps, optimizer, advice):
    config = run_of(steps, **optimizer)
    rates = learning_rate(config.optimizer, steps, jnp.arange(steps))
    warning = peak_warning(config)
    share = re.search(r"rises to only ([0-9.]+)% of its peak", warning)
    assert float(share[1]) == pytest.approx(
        100 * float(rates.max()) / config.optimizer.learning_rate, abs=0.06
    )
    assert advice in warning and warning.startswith(f"optimizer.{next(iter(optimizer))}: found ")


@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"warmup_steps": 100},
        {"warmup_fraction": 1.0},
        {"warmup_steps": 80, "schedule": "wsd"},
        {"warmup_fraction": 0.03, "schedule": "wsd"},
    ],
)
def test_a_peak_that_is_reached_has_no_warning(optimizer):
    config = run_of(100, **optimizer)
    rates = learning_rate(config.optimizer, 100, jnp.arange(100))
    assert float(rates.max()) > 0.97 * config.optimizer.learning_rate
    assert peak_warning(config) is None


def test_training_warns(tmp_path, monkeypatch, capsys):
    """Once epochs have become steps."""

    class Compared(Exception):
        """The processes' settings are compared next."""

    def stop(shared):
        raise Compared

    monkeypatch.setattr(loop, "require_same", stop)
    monkeypatch.setattr(loop, "make_mesh", lambda *_, **__: None)
    objective = SimpleNamespace(rows_per_epoch=6, origin="", fingerprint="", inputs={})
    config = run_of(100, warmup_steps=5)
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, epochs=0.5),
        run_dir=str(tmp_path / "run"),
        mesh=dataclasses.replace(config.mesh, fsdp=jax.device_count()),
    )
    with pytest.raises(Compared):
        loop.train(config, lambda *_: objective, [])
    printed = capsys.readouterr().err
    assert "warning: optimizer.warmup_steps: found 5, a warm-up of 5 steps, but the run" in printed
