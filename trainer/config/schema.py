"""Every section and field of a recipe: types, documentation (for `--help`) and rules.

A section whose values break one of its rules raises ValueError: `section.field: found ..., needs
...`. Rules across sections are in trainer.config.checks.
"""

import dataclasses
import hashlib
import math
import os
import pathlib
import re
import secrets
from typing import Any, Literal

from data.lengths import with_lengths
from data.paths import cache_folder, expanded
from data.trajectories.options import TrajectoryConfig
from model.adapter import AdapterConfig
from model.attention.names import Tokens
from model.attention.options import AttentionConfig
from model.config import ADJUSTABLE
from model.memory.options import MemoryConfig
from model.rope_config import require_scaling

from .data import DataConfig
from .mesh import DistributedConfig, MeshConfig
from .optimizer import OptimizerConfig
from .preference import PreferenceConfig
from .require import require, require_at_least
from .stage import LENGTHS, StageConfig

VERSION = 2
# Of this process; containers that share a cache folder have equal process ids.
_PROCESS = secrets.token_hex(4)
# Stores that can hold a run.
GCS = "gs://"
BUCKETS = (GCS, "s3://")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model to train, and which of its parameters."""

    path: str | None = None
    """Pretrained model: a Hugging Face folder, a Longstripe checkpoint, or org/name[@revision],
    downloaded from the hub unless cached (--no-download forbids it). On the command line it
    replaces the recipe's preset and overrides of a model from scratch."""
    preset: str | None = None
    """Shape of a model trained from scratch: a TransformerConfig preset, such as llama-7b or
    tiny."""
    tokenizer: str | None = None
    """Folder, file or hub name of the tokenizer; required from scratch, by default the model's."""
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """TransformerConfig fields that replace the preset's (llama-7b by default) for a model from
    scratch, including rope_theta and rope_scaling, as in Hugging Face's config.json; key heads and
    head_dim follow from the others if not given. For a pretrained model only rope_theta,
    rope_scaling, max_position_embeddings and, of a mixture, output_router_logits,
    router_aux_loss_coef and router_z_loss_coef can be set."""
    trainable: str = ".*"
    """Regular expression that full names of trained parameters match; the others stay frozen."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of activations, of transferred keys and values, and of weights that adapters leave
    frozen; for trained weights and moments see optimizer.weight_dtype and moment_dtype."""
    seed: int = 0
    """Seed of the initializer of a model from scratch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", with_lengths(self.overrides, LENGTHS))
        require_scaling("model.overrides.rope_scaling", self.overrides.get("rope_scaling"))
        require(
            not (self.path and self.preset),
            "model.preset",
            self.preset,
            "to be left out with model.path; keep one of them",
        )
        require(
            not self.path or set(self.overrides) <= set(ADJUSTABLE),
            "model.overrides",
            self.overrides,
            f"the others left out: model.path fixes all but {', '.join(ADJUSTABLE)}",
        )
        try:
            re.compile(self.trainable)
        except re.error as error:
            raise ValueError(
                f"model.trainable: found {self.trainable!r}, needs a regular expression: {error}"
            ) from error


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length of training, and its batches."""

    steps: int = 100
    """Optimizer steps of the whole run; the decay depends on it."""
    epochs: float | None = None
    """Passes over the data, such as 3 or 0.5, instead of steps. A batch may end one epoch and begin
    the next; the last one has only the rows that are left. All epochs count as long as the first;
    with source weights they differ a little."""
    batch_size: int = 1
    """Rows of context_length tokens in a step, over all devices; a multiple of mesh.data *
    mesh.fsdp * mesh.expert * accumulation."""
    accumulation: int = 1
    """Number of microbatches per step; the result equals that of all rows at once."""
    non_finite: Literal["stop", "skip"] = "stop"
    """After a non-finite loss or gradient, stop the run, or skip that step's update."""
    evaluate_every: int = 0
    """Steps between held-out losses; 0 measures only before the first and after the last step."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl and updates of the progress bar; without a terminal, the
    first is printed, then one every 30 seconds or 20th of the run, whichever is sooner."""

    def __post_init__(self) -> None:
        require_at_least(self, "train", 1, "steps", "batch_size", "accumulation", "log_every")
        require_at_least(self, "train", 0, "evaluate_every")
        require(
            self.epochs is None or 0 < self.epochs < math.inf,
            "train.epochs",
            self.epochs,
            "a positive number",
        )

    def for_epochs(self, rows: int | None) -> "TrainConfig":
        """Returns the section with steps computed from its epochs; itself without epochs.

        Args:
          rows: per epoch; None if rows are drawn endlessly.

        Raises:
          ValueError: there are epochs to train, but the data have none.
        """
        if self.epochs is None:
            return self
        require(
            rows is not None,
            "train.epochs",
            self.epochs,
            "to be left out, since rows are drawn endlessly; give train.steps",
        )
        require(
            rows != 0,
            "train.epochs",
            self.epochs,
            "to be left out, since the sources' weights leave no row in the first epoch; give "
            "train.steps",
        )
        steps = math.ceil(self._rows_of_epochs(rows or 0) / self.batch_size)
        return dataclasses.replace(self, steps=steps)

    def rows_taken(self, steps: int, per_epoch: int | None) -> int:
        """Returns the rows that the first `steps` steps train: all of their batches, except that
        the last step of `epochs` takes only the rows that are left.

        Args:
          per_epoch: rows per epoch; None if rows are drawn endlessly.
        """
        rows = steps * self.batch_size
        if self.epochs is None or per_epoch is None:
            return rows
        return min(rows, self._rows_of_epochs(per_epoch))

    def _rows_of_epochs(self, per_epoch: int) -> int:
        assert self.epochs is not None
        rows = round(self.epochs * per_epoch, 9)  # 0.07 * 100 is a little more than 7
        return max(1, math.ceil(rows))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, and how many to keep."""

    every: int = 100
    """Steps between checkpoints; the last step is always saved. 0 saves only the last."""
    minutes: float = 0.0
    """Also save after this many minutes without a checkpoint; 0: only `every` counts."""
    grace_seconds: float = 25.0
    """Seconds between SIGTERM and the forced end. The running step is finished and saved if earlier
    steps and saves suggest that this is enough; otherwise the run ends at once, and resumes from
    the newest checkpoint. 0 always finishes the step."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    local: str | None = None
    """Folder on each host's disk or in its memory (such as /dev/shm/longstripe), for checkpoints
    between those in run_dir: each process saves its part there, with a copy on the next host; a
    restart of the same processes on the same mesh continues from them if at most one host is lost.
    null: no local checkpoints."""
    local_every: int = 0
    """Steps between local checkpoints; at most two take space at a time."""
    best: str | None = None
    """Metric of an evaluation, such as held_out_loss_nats_per_target: each new best saves a
    checkpoint, kept in addition to the newest ones until there is a better one. RUN/best points to
    it, for exports and evaluations."""
    best_is: Literal["lowest", "highest"] | None = None
    """Whether lower or higher values are better; by default lower ones of a loss, and higher ones
    of any other metric."""
    patience: int = 0
    """Measurements, such as those every train.evaluate_every steps, without a new best after which
    the run ends; 0 trains to the last step."""

    def __post_init__(self) -> None:
        require_at_least(
            self, "checkpoint", 0, "every", "patience", "minutes", "grace_seconds", "local_every"
        )
        require_at_least(self, "checkpoint", 1, "keep")
        require(
            self.local is None or self.local.startswith(("/", "~/")) or "://" in self.local,
            "checkpoint.local",
            self.local,
            "an absolute path on each host, such as /dev/shm/longstripe",
        )
        require(
            self.local is None or self.local_every > 0,
            "checkpoint.local_every",
            self.local_every,
            "at least 1, the steps between the checkpoints in checkpoint.local",
        )
        require(
            self.local is not None or not self.local_every,
            "checkpoint.local",
            None,
            "a folder on each host, such as /dev/shm/longstripe, with checkpoint.local_every",
        )
        require(
            self.best is not None or not self.patience,
            "checkpoint.patience",
            self.patience,
            "0, or checkpoint.best with the name of a metric",
        )
        if self.best is None and self.best_is == "lowest":  # the default in earlier versions
            object.__setattr__(self, "best_is", None)

    @property
    def best_value(self) -> Literal["lowest", "highest"]:
        """Which value of `best` is the best one."""
        is_loss = re.match("held_out_.*(loss|error|nats)", self.best or "")
        return self.best_is or ("lowest" if is_loss else "highest")


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    console: bool = True
    """Show a progress bar."""
    wandb: str | None = None
    """Weights & Biases project to send metrics to; needs the package wandb."""
    profile_steps: tuple[int, ...] = ()
    """First and last step of a profile, such as [10, 13] (on the command line also --profile_steps
    10:13), written to the run's folder `profile`; none unless given."""
    profile_processes: tuple[int, ...] = ()
    """Processes, such as [0], that write profiles; all unless given."""

    def __post_init__(self) -> None:
        require(
            (self.wandb or "").lower() not in ("none", "false", "all", "tensorboard"),
            "logging.wandb",
            self.wandb,
            "the name of a project, or null to send nothing",
        )
        steps = self.profile_steps
        require(
            not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1]),
            "logging.profile_steps",
            steps,
            "the first and the last step of a profile, counted from 1, or []",
        )


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Prompts that the model answers during training, with the most likely tokens.

    Answers appear in the console, RUN/samples.jsonl, TensorBoard and eval.report."""

    prompts: tuple[str, ...] = ()
    """The users' first turns, or beginnings of texts if the recipe has no chat template; none by
    default."""
    every: int = 0
    """Steps between answers; 0 answers only before the first and after the last step."""
    new_tokens: Tokens = 64
    """Tokens of the longest answer."""

    def __post_init__(self) -> None:
        require_at_least(self, "samples", 0, "every")
        require_at_least(self, "samples", 1, "new_tokens")
        require(
            all(prompt.strip() for prompt in self.prompts)
            and len({*self.prompts, "step"}) == len(self.prompts) + 1,
            "samples.prompts",
            list(self.prompts),
            "different texts, none of them empty or 'step'",
        )
        require(
            bool(self.prompts) or not self.every,
            "samples.prompts",
            [],
            "at least one prompt with samples.every, such as '[\"Who are you?\"]'",
        )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The configuration of a run."""

    config_version: int = VERSION
    """Version of this format."""
    name: str = ""
    """Name of the run; the recipe's file name by default."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    trajectories: TrajectoryConfig = dataclasses.field(default_factory=TrajectoryConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    auto: tuple[Literal["mesh", "memory", "positions"], ...] = ()
    """What the planner chooses for the available devices, out of mesh, memory and positions. mesh
    (also written mesh: auto): the axes, and train.accumulation if a batch must be computed in
    parts; memory (memory: auto): what is kept; positions: stretches a pretrained model's RoPE to
    the longest document, if it is longer than what the model is trained for."""
    planned: str = ""
    """The planner's answer to `auto` and its reason, recorded by the run."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    adapter: AdapterConfig = dataclasses.field(default_factory=AdapterConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    evaluations: tuple[dict[str, Any], ...] = ()
    """Long-context tests during training, each {test, every, tokens, count, rows, chunk, name} plus
    that test's fields (--help evaluations); each writes RUN/NAME.jsonl, NAME being the test by
    default."""
    samples: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    stages: tuple[StageConfig, ...] = ()
    """A curriculum, each {context_length, steps, batch_size, learning_rate, mesh, rope, ...}
    (--help stages): stages are trained in order, each from the previous one's last parameters, and
    the same command continues in any of them."""
    run_dir: str | None = None
    """Folder of the run, local or in a bucket (gs://, s3://); runs/NAME by default."""
    compile_cache: str | None = None
    """Cache of compiled programs; $JAX_COMPILATION_CACHE_DIR, $LONGSTRIPE_CACHE/xla or
    ~/.cache/longstripe/xla by default. All processes read it and the first one writes: on shared
    storage (also gs://) one compiles for all."""

    def __post_init__(self) -> None:
        require(self.config_version == VERSION, "config_version", self.config_version, str(VERSION))
        names = [str(entry.get("name") or entry.get("test")) for entry in self.evaluations]
        taken = ("train", "metrics", "held_out", "samples")
        require(
            len({*names, *taken}) == len(names) + len(taken)
            and all(re.fullmatch(r"[\w-]+", name) for name in names),
            "evaluations.name",
            names,
            f"different names of letters, digits, _ and -, none of them {', '.join(taken[:-1])} "
            f"or {taken[-1]}",
        )
        require(
            "://" not in (self.run_dir or "")
            or (self.in_bucket and not set("*?[\\") & set(self.location)),
            "run_dir",
            self.run_dir,
            "a folder, or gs://BUCKET/FOLDER or s3://BUCKET/FOLDER without *, ?, [ and backslash",
        )
        mesh = self.mesh
        require(
            mesh.simulate in (0, mesh.devices) or "mesh" in self.auto,
            "mesh.simulate",
            mesh.simulate,
            f"the number of devices in the mesh, {mesh.product}: simulate {mesh.devices}, "
            "or change the mesh",
        )

    @property
    def in_bucket(self) -> bool:
        """Whether the run is kept in a bucket."""
        return (self.run_dir or "").startswith(BUCKETS)

    @property
    def location(self) -> str:
        """Where the run is kept, as other commands and messages name it."""
        return (self.run_dir or "").rstrip("/") if self.in_bucket else str(self.folder)

    @property
    def folder(self) -> pathlib.Path:
        """The run's folder; for one in a bucket, the local folder of its small files while this
        process runs."""
        if self.in_bucket:
            name = hashlib.sha256(self.location.encode()).hexdigest()[:20]
            return cache_folder("runs") / f"{name}-{os.getpid()}-{_PROCESS}"
        return expanded(self.run_dir or f"runs/{self.name}")
