"""The trajectory objective: predicts actions over several episodes in one context."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from data.errors import UserError
from data.trajectories.builder import PreparedTrajectories, prepare_trajectories
from data.trajectories.options import TrajectoryConfig
from data.trajectories.rows import (
    Decisions,
    Scales,
    cut,
    decisions,
    held_steps,
    relabelled,
    row,
)
from data.trajectories.tasks import get_task
from data.untrusted_files import read_json
from model.agentic import AgenticTransformer, TrajectorySizes
from model.attention.layout import permutation
from model.config import TransformerConfig
from model.loss import LossSums

from .build import build_agentic
from .checkpoint.manifest import fingerprint
from .checkpoint.readers import assets_dir, restore_model
from .config import load as configuration
from .config.schema import RunConfig
from .mesh import LocalPart, batch_sharding, is_abstract, local_part, place_batch
from .model_source import scratch_config
from .objective import DeviceBatch, HostBatch, Loss, LossParams, Objective, Params, Totals
from .run.cluster import first_then_others

ASSET = "trajectories.json"
"""File in a checkpoint's assets that describes the inputs."""
SAMPLED = 256
"""The most episodes used to compute the scales of states."""


def trajectory_batch(
    rows: int, length: int, mesh: Mesh, sizes: TrajectorySizes
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a batch's shapes, dtypes and shardings; see `model.agentic.AgenticTransformer`."""

    def array(dtype, *rest):
        return jax.ShapeDtypeStruct((rows, length, *rest), dtype, sharding=batch_sharding(mesh))

    integers = {name: array(np.int32) for name in ("kinds", "positions", "index", "segment_ids")}
    return {
        "values": array(np.float32, sizes.width),
        "targets": array(np.float32, sizes.action),
        "loss_weights": array(np.float32),
        **integers,
    }


def _sizes(options: TrajectoryConfig) -> TrajectorySizes:
    """Returns the sizes of the task's states and actions."""
    task = get_task(options.task)
    return TrajectorySizes(task.observation_size, task.action_size, options.components)


def trajectory_model(config: RunConfig) -> TransformerConfig:
    """Returns the run's transformer: that of the checkpoint `model.path`, or the section's.

    There is no vocabulary; size 1 keeps it out of FLOPs and memory.

    Raises:
      UserError, ValueError: as `stored_shape` and `scratch_config`.
    """
    if config.model.path:
        shape = stored_shape(assets_dir(config.model.path)).with_positions(**config.model.overrides)
    else:
        shape = scratch_config(config.model)
    return dataclasses.replace(shape, vocab_size=1).with_length(config.data.context_length)


def stored_shape(assets: Path) -> TransformerConfig:
    """Returns the shape of the transformer in a checkpoint on trajectories.

    Raises:
      UserError: it is not a trajectory model.
    """
    if not (assets / ASSET).exists():
        raise UserError(
            f"{assets.parent}: not a trajectory model; a checkpoint of a recipe with a "
            "section trajectories would work"
        )
    fields = read_json(assets / "config.json", assets)
    return TransformerConfig.from_hf_dict(
        fields | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    )


class Contexts:
    """Draws the episodes of each row, as a function of the seed and the row's number.

    Attributes:
      episodes: indices of the episodes to draw from.
      divide: whether consecutive rows divide all episodes among them, in a new order each time,
        instead of each row drawing from all.
    """

    def __init__(
        self,
        prepared: PreparedTrajectories,
        episodes: Int[np.ndarray, " n"],
        config: TrajectoryConfig,
        seed: int,
        scales: Scales,
        length: int,
        divide: bool = False,
    ) -> None:
        self.prepared, self.episodes, self.config = prepared, episodes, config
        self.divide = divide
        self.seed, self.scales, self.length = seed, scales, length
        self._read = functools.lru_cache(maxsize=2048)(self._decisions)

    def _decisions(self, episode: int) -> Decisions:
        return decisions(self.prepared.episode(episode), self.config.action_repeat)

    def numbers(self, row_number: int) -> list[int]:
        """Returns the episodes of a row, all different."""
        count = self.config.in_context
        if self.divide:
            time, part = divmod(row_number, self.rows)
            order = np.random.default_rng((self.seed, time)).permutation(self.episodes)
            # The last row is filled up with episodes of the first one.
            drawn = order.take(range(part * count, (part + 1) * count), mode="wrap")
        else:
            generator = np.random.default_rng((self.seed, row_number))
            drawn = generator.choice(self.episodes, count, replace=False)
        return [int(episode) for episode in drawn]

    @property
    def rows(self) -> int:
        """How many rows the episodes fill."""
        return math.ceil(len(self.episodes) / self.config.in_context)

    def row(self, row_number: int) -> dict[str, np.ndarray]:
        """Returns a row's arrays [L, ...]; see `data.trajectories.rows.row`."""
        trajectories = relabelled([self._read(episode) for episode in self.numbers(row_number)])
        return row(
            [
                self._cut(trajectory, row_number, rank)
                for rank, trajectory in enumerate(trajectories)
            ],
            self.scales,
            self.length,
            self.config,
        )

    def _cut(self, trajectory: Decisions, row_number: int, rank: int) -> Decisions:
        count = self.config.decisions
        if not count or count >= len(trajectory.reward):
            return trajectory
        generator = np.random.default_rng((self.seed, row_number, rank))
        return cut(trajectory, int(generator.integers(len(trajectory.reward) - count + 1)), count)


class TrajectoryObjective(Objective):
    """In-context RL: predicts actions from earlier returns to go, states and rewards.

    Attributes:
      config: the run's configuration.
      prepared: the episodes; scales: the divisors of their numbers.
      contexts: the training rows.
      warnings: lines for the user about the data, before training.
    """

    model: AgenticTransformer
    weight_name = "actions"
    sources = ()

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        """Prepares the episodes (in process 0, for all) and a model of their sizes.

        Args:
          mesh: `abstract_mesh` in a dry run, which places nothing and does its own printing.

        Raises:
          UserError, ValueError: the model or the data cannot be used; one line that says what would
            work.
        """
        # There are no epochs: rows are drawn endlessly.
        config = dataclasses.replace(config, train=config.train.for_epochs(self.rows_per_epoch))
        self.config, self.mesh = config, mesh
        options = config.trajectories
        path = options.path
        assert path is not None
        self.loss_name = (
            "squared_error_per_action" if options.components == 1 else "nats_per_action"
        )
        self.sizes = _sizes(options)
        self.model = build_agentic(config, trajectory_model(config), mesh, self.sizes)
        show = config.logging.console
        self.prepared = first_then_others(
            lambda key: prepare_trajectories(
                path, options.task, config.data.prepared, show and key is None, key
            ),
            lambda prepared: prepared.key,
        )
        self.warnings: list[str] = []
        prints = not is_abstract(mesh) and jax.process_index() == 0
        if prints:
            print(self.prepared.report, flush=True)
        self._split()
        self._warn_of_other_units()
        for warning in self.warnings if prints else ():
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        self.tokens_per_batch = config.train.batch_size * config.data.context_length
        self.layout_order = permutation(
            config.data.context_length, mesh.shape["sequence"], config.attention.layout
        )
        texts = [
            self.prepared.key,
            json.dumps(dataclasses.asdict(dataclasses.replace(options, path=None)), sort_keys=True),
            config.data.seed,
            config.data.context_length,
            config.train.batch_size,
            config.data.held_out_fraction,
        ]
        self.fingerprint = hashlib.sha256("\n".join(map(str, texts)).encode()).hexdigest()[:16]

    @classmethod
    def abstract_model_and_batch(
        cls, config: RunConfig, shape: TransformerConfig, mesh: Mesh
    ) -> tuple[AgenticTransformer, dict[str, jax.ShapeDtypeStruct]]:
        """See `Objective`."""
        sizes = _sizes(config.trajectories)
        batch = trajectory_batch(config.train.batch_size, config.data.context_length, mesh, sizes)
        return build_agentic(config, shape, mesh, sizes), batch

    @classmethod
    def loss_and_totals(
        cls, config: RunConfig, model: AgenticTransformer
    ) -> tuple[Loss, Totals | None]:
        """See `Objective`."""
        return model.loss, None

    @functools.cached_property
    def origin(self) -> str:
        """See `Objective`."""
        path = self.config.model.path
        return fingerprint(assets_dir(path).parent) if path else ""

    @functools.cached_property
    def part(self) -> LocalPart:
        """The part of each batch that this process makes."""
        rows, length = self.config.train.batch_size, self.config.data.context_length
        return local_part(self.mesh, rows, length)

    def _split(self) -> None:
        """Chooses the training and the held-out episodes."""
        options, data, returns = self.config.trajectories, self.config.data, self.prepared.returns
        best_first = np.argsort(-returns, kind="stable")
        chosen = np.sort(best_first[: max(1, round(options.best * len(returns)))])
        # Equal in all stages of a curriculum, though their seeds differ.
        shuffled = np.random.default_rng(len(chosen)).permutation(chosen)
        held_out = round(len(chosen) * data.held_out_fraction)
        self.has_held_out = held_out >= options.in_context
        trained = np.sort(shuffled[held_out if self.has_held_out else 0 :])
        self._check_episodes(chosen, len(trained), held_out)
        sample = trained[np.linspace(0, len(trained) - 1, min(SAMPLED, len(trained))).astype(int)]
        states, held = [], []
        for number in sample:
            episode = self.prepared.episode(int(number))
            states.append(decisions(episode, options.action_repeat).state)
            held.append(held_steps(episode, options.action_repeat))
        self._warn_of_lost_steps(held)
        self.target_return = float(returns.max())
        self.scales = Scales.of(np.concatenate(states), self.target_return)
        draw = functools.partial(
            Contexts, self.prepared, config=options, scales=self.scales, length=data.context_length
        )
        self.contexts = draw(trained, seed=data.seed)
        self._held_out = draw(np.sort(shuffled[:held_out]), seed=data.seed + 1, divide=True)

    def _check_episodes(
        self, chosen: Int[np.ndarray, " episodes"], trained: int, held_out: int
    ) -> None:
        """Checks that a row holds its episodes, and warns if none are held out.

        Args:
          chosen: indices of the episodes to train on and of those to hold out.
          trained, held_out: their counts; the latter may be too few for a context.

        Raises:
          UserError: there are too few episodes, one has no decision, or a row is too short.
        """
        options, data = self.config.trajectories, self.config.data
        if trained < options.in_context:
            raise UserError(
                f"trajectories.in_context: found {options.in_context}, but {options.path} has "
                f"{trained} episodes to train on; a smaller number, or more episodes, would work"
            )
        lengths = self.prepared.lengths[chosen]
        if lengths.min() < options.action_repeat:
            raise UserError(
                f"trajectories.action_repeat: found {options.action_repeat}, but the shortest "
                f"episode of {options.path} has {lengths.min()} steps; at most {lengths.min()} "
                "would work"
            )
        counts = lengths // options.action_repeat
        most = int(min(counts.max(), options.decisions or counts.max()))
        longest = most * options.in_context * options.tokens_per_decision
        if longest > data.context_length:
            raise UserError(
                f"data.context_length: found {data.context_length}, needs at least {longest} for "
                f"{options.in_context} episodes of {most} decisions; a larger action_repeat, fewer "
                "decisions or fewer episodes would work too"
            )
        if not self.has_held_out and data.held_out_fraction:
            self.warnings.append(
                f"no held-out loss: data.held_out_fraction {data.held_out_fraction:g} of "
                f"{len(chosen)} episodes is {held_out}, and a context takes {options.in_context}; "
                "raise data.held_out_fraction"
            )

    def _warn_of_lost_steps(self, held: Sequence[int]) -> None:
        """Warns of actions and steps that no decision has.

        Args:
          held: of some episodes, for how many steps their actions are held.
        """
        repeat, lengths = self.config.trajectories.action_repeat, self.prepared.lengths
        if changing := sum(steps < repeat for steps in held):
            self.warnings.append(
                f"trajectories.action_repeat: found {repeat}, but the actions of {changing} of "
                f"{len(held)} episodes change within {repeat} steps, and only the first of each "
                f"{repeat} is learned; action_repeat {math.gcd(*held)} would learn all"
            )
        if cut_short := int(np.count_nonzero(lengths % repeat)):
            self.warnings.append(
                f"trajectories.action_repeat: found {repeat}, which does not divide the steps of "
                f"{cut_short} of {len(lengths)} episodes; their last {(lengths % repeat).max()} "
                "steps or fewer are left out"
            )

    def _warn_of_other_units(self) -> None:
        """Warns if the checkpoint `model.path` has learned another task, or returns that were
        divided by another number."""
        path, task = self.config.model.path, self.config.trajectories.task
        if not path:
            return
        assets = assets_dir(path)
        learned = read_json(assets / ASSET, assets)
        scale = learned["scales"]["return_scale"]
        if (learned["task"], scale) != (task, self.scales.return_scale):
            self.warnings.append(
                f"model.path: {path} has learned {learned['task']}, with returns divided by "
                f"{scale:.1f}; here those of {task} are divided by {self.scales.return_scale:.1f}, "
                "and states normalized by these episodes"
            )

    def loss(self, params: LossParams, batch: DeviceBatch) -> LossSums:
        """Returns the sums of action losses (squared errors, or a mixture's nats) and of weights.

        See `AgenticTransformer.loss`.
        """
        return self.model.loss(params, batch)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """See `trajectory_batch`."""
        return trajectory_batch(
            self.config.train.batch_size, self.config.data.context_length, self.mesh, self.sizes
        )

    def batches(self, step: int) -> Iterator[HostBatch]:
        """Yields this process's part of each batch from `step` on, in the mesh's layout."""
        while True:
            yield self._batch(self.contexts, step)
            step += 1

    def held_out(self) -> Iterator[HostBatch]:
        """Yields batches with each held-out episode, some again to fill the last row and batch;
        none if too few are held out."""
        if self.has_held_out:
            for number in range(math.ceil(self._held_out.rows / self.config.train.batch_size)):
                yield self._batch(self._held_out, number)

    def _batch(self, contexts: Contexts, number: int) -> HostBatch:
        first = number * self.config.train.batch_size
        rows = [contexts.row(first + int(i)) for i in self.part.rows]
        tokens = self.layout_order[self.part.tokens]
        return {name: np.stack([row[name][tokens] for row in rows]) for name in rows[0]}

    def to_device(self, batch: HostBatch) -> DeviceBatch:
        """Returns the global arrays of `batch`, this process's part."""
        return place_batch(dict(batch), self.mesh, self.part)

    def _episodes(self, step: int) -> list[int]:
        first, rows = step * self.config.train.batch_size, self.config.train.batch_size
        return [
            episode
            for number in range(first, first + rows)
            for episode in self.contexts.numbers(number)
        ]

    def record_ids(self, step: int) -> list[str]:
        """Returns the numbers of the episodes in the batch of a step."""
        return [f"episode {episode}" for episode in self._episodes(step)]

    def lengths(self, step: int) -> Int[np.ndarray, " rows"]:
        """Returns the tokens of each row; its trajectories attend to each other."""
        options = self.config.trajectories
        counts = self.prepared.lengths[self._episodes(step)] // options.action_repeat
        counts = np.minimum(counts, options.decisions) if options.decisions else counts
        return counts.reshape(-1, options.in_context).sum(1) * options.tokens_per_decision

    def read_params(self) -> Params:
        """Draws the parameters, or reads those of the checkpoint `model.path`.

        Raises:
          ValueError: the checkpoint is damaged, or of another shape.
        """
        if not self.config.model.path:
            return self.model.init(self.config.model.seed)
        shapes = {name: parameter.shape for name, parameter in self.model.parameters.items()}
        return restore_model(
            self.config.model.path, self.model.shardings, dtype="float32", shapes=shapes
        )

    def write_assets(self, folder: Path) -> None:
        """Writes config.json, trajectories.json (the inputs), and the configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        options, returns = self.config.trajectories, self.prepared.returns
        inputs = {
            "task": options.task,
            "sizes": self.sizes._asdict(),
            "options": dataclasses.asdict(options),
            "scales": {
                "mean": self.scales.mean.tolist(),
                "std": self.scales.std.tolist(),
                "return_scale": self.scales.return_scale,
            },
            "target_return": self.target_return,
            "data": {
                "episodes": len(returns),
                "best": float(returns.max()),
                "mean": float(returns.mean()),
                "key": self.prepared.key,
            },
        }
        (folder / ASSET).write_text(json.dumps(inputs, indent=2) + "\n", encoding="utf-8")
        config = self.model.config.to_hf() | {
            "architectures": ["AgenticTransformer"],
            "model_type": "agentic_transformer",
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "run.yaml").write_text(configuration.dump(self.config), encoding="utf-8")
