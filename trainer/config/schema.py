"""Every section and field of a recipe, typed, documented (`--help` prints this) and with the rules of its own values.

A section made from values that break one of its rules raises ValueError: `section.field: found ..., needs ...`. The rules
between sections are in trainer.config.checks.
"""

import dataclasses
import datetime
import math
import pathlib
import re
from typing import Any, Literal

from data.clean import CleanConfig
from data.conversation import DEFAULT_TEMPLATE
from data.lengths import with_lengths
from data.tokenizer import TEMPLATE_DATE
from data.trajectories.options import TrajectoryConfig
from model.adapter import AdapterConfig
from model.attention.names import MESH_AXES, Tokens
from model.attention.options import AttentionConfig
from model.config import ADJUSTABLE, POSITIONS
from model.memory.options import MemoryConfig

from .preference import PreferenceConfig

VERSION = 2
# Fields of Hugging Face's config.json that hold a number of tokens, read in model.overrides and stages.rope as 64K too.
_LENGTHS = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window")


def require(valid: bool, field: str, value: object, needs: str) -> None:
    """Raises ValueError, `field: found value, needs ...`, unless `valid`."""
    if not valid:
        raise ValueError(f"{field}: found {value!r}, needs {needs}")


def _require_at_least(section: object, name: str, minimum: int, *fields: str) -> None:
    """Raises ValueError for the first of the section's fields that is below the minimum."""
    for field in fields:
        value = getattr(section, field)
        require(value >= minimum, f"{name}.{field}", value, f"at least {minimum}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model is trained, and which of its parameters."""

    path: str | None = None
    """Pretrained model: a Hugging Face folder, a Longstripe checkpoint, or org/name[@revision], which is downloaded from the
    hub unless it is in the cache (--no-download forbids it). On the command line it replaces the recipe's preset and the
    overrides of a model from scratch."""
    preset: str | None = None
    """Shape of a model trained from scratch: a name of TransformerConfig.preset, such as llama-7b or tiny."""
    tokenizer: str | None = None
    """Folder or file of the tokenizer; needed from scratch, otherwise the model's own unless given."""
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """TransformerConfig fields set over the preset (llama-7b where none is given) for a model from scratch, rope_theta and
    rope_scaling among them, as in Hugging Face's config.json; key heads and head_dim follow where neither names them. Of a
    pretrained model rope_theta, rope_scaling and max_position_embeddings alone can be set."""
    trainable: str = ".*"
    """Regular expression: parameters whose whole name it matches are trained, the others stay frozen."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of activations and of keys and values on the wire; parameters and moments are float32."""
    seed: int = 0
    """Seed of the initialiser of a model from scratch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", with_lengths(self.overrides, _LENGTHS))
        require(
            not (self.path and self.preset),
            "model.preset",
            self.preset,
            "to be left out where model.path is given; keep one of them",
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
    """File, or folder of files, here or in a store (gs://, s3://); or exercises that are generated, of all sizes up to the
    context length: synthetic:TASK?count=2000&seed=0, with the tasks lines (&like=FILE for another wording), needles,
    key_values, variables and copying."""
    format: str = "sharegpt"
    """Format of the records: sharegpt (conversations), text (books: plain files, or JSON with `text`), tokens (.npy, or
    JSON with `tokens` and perhaps `loss_mask`) or preference (`prompt`, `chosen` and `rejected`, or `completion`
    and `label`)."""
    template: str | None = None
    """Chat template of this source's conversations; data.template where not given."""
    weight: float = 1.0
    """How often the source is seen in an epoch, relative to once."""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """What the records' own names of fields stand for, such as {question: user, answer: assistant} or {dialog: messages,
    speaker: role}; see docs/data.md."""
    add_bos: bool | None = None
    """Whether each text of format: text begins with BOS; unless given, as the tokenizer does by itself."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What the model is trained on."""

    path: str | None = None
    """One source, shorthand for a list of one; on the command line it replaces the recipe's sources, of a single one the path
    alone."""
    template: str = DEFAULT_TEMPLATE
    """Chat template: tokenizer for the model's own, or vicuna_v1.1, koala, llama-2, llama-3, chatml, alpaca, plain. A base
    model has none of its own, so that one of the others is to be chosen."""
    add_control_tokens: bool = False
    """Add the control tokens that the templates need and the tokenizer lacks, each with a new row of the embedding."""
    text_tokens: tuple[str, ...] = ()
    """Added tokens of the tokenizer that turns may hold, such as [<think>, </think>]: typed, they are these tokens."""
    template_date: str = TEMPLATE_DATE.date().isoformat()
    """Date, YYYY-MM-DD, that chat templates write which write one (strftime_now), or `today`; fixed so that the same data gives
    the same ids. Chats and evaluations of the model keep it."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false} for Qwen 3's; a record's field of this name precedes
    them. Chats and evaluations of the model keep them."""
    train_on: Literal["all", "last"] = "all"
    """Assistant turns in the loss: all of a conversation, or only its last one; a turn's own `train: false` leaves it out."""
    sources: tuple[SourceConfig, ...] = ()
    """The sources, each {path, format, template, weight, fields, add_bos}."""
    context_length: Tokens = 4096
    """Tokens in a packed row, such as 65536 or 64K (K and M are 2^10 and 2^20, in every field of tokens); a multiple of
    mesh.sequence, for the layout zigzag of twice that."""
    prepared: str = "prepared"
    """Folder that keeps the tokenized data sets; one in a store (gs://, s3://) is read through the cache on this machine."""
    held_out_fraction: float = 0.05
    """Share of the conversations kept out of training for the held-out loss, unless held_out_path is given."""
    held_out_path: str | None = None
    """File or folder of held-out records, in the first source's format and template; replaces held_out_fraction."""
    clean: CleanConfig = dataclasses.field(default_factory=CleanConfig)
    """How conversations are cleaned before training; `clean: scraped` for rules made for scrapes of web chats. Texts and tokens
    are used as they are."""
    seed: int = 0
    """Seed of the order of the documents. Which of them are held out does not depend on it."""

    def __post_init__(self) -> None:
        _require_at_least(self, "data", 1, "context_length")
        require(
            0 <= self.held_out_fraction < 1,
            "data.held_out_fraction",
            self.held_out_fraction,
            "a share from 0 to below 1",
        )
        # The day itself is recorded: a run that goes on tomorrow keeps it.
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
class MeshConfig:
    """How many devices along each axis; their product is the number of devices."""

    data: int = 1
    """Copies of the model, each with its own share of the batch."""
    fsdp: int = 1
    """Shards of the batch over which the parameters are sharded too."""
    expert: int = 1
    """Shards of a mixture's experts, and of the batch: each token's hidden states go to the devices that have its experts."""
    tensor: int = 1
    """Shards of the heads and of the feed-forward width."""
    sequence: int = 1
    """Shards of the sequence."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: between attention and feed-forward the tokens are split over tensor too."""
    dcn: dict[str, int] = dataclasses.field(default_factory=dict)
    """How often an axis is cut by the slow network between TPU slices or GPU hosts, such as {data: 2}: the product is their
    number, and only these axes cross it. None is needed on one slice, nor on GPUs where the outermost axes are to cross."""
    order: tuple[Literal["data", "fsdp", "expert", "tensor", "sequence"], ...] = ()
    """The axes from those whose devices may lie far apart to those whose devices must be near; unless given data, fsdp,
    expert, sequence, tensor: tensor waits for its sums, and the ring along the sequence runs beside the kernels."""
    simulate: int = 0
    """Simulate this many devices on the CPU; 0 uses the machine's own devices."""

    def __post_init__(self) -> None:
        _require_at_least(self, "mesh", 1, *MESH_AXES)
        _require_at_least(self, "mesh", 0, "simulate")
        divisors = all(
            axis in MESH_AXES
            and isinstance(factor, int)
            and factor >= 1
            and getattr(self, axis) % factor == 0
            for axis, factor in self.dcn.items()
        )
        require(
            divisors,
            "mesh.dcn",
            self.dcn,
            f"factors of the axes, such as {{data: 2}}, each a divisor of its axis in {self.product}",
        )
        require(
            sorted(self.order)
            in (
                [],
                sorted(MESH_AXES),
                *([sorted(set(MESH_AXES) - {"expert"})] if self.expert == 1 else []),
            ),
            "mesh.order",
            self.order,
            f"all five axes, each once: {', '.join(MESH_AXES)}; expert may be left out where it is 1",
        )
        require(
            self.simulate in (0, self.devices),
            "mesh.simulate",
            self.simulate,
            f"the number of devices that the mesh takes, {self.product}: simulate {self.devices}, or change the mesh",
        )

    @property
    def devices(self) -> int:
        """The number of devices that the mesh takes."""
        return self.rows * self.tensor * self.sequence

    @property
    def rows(self) -> int:
        """The number of shards of a batch's rows."""
        return self.data * self.fsdp * self.expert

    @property
    def named(self) -> str:
        """The axes for messages; expert where it is used."""
        axes = [axis for axis in MESH_AXES if axis != "expert" or self.expert > 1]
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)

    @property
    def product(self) -> str:
        """The axes and their product, for messages."""
        return f"{self.named} = {self.devices}"


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The other processes; to be given only where JAX does not find them by itself (it does on Cloud TPU, GKE, Slurm)."""

    coordinator: str | None = None
    """Address of process 0 as HOST:PORT; any free port, the same for all."""
    process_id: int | None = None
    """Number of this process, from 0."""
    num_processes: int | None = None
    """Number of all processes; mesh.simulate counts the devices of all of them."""
    stall_minutes: float = 15.0
    """Minutes that a step may take, or ten times the usual step where that is more, before all processes print where they
    stand and end with exit code 75. 0 waits for ever, here and below."""
    compile_minutes: float = 180.0
    """The same for compiling, and for the first step."""
    save_minutes: float = 60.0
    """The same for waiting for a checkpoint."""
    evaluate_minutes: float = 240.0
    """The same for the evaluations after a step."""

    def __post_init__(self) -> None:
        for name in ("stall_minutes", "compile_minutes", "save_minutes", "evaluate_minutes"):
            minutes = getattr(self, name)
            require(
                0 <= minutes < math.inf,
                f"distributed.{name}",
                minutes,
                "minutes, or 0 for no limit",
            )
        given = {
            "coordinator": self.coordinator,
            "process_id": self.process_id,
            "num_processes": self.num_processes,
        }
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return
        if self.coordinator is None or self.process_id is None or self.num_processes is None:
            raise ValueError(
                f"distributed.{missing[0]}: missing; coordinator, process_id and num_processes are given "
                "together, or none of them where JAX finds its cluster by itself"
            )
        require(
            0 <= self.process_id < self.num_processes,
            "distributed.process_id",
            self.process_id,
            f"one of 0 .. {self.num_processes - 1} for {self.num_processes} processes",
        )
        require(
            ":" in self.coordinator,
            "distributed.coordinator",
            self.coordinator,
            "HOST:PORT of process 0",
        )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, the learning rate's course, and clipping."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """AdamW; Lion, with one moment; Adafactor, with a row and a column of the second moment; or Muon, which orthogonalises the
    updates of the layers' matrices, and leaves all other parameters to AdamW with Nesterov's momentum and without weight
    decay."""
    learning_rate: float = 2e-5
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """What the learning rate does after the warm-up: a cosine or a line down to its final share, no decay, or no decay but
    for the last steps (warm-up, stable, decay). A run of the last two can be made longer."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    warmup_fraction: float = 0.0
    """Share of the steps over which it rises, such as 0.03, in place of warmup_steps."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a share of the peak; a constant one stays at the peak."""
    decay_fraction: float = 0.2
    """Share of the steps, the last ones, in which the schedule wsd decays, along a line."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this global norm; 0 never clips."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which both moments are stored; they are computed with in float32."""
    average_decay: float = 0.0
    """Keeps an exponential moving average of the trained weights, with this decay, such as 0.999; it takes 4 bytes a parameter,
    and `scripts.export_hf --average` writes it. In the first steps the decay is less: (1 + n) / (10 + n) after n steps. 0 keeps
    none."""

    def __post_init__(self) -> None:
        _require_at_least(self, "optimizer", 0, "warmup_steps", "weight_decay", "clip_norm")
        require(
            0 < self.learning_rate < math.inf,
            "optimizer.learning_rate",
            self.learning_rate,
            "a positive number",
        )
        require(
            not (self.warmup_steps and self.warmup_fraction),
            "optimizer.warmup_fraction",
            self.warmup_fraction,
            "to be left out with optimizer.warmup_steps; keep one of them",
        )
        for name in ("final_fraction", "decay_fraction", "warmup_fraction"):
            require(
                0 <= getattr(self, name) <= 1,
                f"optimizer.{name}",
                getattr(self, name),
                "a share between 0 and 1",
            )
        require(
            0 <= self.average_decay < 1,
            "optimizer.average_decay",
            self.average_decay,
            "a number from 0 to below 1",
        )
        require(self.epsilon > 0, "optimizer.epsilon", self.epsilon, "a positive number")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= beta < 1, f"optimizer.{name}", beta, "a number from 0 to below 1")
            # bfloat16 has 8 bits: a moment that loses less than 1/256 of itself a step would never shrink.
            require(
                self.moment_dtype == "float32" or beta <= 0.99,
                f"optimizer.{name}",
                beta,
                "at most 0.99 with optimizer.moment_dtype bfloat16",
            )

    def stable_steps(self, steps: int) -> int:
        """Returns the number of first steps whose learning rate would be the same in a longer run than one of `steps`."""
        if self.warmup_fraction:  # of a longer run the warm-up is longer
            return 0
        if self.schedule == "constant":
            return steps
        return steps - self.decay_steps(steps) if self.schedule == "wsd" else 0

    def first_steps(self, steps: int) -> int:
        """Returns the number of first steps in which the learning rate rises, of `steps`."""
        return (
            math.ceil(self.warmup_fraction * steps) if self.warmup_fraction else self.warmup_steps
        )

    def decay_steps(self, steps: int) -> int:
        """Returns the number of last steps in which the schedule wsd decays, of `steps`."""
        return round(self.decay_fraction * steps)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, and in what batches."""

    steps: int = 100
    """Optimizer steps of the whole run; the decay depends on it."""
    epochs: float | None = None
    """Passes over the data, such as 3 or 0.5, in place of steps: the run has the steps that so many passes take. Every epoch is
    counted as long as the first one; where sources have weights they differ a little."""
    batch_size: int = 1
    """Rows of context_length tokens in a step, over all devices; a multiple of mesh.data * mesh.fsdp * accumulation."""
    accumulation: int = 1
    """Parts that a step's rows are computed in, one after the other; the result is that of all rows at once."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What follows a loss or gradient that is not finite: the run stops, or that step leaves the parameters unchanged."""
    evaluate_every: int = 0
    """Steps between held-out losses; 0 measures only before the first and after the last step."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl, and between updates of the progress bar; where there is no terminal, the first of
    these is printed, and then one every 30 seconds or 20th of the run, whichever is sooner."""

    def __post_init__(self) -> None:
        _require_at_least(self, "train", 1, "steps", "batch_size", "accumulation", "log_every")
        _require_at_least(self, "train", 0, "evaluate_every")
        require(
            self.epochs is None or 0 < self.epochs < math.inf,
            "train.epochs",
            self.epochs,
            "a positive number",
        )

    def for_epochs(self, rows: int | None) -> "TrainConfig":
        """Returns the section with the steps that its epochs take; itself without epochs.

        Args:
          rows: of an epoch; None where rows are drawn without end.

        Raises:
          ValueError: there are epochs to train, but the data have none.
        """
        if self.epochs is None:
            return self
        require(
            rows is not None,
            "train.epochs",
            self.epochs,
            "to be left out where rows are drawn without end; give train.steps",
        )
        require(
            rows != 0,
            "train.epochs",
            self.epochs,
            "to be left out where the sources' weights leave no row in the first epoch; give train.steps",
        )
        steps = round(
            self.epochs * (rows or 0) / self.batch_size, 9
        )  # 0.07 * 100 is a little more than 7
        return dataclasses.replace(self, steps=max(1, math.ceil(steps)))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every: int = 100
    """Steps between checkpoints; the last step is always saved. 0 saves only the last."""
    minutes: float = 0.0
    """Minutes after the last checkpoint at which another one is saved, whichever comes first; 0: `every` counts alone."""
    grace_seconds: float = 25.0
    """Seconds that may pass between SIGTERM and the end. The running step is finished and saved if, by the steps and saves
    before, that takes no longer; otherwise the run ends at once, and goes on from the newest checkpoint. 0 always finishes
    the step."""
    keep: int = 2
    """Newest checkpoints kept."""
    best: str | None = None
    """Metric of an evaluation, such as held_out_loss_nats_per_target: whenever it is the best so far, a checkpoint is saved,
    and kept beside the newest ones until a better one is there. RUN/best names it, for exports and evaluations."""
    best_is: Literal["lowest", "highest"] = "lowest"
    """Which value of that metric is the best."""
    patience: int = 0
    """Measurements of that metric without a better one after which the run ends; 0 trains to the last step."""

    def __post_init__(self) -> None:
        _require_at_least(self, "checkpoint", 0, "every", "patience", "minutes", "grace_seconds")
        _require_at_least(self, "checkpoint", 1, "keep")
        require(
            self.best is not None or not self.patience,
            "checkpoint.patience",
            self.patience,
            "0, or checkpoint.best with the name of a metric",
        )


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    console: bool = True
    """Show a progress bar."""
    wandb: str | None = None
    """Project of Weights & Biases that the figures are sent to as well; needs the package wandb."""
    profile_steps: tuple[int, ...] = ()
    """First and last step of a profile, such as [10, 12], written to the run's folder `profile`; none unless given."""

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
    """A part of a curriculum of lengths; what it leaves out is as in the other sections."""

    context_length: Tokens
    """Tokens in a row; replaces data.context_length."""
    steps: int = 0
    """Optimizer steps; train.steps where 0."""
    batch_size: int = 0
    """Rows in a step; train.batch_size where 0."""
    in_context: int = 0
    """Episodes in a row; trajectories.in_context where 0."""
    accumulation: int = 0
    """Parts of a batch; train.accumulation where 0."""
    learning_rate: float = 0.0
    """Peak learning rate; optimizer.learning_rate where 0."""
    warmup_steps: int | None = None
    """Steps of the warm-up; optimizer.warmup_steps where not given."""
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    """Axes of the mesh that differ, such as {fsdp: 1, sequence: 8}; the number of devices stays."""
    rope: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields rope_theta, rope_scaling and max_position_embeddings from this stage on, as in model.overrides."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope", with_lengths(self.rope, _LENGTHS))
        _require_at_least(self, "stages", 1, "context_length")
        _require_at_least(
            self, "stages", 0, "steps", "batch_size", "in_context", "accumulation", "learning_rate"
        )
        require(
            set(self.rope) <= set(POSITIONS),
            "stages.rope",
            self.rope,
            f"fields out of {', '.join(POSITIONS)}",
        )

    def replaces(self, name: str) -> bool:
        """Returns whether the stage has a value of its own for its field `name`, where others are as in another section."""
        return getattr(self, name) != getattr(StageConfig, name, None)


