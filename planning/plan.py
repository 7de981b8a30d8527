"""What a training step takes on devices that are not there: compiles the step that `train.py` runs, and reads the result.

Memory, collectives and refusals are the real compiler's. Times come from the cost model (`planning.costs`) and say so: nothing
here was run.
"""
from __future__ import annotations

import dataclasses
import math
import os
import re
import time

import jax

from model.config import LlamaConfig
from model.modules import declare
from model.sharding import MESH_AXES, Parallel
from trainer.build import build_llama
from trainer.config.checks import check
from trainer.config.schema import DataConfig, MeshConfig, ModelConfig, RunConfig, SourceConfig
from trainer.mesh import make_mesh
from trainer.optimizer import split_trainable
from trainer.step import StepBuilder
from trainer.text import text_batch

from . import costs
from .compiled import GIB, memory
from .compiled.communication import communication
from .topology import memory_gib, topology_devices

# Topology -> hardware of the cost model, where the names differ: by whether GPUs are in one box, or in several.
GPU_HARDWARE = {"a100": ("a100-nvlink", "a100-infiniband"), "h100": ("h100-infiniband", "h100-infiniband")}


# A run of which nothing is said; that it has some model and data is all that a plan needs to know of them.
PLAIN = RunConfig(model=ModelConfig(path="-"), data=DataConfig(sources=(SourceConfig("-"),)))
# What a job says of memory, named as in a recipe.
MEMORY = ("remat", "every_k", "moments_on_host", "parameters_on_host", "attention_groups", "query_chunks", "prefetch")


@dataclasses.dataclass(frozen=True)
class Job:
    """A training step to be planned.

    Attributes:
      model: a preset, or the name of `config`; topology: see `topology_devices`; context: tokens in a row; batch: rows.
      mesh: None puts all devices on the sequence axis.
      schedule, kernel: as in a recipe's section `attention`; those of MEMORY: as in its section `memory`, but that 0
        attention_groups are one for each key head of a device; chunks: sizes of chunks, fields of that section too.
      recipe: all else: layout, window, precision, what is trained, accumulation, ...
      config: the model, where it is no preset.
      host_gib: of the host's memory for each device; what needs more does not fit. None asks for nothing.
    """

    model: str
    topology: str
    context: int
    batch: int = 1
    mesh: MeshConfig | None = None
    schedule: object = "ring"
    remat: str = "save_attention"
    every_k: int = 2
    moments_on_host: bool = False
    attention_groups: int = 1
    parameters_on_host: bool = False
    query_chunks: int = 1
    prefetch: bool = False
    kernel: str = "auto"
    chunks: dict[str, int] | None = None
    recipe: RunConfig = PLAIN
    config: LlamaConfig | None = None
    host_gib: float | None = None

    @property
    def llama(self) -> LlamaConfig:
        """The model's shape."""
        return self.config or LlamaConfig.preset(self.model)

    @property
    def whole_mesh(self) -> MeshConfig:
        """The mesh, said or not."""
        return self.mesh or MeshConfig(sequence=len(topology_devices(self.topology)))

    def compile(self):
        """The compiled step. Raises as `compile_step`."""
        recipe = dataclasses.replace(self.recipe, attention=dataclasses.replace(self.recipe.attention, kernel=self.kernel))
        return compile_step(self.llama, topology_devices(self.topology), self.context, batch=self.batch, mesh=self.mesh,
                            schedule=self.schedule, recipe=recipe,
                            **{name: getattr(self, name) for name in MEMORY}, **(self.chunks or {}))

    @property
    def policy(self) -> str:
        """What is kept, whether heads go in groups, queries in chunks and weights ahead, in a few words."""
        return (self.remat + ("" if self.attention_groups == 1 else " in groups")
                + ("" if self.query_chunks == 1 else " in chunks") + (" prefetched" if self.prefetch else ""))

    @property
    def axes(self) -> str:
        """The mesh in a few words."""
        return " x ".join(f"{axis} {size}" for axis, size in self._sizes.items() if size > 1) or "one device"

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis: getattr(self.whole_mesh, axis) for axis in MESH_AXES}

    def estimate(self, causal: bool = True) -> costs.Estimate | None:
        """What the cost model says of it; None where it does not know the hardware. causal False counts every pair; a window
        is not known to it."""
        generation, _, shape = self.topology.partition(":")
        one_box, several = GPU_HARDWARE.get(generation, (generation, generation))
        hardware = costs.HARDWARE.get(several if "x" in shape else one_box)
        return hardware and costs.estimate(costs.Job(
            costs.Sizes.of(self.llama), hardware, self.context, self.batch, **self._sizes, remat=self.remat,
            schedule=self.schedule if self.whole_mesh.sequence > 1 else "local", layout=self.recipe.attention.layout,
            causal=causal))


