"""A learning rate that never reaches its peak is a warning, in training and in a dry run."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers

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


@pytest.mark.parametrize(
    ("steps", "optimizer"),
    [
        (1, {}),
        (1, {"final_fraction": 0.0}),
        (2, {"schedule": "linear", "final_fraction": 0.0}),
    ],
)
def test_a_run_that_decays_from_its_first_step_is_named(steps, optimizer):
    """transformers' schedules of these names are a step behind: they begin at the peak."""
    config = run_of(steps, **optimizer)
    highest = float(learning_rate(config.optimizer, steps, jnp.arange(steps)).max())
    share = highest / config.optimizer.learning_rate
    assert peak_warning(config) == (
        f"optimizer.schedule: found {config.optimizer.schedule!r} in a run of {steps} "
        f"{'step' if steps == 1 else 'steps'} without warm-up: the learning rate is at most "
        f"{share:.1%} of its peak; optimizer.warmup_steps 1, or optimizer.schedule constant, would "
        "work"
    )
    for better in ({"warmup_steps": 1}, {"schedule": "constant"}):
        assert peak_warning(run_of(steps, **{**optimizer, **better})) is None


def test_the_rates_are_those_of_transformers():
    """Of cosine_warmup_with_min_lr, which like ours reaches the final share at the last step."""
    weights = [torch.nn.Parameter(torch.zeros(1))]
    config = run_of(20, warmup_steps=4).optimizer
    theirs = transformers.get_scheduler(
        "cosine_warmup_with_min_lr",
        torch.optim.SGD(weights, lr=config.learning_rate),
        num_warmup_steps=4,
        num_training_steps=20,
        scheduler_specific_kwargs={"min_lr_rate": config.final_fraction},
    )
    for step in range(20):
        rate = float(learning_rate(config, 20, jnp.asarray(step)))
        assert rate == pytest.approx(theirs.get_last_lr()[0], rel=1e-5)
        theirs.optimizer.step()
        theirs.step()


def test_training_warns(tmp_path, monkeypatch, capsys):
    """Once epochs have become steps."""

    class Compared(Exception):
        """The processes' settings are compared next."""

    def stop(shared):
        raise Compared

    monkeypatch.setattr(loop, "require_same", stop)
    monkeypatch.setattr(loop, "make_mesh", lambda *_, **__: None)
    config = run_of(100, warmup_steps=5)
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, epochs=0.5),
        run_dir=str(tmp_path / "run"),
        mesh=dataclasses.replace(config.mesh, fsdp=jax.device_count()),
    )
    with_steps = dataclasses.replace(config, train=config.train.for_epochs(6))
    objective = SimpleNamespace(config=with_steps, origin="", fingerprint="", inputs={})
    with pytest.raises(Compared):
        loop.train(config, lambda *_: objective, [])
    printed = capsys.readouterr().err
    assert "warning: optimizer.warmup_steps: found 5, a warm-up of 5 steps, but the run" in printed