# The fields of other sections that a stage may replace -> its own names of them.
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
    """Prompts that the model answers during training: in the console, RUN/samples.jsonl, TensorBoard and eval.report.

    An answer has the most likely tokens."""

    prompts: tuple[str, ...] = ()
    """The users' first turns, or beginnings of a text where the recipe has no chat template; none are answered unless given."""
    every: int = 0
    """Steps between answers; 0 answers only before the first and after the last step."""
    new_tokens: Tokens = 64
    """Tokens of the longest answer."""

    def __post_init__(self) -> None:
        _require_at_least(self, "samples", 0, "every")
        _require_at_least(self, "samples", 1, "new_tokens")
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
            "at least one prompt beside samples.every, such as '[\"Who are you?\"]'",
        )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything a run is made from."""

    config_version: int = VERSION
    """Version of this format."""
    name: str = ""
    """Name of the run; the recipe's file name where not given."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    trajectories: TrajectoryConfig = dataclasses.field(default_factory=TrajectoryConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    adapter: AdapterConfig = dataclasses.field(default_factory=AdapterConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    evaluations: tuple[dict[str, Any], ...] = ()
    """Tests of long contexts during training, each {test, every, tokens, count, rows, chunk, name} with the fields of that test
    (docs/evaluation.md); each writes RUN/NAME.jsonl, NAME being the test's where none is given."""
    samples: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    stages: tuple[StageConfig, ...] = ()
    """A curriculum, each {context_length, steps, batch_size, learning_rate, mesh, rope, ...}: the stages are trained one after
    the other, each from the parameters of the one before, and the same command continues in any of them."""
    run_dir: str | None = None
    """Folder of the run; runs/NAME where not given."""
    compile_cache: str | None = None
    """Folder that keeps compiled programs for the next start; unless given, $LONGSTRIPE_CACHE/xla, or ~/.cache/longstripe/xla.
    Of several processes all read and the first writes: on storage that all share (also gs://) one compiles for all."""

    def __post_init__(self) -> None:
        require(self.config_version == VERSION, "config_version", self.config_version, str(VERSION))
        names = [str(entry.get("name") or entry.get("test")) for entry in self.evaluations]
        taken = ("train", "metrics", "held_out", "samples")
        require(
            len({*names, *taken}) == len(names) + len(taken)
            and all(re.fullmatch(r"[\w-]+", name) for name in names),
            "evaluations.name",
            names,
            f"different names of letters, digits, _ and -, none of them {', '.join(taken[:-1])} or {taken[-1]}",
        )
        require(
            "://" not in (self.run_dir or ""),
            "run_dir",
            self.run_dir,
            "a folder; one of a store can be mounted (gcsfuse, s3fs)",
        )

    @property
    def folder(self) -> pathlib.Path:
        """The run's folder."""
        return pathlib.Path(self.run_dir or f"runs/{self.name}").expanduser()
