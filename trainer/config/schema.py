"""Every section and field of a recipe: types, documentation (for `--help`) and rules.

A section whose values break one of its rules raises ValueError: `section.field: found ..., needs
...`. Rules across sections are in trainer.config.checks.
"""

import dataclasses
import datetime
import hashlib
import math
import os
import pathlib
import re
from typing import Any, Literal

from data.clean import CleanConfig
from data.conversation import DEFAULT_TEMPLATE
from data.lengths import with_lengths
from data.paths import cache_folder
from data.tokenizer import TEMPLATE_DATE
from data.trajectories.options import TrajectoryConfig
from model.adapter import AdapterConfig
from model.attention.names import Tokens
from model.attention.options import AttentionConfig
from model.config import ADJUSTABLE, POSITIONS
from model.memory.options import MemoryConfig

from .mesh import DistributedConfig, MeshConfig
from .optimizer import OptimizerConfig
from .preference import PreferenceConfig
from .require import require, require_at_least

VERSION = 2
# The stores that a run can be kept in.
GCS = "gs://"
BUCKETS = (GCS, "s3://")
# Fields of Hugging Face's config.json that hold a number of tokens; model.overrides and stages.rope
# also read 64K.
_LENGTHS = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model is trained, and which of its parameters."""

    path: str | None = None
    """Pretrained model: a Hugging Face folder, a Longstripe checkpoint, or org/name[@revision],
    which is downloaded from the hub unless it is cached (--no-download forbids it). On the command
    line it replaces the recipe's preset and overrides of a model from scratch."""
    preset: str | None = None
    """Shape of a model trained from scratch: a name of TransformerConfig.preset, such as llama-7b
    or tiny."""
    tokenizer: str | None = None
    """Folder or file of the tokenizer; required from scratch, otherwise the model's by default."""
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """TransformerConfig fields that replace the preset's (llama-7b by default) for a model from
    scratch, including rope_theta and rope_scaling, as in Hugging Face's config.json; key heads and
    head_dim follow from the others if not given. For a pretrained model only rope_theta,
    rope_scaling and max_position_embeddings can be set."""
    trainable: str = ".*"
    """Regular expression for the full names of trained parameters; the others stay frozen."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of activations and of transferred keys and values; parameters and moments are
    float32."""
    seed: int = 0
    """Seed of the initialiser of a model from scratch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", with_lengths(self.overrides, _LENGTHS))
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
class SourceConfig:
    """One file or folder of records."""

    path: str
    """File, or folder of files, here or in a store (gs://, s3://); or generated exercises of all
    sizes up to the context length: synthetic:TASK?count=2000&seed=0, with the tasks lines
    (&like=FILE for another wording), needles, key_values, variables and copying."""
    format: str = "sharegpt"
    """Format of the records: sharegpt (conversations), text (books: plain files, or JSON with
    `text`), tokens (.npy, or JSON with `tokens` and optional `loss_mask`) or preference (`prompt`,
    `chosen` and `rejected`, or `completion` and `label`)."""
    template: str | None = None
    """Chat template of this source's conversations; data.template by default."""
    weight: float = 1.0
    """How many times an epoch contains the source."""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """Meanings of the records' field names, such as {question: user, answer: assistant} or {dialog:
    messages, speaker: role}; see docs/data.md."""
    add_bos: bool | None = None
    """Whether each text of format: text begins with BOS; by default as the tokenizer does."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What the model is trained on."""

    path: str | None = None
    """One source, short for a list of one; on the command line it replaces the recipe's sources, or
    only the path of a single one."""
    template: str = DEFAULT_TEMPLATE
    """Chat template: tokenizer for the model's own, or vicuna_v1.1, koala, llama-2, llama-3,
    chatml, alpaca, plain. A base model has none, so choose one of the others."""
    add_control_tokens: bool = False
    """Add control tokens that the templates need and the tokenizer lacks, each with a new embedding
    row."""
    text_tokens: tuple[str, ...] = ()
    """Added tokens of the tokenizer that turns may contain, such as [<think>, </think>]: typed,
    they become these tokens."""
    template_date: str = TEMPLATE_DATE.date().isoformat()
    """Date, YYYY-MM-DD or `today`, for chat templates that write one (strftime_now); fixed so that
    the same data gives the same ids. Chats and evaluations of the model keep it."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false} for Qwen 3's; a record's
    field of this name precedes them. Chats and evaluations of the model keep them."""
    train_on: Literal["all", "last"] = "all"
    """Assistant turns in the loss: all of a conversation, or only its last one; a turn's own
    `train: false` leaves it out."""
    sources: tuple[SourceConfig, ...] = ()
    """The sources, each {path, format, template, weight, fields, add_bos}."""
    context_length: Tokens = 4096
    """Tokens in a packed row, such as 65536 or 64K (K and M are 2^10 and 2^20, in every field of
    tokens); a multiple of mesh.sequence, or of twice that for the layout zigzag."""
    prepared: str = "prepared"
    """Folder of the tokenized data sets; of one in a store (gs://, s3://), shards are copied to
    this machine when they are needed."""
    cache_gib: float = 64.0
    """GiB of this machine's disk for shards of a `prepared` in a store; those used least recently
    make room."""
    held_out_fraction: float = 0.05
    """Share of the conversations kept out of training for the held-out loss, unless held_out_path
    is given."""
    held_out_path: str | None = None
    """File or folder of held-out records, in the first source's format and template; replaces
    held_out_fraction."""
    clean: CleanConfig = dataclasses.field(default_factory=CleanConfig)
    """How conversations are cleaned before training; `clean: scraped` for scraped web chats. Texts
    and tokens are used unchanged, but for near duplicates of texts."""
    seed: int = 0
    """Seed of the order of the documents. The choice of held-out documents does not depend on
    it."""

    def __post_init__(self) -> None:
        require_at_least(self, "data", 1, "context_length")
        require(
            0 <= self.held_out_fraction < 1,
            "data.held_out_fraction",
            self.held_out_fraction,
            "a share from 0 to below 1",
        )
        # The day itself is recorded: a run that continues tomorrow keeps it.
        object.__setattr__(self, "template_date", _date(self.template_date))
        for index, source in enumerate(self.sources):
            require(
                source.weight > 0,
                f"data.sources[{index}].weight",
                source.weight,
                "a positive number",
            )


def _date(text: str) -> str:
    """Returns a date as YYYY-MM-DD, of `today` too."""
    if text == "today":
        return datetime.date.today().isoformat()
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(
            f"data.template_date: found {text!r}, needs a date as YYYY-MM-DD, or today"
        ) from None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length of training, and its batches."""

    steps: int = 100
    """Optimizer steps of the whole run; the decay depends on it."""
    epochs: float | None = None
    """Passes over the data, such as 3 or 0.5, instead of steps. Every epoch counts as long as the
    first; with weights of sources they differ a little."""
    batch_size: int = 1
    """Rows of context_length tokens in a step, over all devices; a multiple of mesh.data *
    mesh.fsdp * accumulation."""
    accumulation: int = 1
    """Number of microbatches into which a step's rows are divided; the result is that of all rows
    at once."""
    non_finite: Literal["stop", "skip"] = "stop"
    """After a non-finite loss or gradient, stop the run, or skip the update of that step."""
    evaluate_every: int = 0
    """Steps between held-out losses; 0 measures only before the first and after the last step."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl, and between updates of the progress bar; without a
    terminal, the first is printed, and then one every 30 seconds or 20th of the run, whichever is
    sooner."""

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
        """Returns the section with steps for its epochs; itself without epochs.

        Args:
          rows: per epoch; None if rows are drawn without end.

        Raises:
          ValueError: there are epochs to train, but the data have none.
        """
        if self.epochs is None:
            return self
        require(
            rows is not None,
            "train.epochs",
            self.epochs,
            "to be left out, since rows are drawn without end; give train.steps",
        )
        require(
            rows != 0,
            "train.epochs",
            self.epochs,
            "to be left out, since the sources' weights leave no row in the first epoch; give "
            "train.steps",
        )
        # 0.07 * 100 is a little more than 7.
        steps = round(self.epochs * (rows or 0) / self.batch_size, 9)
        return dataclasses.replace(self, steps=max(1, math.ceil(steps)))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every: int = 100
    """Steps between checkpoints; the last step is always saved. 0 saves only the last."""
    minutes: float = 0.0
    """Minutes after the last checkpoint at which another one is saved, whichever comes first; 0:
    `every` counts alone."""
    grace_seconds: float = 25.0
    """Seconds that may pass between SIGTERM and the end. The running step is finished and saved if,
    by the steps and saves before, that takes no longer; otherwise the run ends at once, and goes on
    from the newest checkpoint. 0 always finishes the step."""
    keep: int = 2
    """Newest checkpoints kept."""
    local: str | None = None
    """Folder of each host, on its disk or in its memory (such as /dev/shm/longstripe), for
    checkpoints between those in run_dir: each process saves its part there, with a copy on the next
    host, and a restart of the same processes on the same mesh goes on from them if all hosts but
    one are back. None: no local checkpoints."""
    local_every: int = 0
    """Steps between local checkpoints; at most two take space at a time."""
    best: str | None = None
    """Metric of an evaluation, such as held_out_loss_nats_per_target: each new best saves a
    checkpoint, which is kept in addition to the newest ones until there is a better one. RUN/best
    names it, for exports and evaluations."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """Whether lower or higher values of that metric are better."""
    patience: int = 0
    """Measurements without a new best after which the run ends; 0 trains to the last step."""

    def __post_init__(self) -> None:
        require_at_least(self, "checkpoint", 0, "every", "patience", "minutes", "grace_seconds")
        require_at_least(self, "checkpoint", 1, "keep")
        require_at_least(self, "checkpoint", 0, "local_every")
        require(
            self.local is None or self.local.startswith(("/", "~/")) or "://" in self.local,
            "checkpoint.local",
            self.local,
            "an absolute path of each host, such as /dev/shm/longstripe",
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
            "a folder of each host, such as /dev/shm/longstripe, with checkpoint.local_every",
        )
        require(
            self.best is not None or not self.patience,
            "checkpoint.patience",
            self.patience,
            "0, or checkpoint.best with the name of a metric",
        )


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    console: bool = True
    """Show a progress bar."""
    wandb: str | None = None
    """Weights & Biases project that receives the metrics too; needs the package wandb."""
    profile_steps: tuple[int, ...] = ()
    """First and last step of a profile, such as [10, 13], on the command line also --profile_steps
    10:13, written to the run's folder `profile`; none unless given."""
    profile_processes: tuple[int, ...] = ()
    """Processes, such as [0], that write a profile of their devices; all unless given."""

    def __post_init__(self) -> None:
        steps = self.profile_steps
        require(
            not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1]),
            "logging.profile_steps",
            steps,
            "the first and the last step of a profile, counted from 1, or []",
        )


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """A part of a curriculum of lengths; the other sections give its defaults."""

    context_length: Tokens
    """Tokens in a row; replaces data.context_length."""
    steps: int = 0
    """Optimizer steps; 0 means train.steps."""
    batch_size: int = 0
    """Rows in a step; 0 means train.batch_size."""
    in_context: int = 0
    """Episodes in a row; 0 means trajectories.in_context."""
    accumulation: int = 0
    """Parts of a batch; 0 means train.accumulation."""
    learning_rate: float = 0.0
    """Peak learning rate; 0 means optimizer.learning_rate."""
    warmup_steps: int | None = None
    """Steps of the warm-up; optimizer.warmup_steps by default."""
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    """Changed axes of the mesh, such as {fsdp: 1, sequence: 8}; the number of devices stays."""
    rope: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields rope_theta, rope_scaling and max_position_embeddings from this stage on, as in
    model.overrides."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope", with_lengths(self.rope, _LENGTHS))
        require_at_least(self, "stages", 1, "context_length")
        require_at_least(
            self, "stages", 0, "steps", "batch_size", "in_context", "accumulation", "learning_rate"
        )
        require(
            set(self.rope) <= set(POSITIONS),
            "stages.rope",
            self.rope,
            f"fields out of {', '.join(POSITIONS)}",
        )

    def replaces(self, name: str) -> bool:
        """Returns whether the stage sets its field `name`, whose default is in another section."""
        return getattr(self, name) != getattr(StageConfig, name, None)


