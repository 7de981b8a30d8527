"""A recipe's low-rank adapters (LoRA, Hu et al., arXiv 2106.09685), in PEFT's terms; imports no
JAX."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

# The projections of a layer, as PEFT names them in `target_modules`.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = (*ATTENTION, *FEED_FORWARD)
# A mixture's router, as PEFT names it in most families.
ROUTER = "gate"
ALL_LINEAR = "all-linear"
# The last part of the name of DoRA's magnitudes, the trained lengths of columns.
MAGNITUDE = "lora_magnitude_vector"
# The last parts of the names of an adapter's parameters.
ADAPTER_PARTS = ("lora_A", "lora_B", MAGNITUDE)
Quantization = Literal["none", "nf4", "int8"]
# Why a model lacks lm_head.
_TIED = ", whose head is its embedding (tie_word_embeddings: embed_tokens trains both)"
# Inputs of a matrix that share a scale in NF4.
NF4_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters of frozen weights: a projection W x becomes W x + s B (A x), with trained A
    and B."""

    rank: int = 0
    """Rank of the adapters, r; 0 trains the model's weights, without adapters."""
    alpha: float = 16.0
    """The adapters' products are multiplied by s = alpha / rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Projections with adapters: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj;
    all-linear for all. In a mixture the last three are the experts', gate is the router, and
    all-linear means the same as in PEFT for the family."""
    use_rslora: bool = False
    """Rank-stabilized: s = alpha / sqrt(rank)."""
    use_dora: bool = False
    """DoRA: trains the length of each column of W + s B A separately from its direction."""
    train: tuple[str, ...] = ()
    """Modules trained in full in addition to the adapters, matched by the end of their names, such
    as [embed_tokens, norm]: PEFT's modules_to_save. norm matches every norm, model.norm the
    last."""
    quantize: Quantization = "none"
    """Store and gather the layers' frozen matrices quantized, and dequantize them for each product
    (QLoRA): nf4, 4.13 bits per weight, or int8; none keeps the compute dtype. Matrices are
    quantized while being read."""
    dropout: float | None = None
    """Probability that an adapter, in training, reads 0 for an input element; the others are
    divided by 1 - dropout. null: the dropout of the adapter at `path`; 0 without one and in
    preference tuning."""
    path: str | None = None
    """Adapter to continue from: a PEFT folder, org/name on the hub, or a run or checkpoint with
    adapters; its rank, alpha and targets must equal this section's."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(
                f"adapter.rank: found {self.rank}, needs at least 1, or 0 for no adapters"
            )
        if not 0 < self.alpha <= sys.float_info.max:
            raise ValueError(f"adapter.alpha: found {self.alpha}, needs a positive number")
        names = (*PROJECTIONS, ROUTER)
        unknown = [target for target in self.targets if target not in (*names, ALL_LINEAR)]
        if unknown or not self.targets:
            raise ValueError(
                f"adapter.targets: found {unknown[0] if unknown else 'none'!r}, needs some of "
                f"{', '.join(names)}, such as [q_proj, v_proj], or {ALL_LINEAR}"
            )
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(
                f"adapter.targets: found [{', '.join(self.targets)}], needs {ALL_LINEAR} alone, or "
                "names of projections"
            )
        if "" in self.train:
            raise ValueError(
                "adapter.train: found an empty name; needs the ends of modules' names, such as "
                "embed_tokens"
            )
        if self.quantize not in get_args(Quantization):
            raise ValueError(
                f"adapter.quantize: found {self.quantize!r}, needs one of "
                f"{', '.join(get_args(Quantization))}"
            )
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(
                f"adapter.dropout: found {self.dropout}, needs at least 0 and less than 1"
            )
        beside = {
            "path": self.path,
            "train": self.train,
            "quantize": self.quantize != "none",
            "use_dora": self.use_dora,
            "dropout": self.dropout,
        }
        field = next((name for name, value in beside.items() if value), None)
        if self.rank == 0 and field:
            needed = "that adapter's rank" if field == "path" else "at least 1"
            raise ValueError(f"adapter.rank: found 0 with adapter.{field}; needs {needed}")

    def with_rank(self, rank: int, quantize: Quantization = "none") -> AdapterConfig:
        """Returns these adapters with another rank, base and, if the rank differs, alpha: twice the
        rank, as in the shipped recipes."""
        alpha = self.alpha if rank == self.rank else 2.0 * rank
        return dataclasses.replace(self, rank=rank, alpha=alpha, quantize=quantize)

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections with adapters, in layer order."""
        return (
            PROJECTIONS
            if ALL_LINEAR in self.targets
            else tuple(name for name in (*PROJECTIONS, ROUTER) if name in self.targets)
        )

    @property
    def scale(self) -> float:
        """s, the factor of the adapters' products (rsLoRA: Kalajdzievski, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def dropout_rate(self) -> float:
        """The probability of `dropout`."""
        return self.dropout or 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        """The last parts of the names of this adapter's parameters."""
        return ADAPTER_PARTS if self.use_dora else ADAPTER_PARTS[:2]

    @property
    def number_bytes(self) -> float:
        """Bytes per element of a frozen matrix as stored and gathered: for NF4 half a byte plus a
        byte per block; otherwise int8's without scales, or bfloat16's."""
        return {"nf4": 1 / 2 + 1 / NF4_BLOCK, "int8": 1.0, "none": 2.0}[self.quantize]

    @property
    def block(self) -> int:
        """How many inputs of a frozen matrix share a scale and stay together."""
        return NF4_BLOCK if self.quantize == "nf4" else 1

    def trains(self, name: str) -> bool:
        """Whether this parameter is trained: part of an adapter, or of a module named in
        `train`."""
        module, _, part = name.rpartition(".")
        return part in ADAPTER_PARTS or ends_with(module, self.train)

    def of_mixture(self, all_linear: tuple[str, ...]) -> AdapterConfig:
        """Returns the adapters of a model whose feed-forwards are experts.

        Args:
          all_linear: the projections all-linear stands for.

        Raises:
          ValueError: experts or a router with DoRA or dropout, which PEFT does not support for
            them.
        """
        named = (
            self
            if ALL_LINEAR not in self.targets
            else dataclasses.replace(self, targets=all_linear)
        )
        beyond = [name for name in named.projections if name not in ATTENTION]
        for field, value in (("use_dora", self.use_dora), ("dropout", self.dropout_rate)):
            if beyond and value:
                raise ValueError(
                    f"adapter.{field}: found {value}; adapters of experts and routers "
                    f"({', '.join(beyond)}) have none, as in PEFT; leave it out, or take some of "
                    f"{', '.join(ATTENTION)} as adapter.targets"
                )
        return named

    def of_attention(self) -> AdapterConfig | None:
        """Returns the adapters of attention's projections alone; None if these have none."""
        targets = tuple(name for name in self.projections if name in ATTENTION)
        return dataclasses.replace(self, targets=targets) if targets else None

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Checks the rank.

        Args:
          sizes: the inputs and outputs of each projection.

        Raises:
          ValueError: the rank is above a dimension.
        """
        for name in self.projections:
            if name != ROUTER and self.rank > min(sizes[name]):
                inputs, outputs = sizes[name]
                raise ValueError(
                    f"adapter.rank: found {self.rank}, needs at most {min(inputs, outputs)}: "
                    f"{name} has {inputs} inputs and {outputs} outputs"
                )

    def check_blocks(self, sizes: Mapping[str, int]) -> None:
        """Raises ValueError unless blocks of a quantized matrix fill each of `sizes`, the axes they
        run along."""
        for name, size in sizes.items():
            if size % self.block:
                raise ValueError(
                    f"adapter.quantize: found {self.quantize!r}, whose blocks have {self.block} "
                    f"inputs; {name} is {size}, not a multiple; int8 takes any size"
                )

    def check_targets(self, family: str, fused: Iterable[Sequence[str]]) -> None:
        """Raises ValueError if targets include some but not all projections stored as rows of one
        tensor: a PEFT file has one adapter for the whole tensor.

        Args:
          fused: the projections of each such tensor.
        """
        for names in fused:
            missing = [name for name in names if name not in self.projections]
            if 0 < len(missing) < len(names):
                raise ValueError(
                    f"adapter.targets: {missing[0]} is missing; models of the family {family} "
                    f"store {', '.join(names)} in one tensor, so all of them have an adapter, "
                    "or none"
                )

    def check_train(self, names: Iterable[str], fused: Iterable[Sequence[str]]) -> None:
        """Checks `train` against a model.

        Args:
          names: of the model's parameters, including the adapters'.
          fused: as in `check_targets`.

        Raises:
          ValueError: an entry matches the end of no module's name; or of a module that has an
            adapter or modules inside, of experts, or of some but not all projections stored as rows
            of one tensor.
        """
        parts = [name.rpartition(".") for name in names]
        modules = {module: None for module, _, part in parts if part not in ADAPTER_PARTS}
        adapted = {module for module, _, part in parts if part in ADAPTER_PARTS}
        for entry in self.train:
            found = [module for module in modules if ends_with(module, entry)]
            if not found:
                others = {last_part(module) for module in modules} - {*PROJECTIONS}
                raise ValueError(
                    f"adapter.train: found {entry!r}, which this model lacks"
                    f"{_TIED if entry == 'lm_head' else ''}; needs some of "
                    f"{', '.join(sorted(others))}"
                )
            for module in found:
                name = last_part(module)
                if module in adapted:
                    raise ValueError(
                        f"adapter.train: found {entry!r}, and {name} has an adapter; a "
                        "module has an adapter or is trained in full, so leave it out of "
                        "adapter.train or of adapter.targets"
                    )
                if any(other.startswith(f"{module}.") for other in (*modules, *adapted)):
                    raise ValueError(
                        f"adapter.train: found {entry!r}, and {name} has modules inside, "
                        "all of which PEFT's format would train; name one without, such as norm"
                    )
                if ".experts." in module:
                    raise ValueError(
                        f"adapter.train: found {entry!r}, and {name} is of experts, which "
                        "PEFT's format holds only as adapters; name it in adapter.targets"
                        f"{_shared(entry, found)}"
                    )
        trained = {last_part(module) for module in modules if ends_with(module, self.train)}
        for together in fused:
            missing = [name for name in together if name not in trained]
            if 0 < len(missing) < len(together):
                raise ValueError(
                    f"adapter.train: {missing[0]} is missing; this model's files store "
                    f"{', '.join(together)} in one tensor, so all of them are trained, or none"
                )


def ends_with(module: str, entries: str | tuple[str, ...]) -> bool:
    """Whether a module's name ends with an entry of `train`, or one of several: as in PEFT, where
    names begin with `model`, so that model.norm is the last norm only."""
    return f"model.{module}".endswith(entries)


def last_part(module: str) -> str:
    """The last part of a module's name."""
    return module.rpartition(".")[2]


def _shared(entry: str, found: Iterable[str]) -> str:
    """Advice if an entry of `train` also matches a feed-forward that all tokens go through."""
    longer = [module for module in found if ".shared_expert" in module]
    return f"; {'.'.join(longer[0].split('.')[-2:])} names only the shared one" if longer else ""
