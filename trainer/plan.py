"""What a training step takes on devices that are not there: compiles the step that `train.py` runs, and reads the result.

Memory, collectives and refusals are the real compiler's. Times come from the cost model (`trainer.costs`) and say so: nothing
here was run.
"""
from __future__ import annotations

import dataclasses
import math
import re
import time

import jax

from model.attention.kernels import get_kernel
from model.config import LlamaConfig
from model.llama import Chunks, Llama
from model.modules import declare
from model.sharding import Parallel

from . import costs
from .compiled import GIB, memory
from .compiled.communication import communication
from .mesh import make_mesh
from .schema import MeshConfig, OptimizerConfig
from .step import StepBuilder, text_batch
from .topology import memory_gib, topology_devices

# Topology -> hardware of the cost model, where the names differ: by whether GPUs are in one box, or in several.
GPU_HARDWARE = {"a100": ("a100-nvlink", "a100-infiniband"), "h100": ("h100-infiniband", "h100-infiniband")}


@dataclasses.dataclass(frozen=True)
class Job:
    """A training step to be planned.

    Attributes:
      model: a preset; topology: see `topology_devices`; context: tokens in a row; batch: rows.
      mesh: None puts all devices on the sequence axis.
      schedule, kernel: see `model.attention`; remat, every_k: see `model.remat`; chunks, query_chunks, prefetch,
        attention_groups: see `Llama`, 0 groups are one for each key head of a device; moments_on_host, parameters_on_host: see
        `StepBuilder`.
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
    chunks: Chunks | None = None

    @property
    def policy(self) -> str:
        """What is kept, whether heads go in groups, queries in chunks and weights ahead, in a few words."""
        return (self.remat + ("" if self.attention_groups == 1 else " in groups")
                + ("" if self.query_chunks == 1 else " in chunks") + (" prefetched" if self.prefetch else ""))

    @property
    def axes(self) -> str:
        """The mesh in a few words."""
        mesh = self.mesh or MeshConfig(sequence=len(topology_devices(self.topology)))
        sizes = {axis: getattr(mesh, axis) for axis in ("data", "fsdp", "tensor", "sequence")}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"

    def estimate(self, layout: str = "striped", causal: bool = True) -> costs.Estimate | None:
        """What the cost model says of it; None where it does not know the hardware. causal False counts every pair."""
        generation, _, shape = self.topology.partition(":")
        one_box, several = GPU_HARDWARE.get(generation, (generation, generation))
        hardware = costs.HARDWARE.get(several if "x" in shape else one_box)
        mesh = self.mesh or MeshConfig(sequence=len(topology_devices(self.topology)))
        axes = {axis: getattr(mesh, axis) for axis in ("data", "fsdp", "tensor", "sequence")}
        return hardware and costs.estimate(costs.Job(
            costs.Sizes.of(LlamaConfig.preset(self.model)), hardware, self.context, self.batch, **axes, remat=self.remat,
            schedule=self.schedule if mesh.sequence > 1 else "local", layout=layout, causal=causal))


def sizes_text(needs_gib: float, has_gib: float) -> str:
    """What is needed of what there is; less than a MiB is a core's scalar memory."""
    if has_gib * 2**10 < 1:
        return f"needs {needs_gib * 2**20:.1f} KiB of {has_gib * 2**20:.1f} of scalar memory"
    return f"needs {needs_gib:.2f} GiB of {has_gib:.2f}"


class DoesNotFit(Exception):
    """The device's memory is too small for a job: `needs_gib` of `has_gib`. `parts`: what is known of it beforehand, in GiB."""

    def __init__(self, needs_gib: float, has_gib: float, parts: dict[str, float] | None = None):
        known = sorted((parts or {}).items(), key=lambda item: -item[1])
        of_it = f"; of it {', '.join(f'{name} {size:.2f}' for name, size in known if size)}" if known else ""
        super().__init__(sizes_text(needs_gib, has_gib) + of_it)
        self.needs_gib, self.has_gib = needs_gib, has_gib