# The fields of other sections that a stage may replace -> their names in the stage.
STAGED = {
    "data.context_length": "context_length",
    "train.steps": "steps",
    "train.batch_size": "batch_size",
    "train.accumulation": "accumulation",
    "trajectories.in_context": "in_context",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.warmup_steps": "warmup_steps",
}


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Prompts that the model answers during training.

    Answers appear in the console, RUN/samples.jsonl, TensorBoard and eval.report.

    An answer has the most likely tokens."""

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
    """What the planner chooses for the devices that it finds: mesh (also written mesh: auto) the
    axes, and train.accumulation where a batch must be computed in parts; memory (memory: auto) what
    is kept; positions stretches a pretrained model to data.context_length."""
    planned: str = ""
    """The planner's answer to `auto` with its reason, as the run records it."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    adapter: AdapterConfig = dataclasses.field(default_factory=AdapterConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    evaluations: tuple[dict[str, Any], ...] = ()
    """Tests of long contexts during training, each {test, every, tokens, count, rows, chunk, name}
    with the fields of that test (docs/evaluation.md); each writes RUN/NAME.jsonl, with the test's
    name by default."""
    samples: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    stages: tuple[StageConfig, ...] = ()
    """A curriculum, each {context_length, steps, batch_size, learning_rate, mesh, rope, ...}:
    stages are trained in order, each from the previous one's parameters, and the same command
    continues in any of them."""
    run_dir: str | None = None
    """Folder of the run, here or in a bucket (gs://, s3://); runs/NAME by default."""
    compile_cache: str | None = None
    """Folder of compiled programs for the next start; $LONGSTRIPE_CACHE/xla or
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
            f"the number of devices that the mesh takes, {mesh.product}: simulate {mesh.devices}, "
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
        """The run's folder; of one in a bucket the folder that has its small files while this
        process runs."""
        if self.in_bucket:
            name = hashlib.sha256(self.location.encode()).hexdigest()[:20]
            return cache_folder("runs") / f"{name}-{os.getpid()}"
        return pathlib.Path(self.run_dir or f"runs/{self.name}").expanduser()
