"""The contract of objectives and evaluations: a small regression on continuous arrays runs through
the whole loop."""

import os
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.attention import Mask
from model.attention.names import BATCH_AXES
from model.loss import LossSums, SourceSums
from model.sharding import Parameter
from tests import small_run
from tests.model.build import tiny
from trainer.config.schema import (
    CheckpointConfig,
    LoggingConfig,
    MeshConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from trainer.evaluation import HeldOutLoss
from trainer.loop import train
from trainer.objective import Objective
from trainer.run.preemption import Preempted

STEPS, ROWS, LENGTH = 6, 16, 4
TRUTH = np.array([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]], np.float32)


class Regression(Objective):
    """Actions [B, L, 2] from observations [B, L, 3], with a weight per row [B]."""

    loss_name, weight_name, sources, has_held_out = "squared_error", "rows", (), True
    tokens_per_batch, fingerprint, origin = ROWS * LENGTH, "data", ""
    stop_at = None

    def __init__(self, config, mesh):
        self.config = config
        self.model = SimpleNamespace(
            mesh=mesh,
            config=tiny(),
            mask=Mask(),
            unpadded_shapes={"layers.weight": (1, 3, 2), "bias": (2,)},
            parameters={
                "layers.weight": Parameter((1, 3, 2), ("layers", "embed", "vocab")),
                "bias": Parameter((2,), ("vocab",)),
            },
            shardings=dict.fromkeys(
                ("layers.weight", "bias"), NamedSharding(mesh, PartitionSpec())
            ),
        )

    def loss(self, params, batch):
        errors = (
            batch["observations"] @ params["layers.weight"][0] + params["bias"] - batch["actions"]
        )
        none = jnp.zeros(0)
        return LossSums(
            (batch["weights"] * (errors**2).sum((1, 2))).sum(),
            batch["weights"].sum(),
            SourceSums(none, none),
            {},
            {"largest_error": (batch["weights"] * jnp.abs(errors).max((1, 2))).sum()},
        )

    def abstract_batch(self):
        tokens = PartitionSpec(BATCH_AXES, "sequence")
        shapes = {
            "observations": ((ROWS, LENGTH, 3), tokens),
            "actions": ((ROWS, LENGTH, 2), tokens),
            "weights": ((ROWS,), PartitionSpec(BATCH_AXES)),
        }
        return {
            name: jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=NamedSharding(self.model.mesh, spec)
            )
            for name, (shape, spec) in shapes.items()
        }

    def batch(self, seed):
        rng = np.random.default_rng(seed)
        observations = rng.normal(size=(ROWS, LENGTH, 3)).astype(np.float32)
        return {
            "observations": observations,
            "actions": observations @ TRUTH,
            "weights": np.arange(ROWS, dtype=np.float32),
        }

    def batches(self, step):
        while True:
            if step == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield self.batch(step)
            step += 1

    def held_out(self):
        yield self.batch(1000)

    def to_device(self, batch):
        return {
            name: jax.device_put(batch[name], abstract.sharding)
            for name, abstract in self.abstract_batch().items()
        }

    def record_ids(self, step):
        return [f"episode {step}"]

    def lengths(self, step):
        return np.full(ROWS, LENGTH)

    def read_params(self):
        return {
            name: jnp.zeros(parameter.shape) for name, parameter in self.model.parameters.items()
        }

    def write_assets(self, folder):
        folder.mkdir()
        (folder / "policy.json").write_text("{}")


class WeightError:
    """The distance between the weights and the true ones."""

    name, every = "weight_error", 2

    def prepare(self, objective, builder):
        self.prepared = True

    def run(self, params, step):
        assert self.prepared
        return {"largest": float(np.abs(np.asarray(params["layers.weight"][0]) - TRUTH).max())}


def run(folder, objective=Regression, accumulation=1):
    """Trains in `folder`; returns the rows of its three logs, without timings."""
    config = RunConfig(
        name="regression",
        run_dir=str(folder),
        mesh=MeshConfig(data=2, fsdp=2, sequence=2, simulate=8),
        optimizer=OptimizerConfig(learning_rate=0.1),
        checkpoint=CheckpointConfig(every=0),
        train=TrainConfig(
            steps=STEPS, batch_size=ROWS, accumulation=accumulation, evaluate_every=3
        ),
        logging=LoggingConfig(tensorboard=False, console=False),
    )
    assert train(
        config, objective, [HeldOutLoss(every=3), WeightError()]
    ) == folder / "checkpoints" / str(STEPS)
    return logs(folder)


def logs(folder):
    return {
        name: list(map(small_run.without_measured, small_run.rows(folder / f"{name}.jsonl")))
        for name in ("metrics", "held_out", "weight_error")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole") / "run")


def test_arbitrary_arrays_are_trained_on_and_metrics_have_the_objectives_names(whole):
    assert [row["step"] for row in whole["metrics"]] == list(range(1, STEPS + 1))
    first, last = whole["held_out"][0], whole["held_out"][-1]
    assert [row["step"] for row in whole["held_out"]] == [0, 3, 6]
    assert last["held_out_squared_error"] < first["held_out_squared_error"] and last[
        "held_out_rows"
    ] == sum(range(ROWS))
    assert (
        whole["metrics"][0]["rows"] == sum(range(ROWS))
        and whole["metrics"][0]["padding_share"] == 0
    )
    batch = Regression.batch(None, 0)
    expected = (batch["weights"] * (batch["actions"] ** 2).sum((1, 2))).sum() / batch[
        "weights"
    ].sum()
    assert whole["metrics"][0]["squared_error"] == pytest.approx(expected, rel=1e-5)
    largest = batch["weights"] * np.abs(batch["actions"]).max((1, 2))
    assert whole["metrics"][0]["largest_error"] == pytest.approx(
        largest.sum() / batch["weights"].sum(), rel=1e-5
    )
    assert last["held_out_largest_error"] < first["held_out_largest_error"]


def test_an_evaluation_has_its_own_interval_and_file(whole):
    assert [row["step"] for row in whole["weight_error"]] == [0, 2, 4, 6]
    assert whole["weight_error"][0]["largest"] == 3 > whole["weight_error"][-1]["largest"]


def test_accumulation_gives_the_same_run(whole, tmp_path):
    parts = run(tmp_path / "run", accumulation=2)
    for row, expected in zip(parts["metrics"], whole["metrics"], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stop_at", [2, 3, 5])
def test_stopping_and_resuming_gives_the_same_run(whole, tmp_path, stop_at):
    """SIGTERM arrives while the batch of step `stop_at` is fetched; the next start begins with the
    evaluations that were due."""
    stopping = type("Stopping", (Regression,), {"stop_at": stop_at})
    with pytest.raises(Preempted, match=f"checkpoints/{stop_at};"):
        run(tmp_path / "run", stopping)
    assert len(logs(tmp_path / "run")["metrics"]) == stop_at
    assert run(tmp_path / "run") == whole