def sizes_text(needs_gib: float, has_gib: float) -> str:
    """What is needed of what there is; less than a MiB is a core's scalar memory."""
    if has_gib * 2**10 < 1:
        return f"needs {needs_gib * 2**20:.1f} KiB of {has_gib * 2**20:.1f} of scalar memory"
    return f"needs {needs_gib:.2f} GiB of {has_gib:.2f}"


class DoesNotFit(Exception):
    """The memory of the device (or `of` the host's) is too small for a job: `needs_gib` of `has_gib`. `parts`: what is known of
    it beforehand, in GiB."""

    def __init__(self, needs_gib: float, has_gib: float, parts: dict[str, float] | None = None, of: str = ""):
        known = sorted((parts or {}).items(), key=lambda item: -item[1])
        of_it = f"; of it {', '.join(f'{name} {size:.2f}' for name, size in known if size)}" if known else ""
        super().__init__(sizes_text(needs_gib, has_gib) + of + of_it)
        self.needs_gib, self.has_gib = needs_gib, has_gib


def compile_step(config: LlamaConfig, devices, context: int, *, batch=1, mesh=None, schedule="ring", kernel=None,
                 recipe=PLAIN, flags=None, **memory):
    """The training step of a model that a run would compile on these devices; all on the sequence axis unless `mesh` says
    otherwise.

    Args:
      kernel: a Kernel, in place of the recipe's.
      memory: fields of MemoryConfig in place of the recipe's (0 attention_groups are one for each of a device's key heads).
      recipe: a RunConfig with all else.
      flags: {name: value} of the compiler, for this step alone.

    Raises:
      DoesNotFit: by the compiler's own account; UserError, ValueError: a mesh or a length that cannot be.
    """
    axes = mesh or MeshConfig(sequence=len(devices))
    if memory.get("attention_groups") == 0:
        memory["attention_groups"] = Parallel.of(config, axes.tensor).local_key_heads
    run = dataclasses.replace(
        recipe, data=dataclasses.replace(recipe.data, context_length=context), mesh=axes,
        train=dataclasses.replace(recipe.train, batch_size=batch), memory=dataclasses.replace(recipe.memory, **memory),
        attention=dataclasses.replace(recipe.attention, schedule=schedule))
    if isinstance(schedule, (str, dict)):
        check(run, "plan")
    mesh = make_mesh(axes, devices, schedule)
    model = build_llama(run, config, mesh)
    if kernel:
        model = dataclasses.replace(model, kernel=kernel)
    builder = StepBuilder.of(run, model, model.loss, text_batch(batch, context, mesh))
    try:
        return builder.lower_train().compile(compiler_options=flags)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _refusal(str(error)) from None


def _refusal(text: str) -> DoesNotFit:
    """The TPU compiler's out-of-memory text as numbers."""
    # What `offload` puts on the host.
    if found := re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)", text):
        return DoesNotFit(*(int(size) / GIB for size in found.groups()))
    units = {"K": 2**-20, "M": 2**-10, "G": 1.0, "T": 2.0**10}
    found = (re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", text)
             # A kernel's tables of very many tiles, where scalar memory is small (v3).
             or re.search(r"Ran out of memory in memory space smem. Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])", text))
    if not found:
        raise RuntimeError(f"the compiler ran out of memory in words that are not known here: {text[:500]}")
    needs, needs_unit, has, has_unit = found.groups()
    return DoesNotFit(float(needs) * units[needs_unit], float(has) * units[has_unit])


