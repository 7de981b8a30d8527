"""Adapters of a mixture's experts and router in PEFT's format.

PEFT adapts a layer's experts as transformers 5 holds them: one tensor for gate_proj and up_proj and
one for down_proj, named in `target_parameters`. A of all experts is one matrix, and so is B. PEFT
on transformers 4 has an A and a B per expert instead; such files are read too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from model.adapter import ATTENTION, FEED_FORWARD, ROUTER
from model.config import LAYERS, LayerStack, TransformerConfig
from model.families import FAMILIES
from model.parameter_declarations import declare, without_stack

from .table import ExpertsEntry, HFEntry, hf_layout

# The projections of a tensor in `target_parameters`, by the end of its name.
PARAMETERS = {
    "gate_up_proj": FEED_FORWARD[:2],
    "down_proj": FEED_FORWARD[2:],
    "gate.weight": (ROUTER,),
    "router.weight": (ROUTER,),
}
# Linear modules of transformers 4, by the last part of their names.
MODULES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "router": ROUTER}
_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_OF_ROUTER = re.compile(r"\.(gate|router)\.(base_layer\.)*lora_")


@dataclass(frozen=True)
class FactorEntry(HFEntry):
    """A or B of the adapters of all experts, and the matrix that holds it.

    A's matrix [X R, inputs] stacks the R rows of each expert. B's [outputs, R X] has the columns of
    the first rank for all experts, then those of the second.

    Attributes:
      first_rank, ranks: gate_proj's and up_proj's adapters are one in PEFT, in diagonal blocks:
        this one's first rank, and the total R.
      step, first_row: B's rows are each `step`-th from the first on.
    """

    first_rank: int = 0
    ranks: int = 0

    @property
    def is_b(self) -> bool:
        """Whether it is B; otherwise A."""
        return self.name.endswith("lora_B")

    @property
    def rank(self) -> int:
        """The number of this adapter's ranks."""
        return self.layer_shape[1 if self.is_b else 2]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """See `HFEntry.file_shape`."""
        folded = self.layer_shape[0] * self.ranks
        return (self.file_rows or 0, folded) if self.is_b else (folded, self.layer_shape[1])

    def part(self, tensor: Float[np.ndarray, "P Q"]) -> Float[np.ndarray, "X I O"]:
        """Returns a view of this parameter's part of the matrix."""
        ranks = slice(self.first_rank, self.first_rank + self.rank)
        return (
            self._by_expert(tensor)[:, ranks] if self.is_b else self._by_expert(tensor)[..., ranks]
        )

    def others(self, tensor: Float[np.ndarray, "P Q"]) -> Float[np.ndarray, "..."]:
        """Returns the numbers outside the diagonal block: B's rows, in other ranks."""
        mine = np.arange(self.first_rank, self.first_rank + self.rank)
        return np.delete(self._by_expert(tensor), mine, 1) if self.is_b else np.zeros(0)

    def _by_expert(self, tensor: Float[np.ndarray, "P Q"]) -> Float[np.ndarray, "X I O"]:
        count = self.layer_shape[0]
        if not self.is_b:
            return tensor.reshape(count, self.ranks, -1).transpose(0, 2, 1)
        rows = slice(self.first_row, self.first_row + self.step * self.layer_shape[2], self.step)
        return tensor.reshape(-1, self.ranks, count)[rows].transpose(2, 1, 0)

    def put(self, tensor: np.ndarray, value: np.ndarray) -> None:
        """See `HFEntry.put`."""
        self.part(tensor)[...] = value

    def read(self, files: Any, name: str, index: tuple[slice, ...], within=()) -> np.ndarray:
        """See `HFEntry.read`."""
        return self.part(files[name].get_slice(name)[:])[index]


