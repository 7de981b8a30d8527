"""The cells of Ring Attention's Table 3, and the configuration of our step for each."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model.config import TransformerConfig
from planning.machines import host_gib
from planning.parts import host_parts_gib
from planning.plan import Job
from planning.search import best_every_k
from scripts.benchmarks.commands import read_json
from scripts.benchmarks.papers.published import RING_ATTENTION_COLUMNS as COLUMNS
from scripts.benchmarks.papers.published import RING_ATTENTION_CONTEXTS as PAPER
from scripts.benchmarks.plan_store import kept
from scripts.benchmarks.results import ROOT, write_whole
from trainer.config.schema import MeshConfig

FILE = ROOT / "docs" / "plans" / "table3.json"
MEMORIES = ("device", "ours")
LIKE_FOR_LIKE = "paper"
# Chunk sizes with which position-wise work covers all of a device's tokens at once.
ALL_AT_ONCE = {"projection_chunk": 0, "feed_forward_chunk": 0, "loss_chunk": 0}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    topology: str
    model: str
    column: str
    memory: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.topology} {self.column} {self.memory}"

    @property
    def paper(self) -> int:
        """The paper's entry, in tokens."""
        return PAPER[self.topology][self.model][COLUMNS.index(self.column)] << 10

    @property
    def devices(self) -> int:
        """The number of the topology's devices; a v3 chip has two."""
        generation, _, shape = self.topology.partition(":")
        return math.prod(map(int, shape.split("x"))) * (2 if generation == "v3" else 1)

    @property
    def host_gib(self) -> float:
        gib = host_gib(self.topology)
        assert gib is not None  # the table lists the paper's machines
        return gib

    def memory_options(self) -> list[dict[str, Any]]:
        """Memory options to try in order; one that fits is enough."""
        if self.memory == LIKE_FOR_LIKE:  # "full gradient checkpointing"
            return [{"remat": "nothing"}]
        config = TransformerConfig.preset(self.model)
        k = best_every_k(config.num_hidden_layers)
        # Layer inputs are small compared with length x length scores, so `vanilla` keeps them.
        device: dict[str, Any] = (
            {"remat": "nothing"} if self.column == "vanilla" else {"remat": "every_k", "every_k": k}
        )
        on_host: list[dict[str, Any]] = [
            {"remat": "offload"},
            {"remat": "offload_every_k", "every_k": k},
        ]
        # Sharded over hundreds of devices, parameters and moments are small.
        if self.memory == "ours" and self.devices < 64:
            on_host[0]["moments_on_host"] = on_host[1]["moments_on_host"] = on_host[1][
                "parameters_on_host"
            ] = True
        # The ring computes one head group after another.
        heads = {"attention_groups": config.num_key_value_heads} if self.column == "ring" else {}
        return [options | heads for options in ([device] if self.memory == "device" else on_host)]

    def on_host_gib(self, context: int, options: dict[str, Any]) -> float:
        """GiB of host memory per device, known without compiling."""
        job = self.job(context, options)
        return sum(host_parts_gib(job.run, job.model).values())

    def job(self, context: int, options: dict[str, Any]) -> Job:
        """Our step in the column's configuration."""
        if self.memory == LIKE_FOR_LIKE:
            # The authors' code splits activations between layers over its tensor axis, as sequence
            # parallelism does.
            mesh = MeshConfig(tensor=self.devices, sequence_parallel=True)
            return self._job(context, options, mesh, rows=1).changed(
                model={"compute_dtype": "float32"}
            )
        return self._job(context, options, MeshConfig(fsdp=self.devices), rows=self.devices)

    def _job(self, context: int, options: dict[str, Any], mesh: MeshConfig, rows: int) -> Job:
        """The column's step; columns other than the ring use `mesh` and `rows`."""
        if self.column == "ring":
            return Job.of(
                self.model,
                self.topology,
                context,
                mesh=MeshConfig(sequence=self.devices),
                memory=options,
            )
        chunks = {} if self.column == "blockwise feed-forward" else ALL_AT_ONCE
        kernel = "reference" if self.column == "vanilla" else "auto"
        return Job.of(
            self.model,
            self.topology,
            context,
            batch=rows,
            mesh=mesh,
            memory=options | chunks,
            attention={"schedule": "local", "kernel": kernel},
        )


CELL_FIELDS = tuple(field.name for field in dataclasses.fields(Cell))


def cells(words=()) -> list[Cell]:
    """Returns the cells whose names contain all of these words, rings with host memory first."""
    ordered = [
        Cell(topology, model, column, memory)
        for column in reversed(COLUMNS)
        for memory in reversed(MEMORIES)
        for topology, models in PAPER.items()
        for model in models
    ]
    ordered += [
        Cell(topology, model, column, LIKE_FOR_LIKE)
        for column in COLUMNS
        for topology, models in PAPER.items()
        if is_gpu(topology)
        for model in models
    ]
    return [cell for cell in ordered if all(word in cell.name for word in words)]


def is_gpu(topology: str) -> bool:
    """Returns whether a topology consists of GPUs, which the paper used in float32."""
    return not topology.startswith("v")


def table_rows() -> list[tuple[str, str]]:
    """Returns the topology and model of each row of the paper's table."""
    return [(topology, model) for topology, models in PAPER.items() for model in models]


def read_cells(file: Path = FILE) -> list[dict[str, Any]]:
    """Returns the stored cells: names, longest context with its plan, why twice that fails."""
    return read_json(file) if file.exists() else []


def write_cells(contents: Iterable[dict[str, Any]], file: Path = FILE) -> None:
    """Stores cells, one per line, with the kept part of their plans."""
    lines = [
        json.dumps(content | ({"plan": kept(content["plan"])} if "plan" in content else {}))
        for content in contents
    ]
    write_whole(file, "[\n" + ",\n".join(lines) + "\n]\n")