def plan(job: Job) -> dict:
    """A job's plan as a flat dictionary; sizes in GiB a device. Raises as `compile_step`."""
    devices = topology_devices(job.topology)
    start = time.perf_counter()
    parts = parts_gib(job, job.llama, len(devices))
    try:
        compiled = job.compile()
    except DoesNotFit as error:
        raise DoesNotFit(error.needs_gib, error.has_gib, parts) from None
    seconds = time.perf_counter() - start
    sizes, has = memory(compiled), memory_gib(job.topology)
    if has and sizes["peak"] > has:  # the CUDA compiler does not refuse what is too large
        raise DoesNotFit(sizes["peak"], has, parts)
    if job.host_gib is not None and sizes["host"] > job.host_gib:
        raise DoesNotFit(sizes["host"], job.host_gib, of=" of the host's memory")
    return {
        "jax": jax.__version__, **({"compiler_flags": flags} if (flags := os.environ.get("LIBTPU_INIT_ARGS")) else {}),
        "model": job.model, "topology": job.topology, "devices": len(devices),
        "context": job.context, "batch": job.batch,
        "mesh": dataclasses.asdict(job.whole_mesh), "schedule": str(job.schedule),
        "tokens_per_device": job.context * job.batch // len(devices), "remat": job.remat,
        **({"every_k": job.every_k} if job.remat.endswith("every_k") else {}), "prefetch": job.prefetch,
        "attention_groups": job.attention_groups, "query_chunks": job.query_chunks, "moments_on_host": job.moments_on_host,
        "parameters_on_host": job.parameters_on_host, "compile_seconds": seconds,
        **{f"{name}_gib": size for name, size in sizes.items()},
        **{f"of_it_{name.replace(' ', '_')}_gib": size for name, size in parts.items()}, "device_gib": has,
        "left_gib": None if has is None else has - sizes["peak"],
        "communication": communication(compiled, len(devices))}


def parts_gib(job: Job, config: LlamaConfig, devices: int) -> dict[str, float]:
    """What is known of a device's memory before compiling, in GiB: float32 parameters and the moments of what is trained, as if
    split evenly, and what the layers keep for the backward (design: per layer, for c tokens a device, the input 2 c E bytes in
    bfloat16, ...)."""
    mesh, tokens, parameters, moments = _known(job, config, devices)
    heads = config.num_attention_heads / mesh.tensor
    layers = config.num_hidden_layers
    inputs = {"offload": 0, "offload_every_k": 0, "every_k": layers / job.every_k + job.every_k}.get(job.remat, layers)
    kept = layers if job.remat in ("save_attention", "everything") else 0
    wide = (heads + 2 * config.num_key_value_heads / mesh.tensor) * config.head_dim + 2 * config.intermediate_size / mesh.tensor
    parts = {"parameters": 0 if job.parameters_on_host else parameters, "moments": 0 if job.moments_on_host else moments,
             "layer inputs": inputs * 2 * tokens * config.hidden_size,
             "attention outputs": kept * tokens * heads * (2 * config.head_dim + 4),
             "products": layers * 2 * tokens * (wide + config.hidden_size) if job.remat == "everything" else 0}
    return {name: size / GIB for name, size in parts.items()}


def host_parts_gib(job: Job, config: LlamaConfig, devices: int) -> dict[str, float]:
    """What is known of the host's memory for each device before compiling, in GiB: layers' inputs in bfloat16, float32
    parameters, and moments."""
    _, tokens, parameters, moments = _known(job, config, devices)
    layers, k = config.num_hidden_layers, job.every_k
    inputs = {"offload": layers, "offload_every_k": layers / k + k}.get(job.remat, 0)
    parts = {"layer inputs": inputs * 2 * tokens * config.hidden_size, "parameters": parameters * job.parameters_on_host,
             "moments": moments * job.moments_on_host}
    return {name: size / GIB for name, size in parts.items()}


def _known(job: Job, config: LlamaConfig, devices: int) -> tuple[MeshConfig, float, float, float]:
    """The mesh, and of a device the tokens that are computed at a time and the bytes of parameters and of moments."""
    mesh, recipe, declared = job.mesh or MeshConfig(sequence=devices), job.recipe, declare(config)

    def count(names) -> float:
        return sum(math.prod(declared[name].shape) for name in names) * mesh.data / devices

    trained, _ = split_trainable(declared, recipe.model.trainable)
    moment = 2 if recipe.optimizer.moment_dtype == "bfloat16" else 4
    tokens = job.context * job.batch / (mesh.data * mesh.fsdp * mesh.sequence) / recipe.train.accumulation
    return mesh, tokens, 4 * count(declared), 2 * moment * count(trained)