def entries(
    config: TransformerConfig, stack: LayerStack, prefix: str, shares_a: bool, per_expert: bool
) -> list[HFEntry]:
    """Returns the adapters of experts and router in a stack of layers, and their PEFT tensors.

    Args:
      prefix: of all names.
      shares_a: whether gate_proj and up_proj share an A, as in adapters that PEFT creates.
      per_expert: whether each expert has tensors, as with transformers 4.
    """
    assert config.adapter is not None
    layout = hf_layout(config, stacked=not per_expert)
    base = {entry.name: prefix + entry.hf_name for entry in layout}
    result = []
    for projection in config.adapter.projections:
        if projection in ATTENTION:
            continue
        owner = "mlp." if projection == ROUTER else "mlp.experts."
        name = f"{stack.prefix}{owner}{projection}."
        for part in config.adapter.parts:
            file = _module(base, name, config) + f".{part}.weight"
            shape = declare(config)[name + part].shape
            entry = HFEntry(
                name + part, file, shape, shape[:-3:-1], stack.layers, True, stack.first
            )
            if projection != ROUTER:
                entry = _of_experts(entry, projection, config, shares_a, per_expert)
            result.append(entry)
    return result


def _module(base: dict[str, str], name: str, config: TransformerConfig) -> str:
    """The module with a projection's adapter: that of its tensor, or the `base_layer` in it if
    another adapter wraps this one."""
    tensor = base[f"{name}weight"]
    if tensor.endswith(".weight"):
        return tensor.removesuffix(".weight")
    assert config.adapter is not None
    is_inner = not name.endswith("down_proj.") and "down_proj" in config.adapter.projections
    return tensor.rpartition(".")[0] + ".base_layer" * is_inner


def _of_experts(
    entry: HFEntry, projection: str, config: TransformerConfig, shares_a: bool, per_expert: bool
) -> HFEntry:
    """The entry of all experts' A or B, from one expert's."""
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(HFEntry)}
    if per_expert:
        return ExpertsEntry(**fields)
    assert config.adapter is not None
    beside = PARAMETERS["gate_up_proj"]
    together = beside if projection in beside else (projection,)
    number, rank = together.index(projection), config.adapter.rank
    outputs = config.projection_sizes(projection)[1]
    interleaved = FAMILIES[config.family].interleaved
    fields |= {
        "first_row": number if interleaved else number * outputs,
        "file_rows": len(together) * outputs,
        "step": len(together) if interleaved else 1,
    }
    return FactorEntry(
        **fields,
        first_rank=0 if shares_a else number * rank,
        ranks=rank if shares_a else len(together) * rank,
    )


def is_per_expert(tensor_names: Iterable[str]) -> bool:
    """Whether tensors are those of transformers 4, which has some for each expert."""
    return any(map(_OF_ONE_EXPERT.search, tensor_names))


def lacking(tensor_names: Iterable[str]) -> set[str]:
    """Returns which of the experts' projections and the router have no adapter in a file."""
    names = list(tensor_names)
    experts = any(".experts." in name for name in names)
    router = any(map(_OF_ROUTER.search, names))
    return {*(() if experts else FEED_FORWARD), *(() if router else (ROUTER,))}


def target_parameters(config: TransformerConfig) -> list[str]:
    """Returns the tensors, in transformers 5's form, that have an adapter, for PEFT's field."""
    assert config.adapter is not None
    names = {without_stack(entry.name): entry.hf_name for entry in hf_layout(config, stacked=True)}
    of_mixture = [name for name in config.adapter.projections if name not in ATTENTION]
    paths = [
        f"{LAYERS}mlp.{'' if name == ROUTER else 'experts.'}{name}.weight" for name in of_mixture
    ]
    return list(dict.fromkeys(names[path].removeprefix("model.layers.{i}.") for path in paths))


def parameter_of(name: str) -> str:
    """Returns the tensor in `target_parameters` that holds the projection of our parameter."""
    projection = name.split(".")[-2]
    return next(tensor for tensor, names in PARAMETERS.items() if projection in names)


def projections_of(parameters: list[str]) -> tuple[str, ...]:
    """Returns the projections of PEFT's `target_parameters`.

    Raises:
      ValueError: a tensor of neither experts nor router.
    """
    found: list[str] = []
    for parameter in parameters:
        names = next(
            (names for end, names in PARAMETERS.items() if f".{parameter}".endswith(f".{end}")),
            None,
        )
        if names is None:
            raise ValueError(
                f"target_parameters: found {parameters!r:.80}; adapters of experts' "
                f"{', '.join(PARAMETERS)} are read"
            )
        found += names
    return tuple(found)