def compile_step(config: LlamaConfig, devices, context: int, *, remat="save_attention", every_k=2, batch=1, mesh=None,
                 schedule="ring", kernel=None, moments_on_host=False, attention_groups=1, parameters_on_host=False,
                 query_chunks=1, prefetch=False, chunks=None, flags=None):
    """The compiled training step of a model on these devices; all on the sequence axis unless `mesh` says otherwise.

    flags: {name: value} of the compiler, for this step alone.

    Raises:
      DoesNotFit: by the compiler's own account; ValueError: a mesh or a length that cannot be.
    """
    axes = mesh or MeshConfig(sequence=len(devices))
    mesh = make_mesh(axes, devices, schedule)
    model = Llama(config, mesh, remat=remat, every_k=every_k, schedule=schedule, kernel=kernel or get_kernel(),
                  sequence_parallel=axes.sequence_parallel, chunks=chunks or Chunks(), query_chunks=query_chunks,
                  prefetch=prefetch,
                  attention_groups=attention_groups or Parallel.of(config, axes.tensor).local_key_heads)
    builder = StepBuilder(model, model.loss, tuple(model.parameters), text_batch(batch, context, mesh),
                          OptimizerConfig(), 1000, moments_on_host=moments_on_host, parameters_on_host=parameters_on_host)
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
    config = LlamaConfig.preset(job.model)
    parts = parts_gib(job, config, len(devices))
    try:
        compiled = compile_step(config, devices, job.context, batch=job.batch, mesh=job.mesh, remat=job.remat,
                                every_k=job.every_k, schedule=job.schedule, kernel=get_kernel(job.kernel), chunks=job.chunks,
                                moments_on_host=job.moments_on_host, attention_groups=job.attention_groups,
                                parameters_on_host=job.parameters_on_host, query_chunks=job.query_chunks,
                                prefetch=job.prefetch)
    except DoesNotFit as error:
        raise DoesNotFit(error.needs_gib, error.has_gib, parts) from None
    seconds = time.perf_counter() - start
    sizes, has = memory(compiled), memory_gib(job.topology)
    if has and sizes["peak"] > has:  # the CUDA compiler does not refuse what is too large
        raise DoesNotFit(sizes["peak"], has, parts)
    return {
        "jax": jax.__version__, "model": job.model, "topology": job.topology, "devices": len(devices),
        "context": job.context, "batch": job.batch,
        "mesh": dataclasses.asdict(job.mesh or MeshConfig(sequence=len(devices))), "schedule": str(job.schedule),
        "tokens_per_device": job.context * job.batch // len(devices), "remat": job.remat,
        **({"every_k": job.every_k} if job.remat.endswith("every_k") else {}), "prefetch": job.prefetch,
        "attention_groups": job.attention_groups, "query_chunks": job.query_chunks, "moments_on_host": job.moments_on_host,
        "parameters_on_host": job.parameters_on_host, "compile_seconds": seconds,
        **{f"{name}_gib": size for name, size in sizes.items()},
        **{f"of_it_{name.replace(' ', '_')}_gib": size for name, size in parts.items()}, "device_gib": has,
        "left_gib": None if has is None else has - sizes["peak"],
        "communication": communication(compiled, len(devices))}


def parts_gib(job: Job, config: LlamaConfig, devices: int) -> dict[str, float]:
    """What is known of a device's memory before compiling, in GiB: float32 parameters and moments as if split evenly, and what
    the layers keep for the backward (design: per layer, for c tokens a device, the input 2 c E bytes in bfloat16, ...)."""
    mesh = job.mesh or MeshConfig(sequence=devices)
    tokens = job.context * job.batch / (mesh.data * mesh.fsdp * mesh.sequence)
    count = sum(math.prod(parameter.shape) for parameter in declare(config).values()) / (devices / mesh.data)
    heads = config.num_attention_heads / mesh.tensor
    layers = config.num_hidden_layers
    inputs = {"offload": 0, "offload_every_k": 0, "every_k": layers / job.every_k + job.every_k}.get(job.remat, layers)
    kept = layers if job.remat in ("save_attention", "everything") else 0
    wide = (heads + 2 * config.num_key_value_heads / mesh.tensor) * config.head_dim + 2 * config.intermediate_size / mesh.tensor
    parts = {"parameters": 0 if job.parameters_on_host else 4 * count, "moments": 0 if job.moments_on_host else 8 * count,
             "layer inputs": inputs * 2 * tokens * config.hidden_size,
             "attention outputs": kept * tokens * heads * (2 * config.head_dim + 4),
             "products": layers * 2 * tokens * (wide + config.hidden_size) if job.remat == "everything" else 0}
    return {name: size / GIB for name, size in parts.items()}
