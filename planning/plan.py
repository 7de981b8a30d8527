"""Plans a training step on absent devices: compiles train.py's step for them and reads it.

Memory, collectives and refusals come from the real compiler. Times are the cost model's estimates
(`planning.costs`), since nothing runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from data.folders import scratch_folder
from model.attention.kernels import Kernel
from model.attention.names import MESH_AXES
from model.attention.schedules import Schedule, get_schedule
from model.config import TransformerConfig
from model.sharding import TensorParallel
from model.transformer import Transformer
from trainer.build import layer_masks
from trainer.config.checks import check
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.schema import MemoryConfig, MeshConfig, ModelConfig, RunConfig
from trainer.devices import GPU_MEMORY_SHARE
from trainer.mesh import make_mesh, require_dcn
from trainer.objectives import objective_class
from trainer.step import StepBuilder

from . import costs
from .compiled import dump, memory
from .compiled.communication import communication
from .compiled.refusal import refused_gib
from .machines import device_count, gpus_per_host, hosts, is_gpu, memory_gib, split_topology
from .memory_options import MEMORY_OPTIONS
from .parts import computed_sizes, device_tokens, parts_gib
from .topology import topology_devices

# Chip -> its hardware in the cost model (in one server, in several), if named separately.
GPU_HARDWARE = {
    "a100": ("a100-nvlink", "a100-infiniband"),
    "a100-40gb": ("a100-40gb-nvlink", "a100-40gb-infiniband"),
    "h100": ("h100-infiniband", "h100-infiniband"),
    "h200": ("h200-infiniband", "h200-infiniband"),
    "b200": ("b200-infiniband", "b200-infiniband"),
    "rtx4090": ("rtx4090", ""),
    "l40s": ("l40s", ""),
}
# The variables of compiler flags, and the compilers' packages: libtpu; the CUDA plugin, and ptxas.
VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
TPU_COMPILER = ("libtpu",)
GPU_COMPILER = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")
# A run with all defaults. For the checks a plan needs some path of a model and of data.
DEFAULT_RECIPE = RunConfig(
    model=ModelConfig(path="-"), data=DataConfig(sources=(SourceConfig("-"),))
)


def made_with(topology: str) -> dict[str, str]:
    """The versions of Python, jax, jaxlib and the packages that compile for these devices."""
    compiler = GPU_COMPILER if is_gpu(topology) else TPU_COMPILER
    versions = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", *compiler):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def changed(run: RunConfig, **sections: Any) -> RunConfig:
    """A run's configuration with changed sections: mappings of fields, or whole sections."""
    return dataclasses.replace(
        run,
        **{
            name: dataclasses.replace(getattr(run, name), **section)
            if isinstance(section, Mapping)
            else section
            for name, section in sections.items()
        },
    )


def across_slices(mesh: MeshConfig, topology: str) -> MeshConfig:
    """The mesh with a `dcn` for the topology's slices of TPUs, unless it has one. GPUs need none:
    their outermost axes cross hosts."""
    slices = split_topology(topology)[0]
    if is_gpu(topology) or mesh.dcn:
        return mesh
    return dataclasses.replace(mesh, dcn=mesh.dcn_for(slices))


def check_dcn(mesh: MeshConfig, topology: str) -> None:
    """Raises UserError, as `make_mesh` would on the machine, for a `dcn` that does not match its
    slices of TPUs or hosts of GPUs."""
    if not is_gpu(topology):
        require_dcn(mesh, split_topology(topology)[0], "slice")
    elif mesh.dcn:
        require_dcn(mesh, hosts(topology), "host")


@dataclasses.dataclass(frozen=True)
class Job:
    """A training step to be planned.

    Attributes:
      run: the recipe, with the mesh, context length and batch size to plan.
      model: the model's shape.
      topology: the devices; see `topology_devices`.
      name: the model's, in reports.
      group_per_key_head: run attention in one group per key/value head of a device, whatever the
        mesh; replaces the option `attention_groups`.
      host_gib: each device's share of host memory; a plan that needs more does not fit. None sets
        no limit.
      own_device_gib: usable device memory, instead of the table's figure.
    """

    run: RunConfig
    model: TransformerConfig
    topology: str
    name: str = ""
    group_per_key_head: bool = False
    host_gib: float | None = None
    own_device_gib: float | None = None

    @classmethod
    def of(
        cls,
        model: str | TransformerConfig,
        topology: str,
        context: int,
        *,
        batch: int = 1,
        mesh: MeshConfig | None = None,
        recipe: RunConfig = DEFAULT_RECIPE,
        **sections: Any,
    ) -> Job:
        """A job with changed sections of a recipe, such as memory={"remat": "offload"}.

        Args:
          model: a preset, or a shape.
          context: tokens in a row; batch: rows.
          mesh: None puts all devices on the sequence axis.
        """
        mesh = mesh or across_slices(MeshConfig(sequence=device_count(topology)), topology)
        name, shape = (
            (model, TransformerConfig.preset(model)) if isinstance(model, str) else ("", model)
        )
        run = changed(
            recipe, data={"context_length": context}, train={"batch_size": batch}, mesh=mesh
        )
        return cls(changed(run, **sections), shape, topology, name)

    def changed(self, **sections: Any) -> Job:
        """This job with other sections of its run; see `changed`."""
        return dataclasses.replace(self, run=changed(self.run, **sections))

    @property
    def context(self) -> int:
        """Tokens in a row."""
        return self.run.data.context_length

    @property
    def device_gib(self) -> float | None:
        """GiB of a device's memory that a program may use; None for unlisted devices."""
        return self.own_device_gib or memory_gib(self.topology)

    @property
    def batch(self) -> int:
        """Rows of the global batch."""
        return self.run.train.batch_size

    @property
    def memory(self) -> MemoryConfig:
        """The memory options, with the groups of heads that `group_per_key_head` requires."""
        if not self.group_per_key_head:
            return self.run.memory
        groups = TensorParallel.of(self.model, self.run.mesh.tensor).local_key_heads
        return dataclasses.replace(self.run.memory, attention_groups=groups)

    def compile(self, flags: dict[str, str | bool] | None = None) -> jax.stages.Compiled:
        """The compiled step; `flags` and errors are those of `compile_run`."""
        return compile_run(
            changed(self.run, memory=self.memory),
            self.model,
            topology_devices(self.topology),
            flags=flags,
        )

    def compile_to_text(self) -> tuple[jax.stages.Compiled, str | None]:
        """The compiled step, and its text if the compiler gives it. Raises as `compile_run`."""
        if is_gpu(self.topology) or not dump.NEEDED:
            compiled = self.compile()
            return compiled, compiled.as_text()
        with scratch_folder() as folder:
            return self.compile(dump.dump_flags(folder)), dump.dumped_text(folder)

    @property
    def policy(self) -> str:
        """The memory options in a few words."""
        options = self.run.memory
        return (
            options.remat
            + (" in groups" if self.group_per_key_head or options.attention_groups > 1 else "")
            + (" in chunks" if options.query_chunks > 1 else "")
            + (" prefetched" if options.prefetch else "")
        )

    @property
    def axes(self) -> str:
        """The mesh in a few words."""
        sizes = {axis: getattr(self.run.mesh, axis) for axis in MESH_AXES}
        return (
            " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
        )

    def estimate(self, causal: bool = True, overlap: bool = True) -> costs.Estimate | None:
        """The cost model's estimate; None where `untimed` says why there is none.

        Args:
          causal: False counts every query-key pair, also those that a window hides.
          overlap: False hides no transfer under compute.

        Raises:
          ValueError: the cost model has no rule for the job.
        """
        job = self.training_step(causal)
        return None if job is None else costs.estimate(dataclasses.replace(job, overlap=overlap))

    def time_range(self) -> costs.TimeRange | None:
        """The range of a step's seconds (`costs.measured`); otherwise as `estimate`."""
        job = self.training_step()
        return None if job is None else costs.time_range(job)

    @property
    def hardware(self) -> costs.Hardware | None:
        """The cost model's hardware; None if it does not list the machine. Each GPU has a network
        card of its own."""
        _, generation, shape = split_topology(self.topology)
        one_box, several_boxes = GPU_HARDWARE.get(generation, (generation, generation))
        hardware = costs.HARDWARE.get(several_boxes if "x" in shape else one_box)
        if hardware is None or not hardware.network.node:
            return hardware
        network, node = hardware.network, gpus_per_host(self.topology)
        uplink = network.uplink * node / network.node
        network = dataclasses.replace(network, node=node, uplink=uplink)
        return dataclasses.replace(hardware, network=network)

    @property
    def untimed(self) -> str:
        """Why the cost model estimates no time for the job; "" if it does."""
        slices, generation, _ = split_topology(self.topology)
        if self.hardware is None:
            return "the cost model does not list this machine"
        if slices > 1 and not is_gpu(self.topology) and not self.hardware.network.slice_link:
            return f"no bandwidth between slices of {generation} is published"
        if self.run.model.compute_dtype != "bfloat16":
            return (
                f"the cost model's rates are bfloat16's, and model.compute_dtype is "
                f"{self.run.model.compute_dtype}"
            )
        return ""

    def training_step(self, causal: bool = True) -> costs.TrainingStep | None:
        """The cost model's step of the job; None where `untimed` says why there is none."""
        hardware = self.hardware
        if hardware is None or self.untimed:
            return None
        attention, mesh, adapter = self.run.attention, self.run.mesh, self.run.adapter
        chunk = self.run.memory.feed_forward_chunk
        chunks = math.ceil(device_tokens(self.run) / chunk) if chunk else 1
        return costs.TrainingStep(
            costs.Sizes.of(computed_sizes(self.model, adapter, mesh.tensor)),
            hardware,
            self.context,
            batch=self.batch,
            **{axis: getattr(mesh, axis) for axis in MESH_AXES},
            schedule=attention.schedule if mesh.sequence > 1 else "local",
            layout=attention.layout,
            remat=self.run.memory.remat,
            causal=causal,
            masks=layer_masks(self.run, self.model),
            frozen=adapter.rank > 0,
            weight_bytes=adapter.number_bytes,
            dequantizations=chunks if adapter.quantize != "none" else 0,
            accumulation=self.run.train.accumulation,
            extra_forwards=self._extra_forwards,
            dcn=mesh.dcn,
            needed=costs.Sizes.of(self.model),
        )

    @property
    def _extra_forwards(self) -> int:
        """Forward passes over all parts of a batch that `StepBuilder.train` makes first."""
        if self.run.train.accumulation == 1:
            return 0
        return self.run.preference.labelled + self.model.has_router_losses


def sizes_text(needs_gib: float, has_gib: float) -> str:
    """Needed and available memory; less than a MiB is a core's scalar memory, in KiB."""
    if has_gib * 2**10 < 1:
        return f"needs {needs_gib * 2**20:.1f} KiB of {has_gib * 2**20:.1f} of scalar memory"
    return f"needs {needs_gib:.2f} GiB of {has_gib:.2f}"


class DoesNotFit(Exception):
    """A job needs more memory than there is.

    Attributes:
      needs_gib, has_gib: the sizes, in GiB.
      by: whose figures these are.
    """

    def __init__(
        self,
        needs_gib: float,
        has_gib: float,
        parts: dict[str, float] | None = None,
        memory: str = "",
        by: str = "the compiler",
    ):
        """`parts`: known before compiling, in GiB; `memory`: which one, if not the device's."""
        largest = sorted((parts or {}).items(), key=lambda item: -item[1])
        listed = (
            f"; of it {', '.join(f'{name} {size:.2f}' for name, size in largest if size)}"
            if largest
            else ""
        )
        super().__init__(
            sizes_text(needs_gib, has_gib) + (f" of {memory}" if memory else "") + listed
        )
        self.needs_gib, self.has_gib, self.by = needs_gib, has_gib, by


def compile_run(
    run: RunConfig,
    model: TransformerConfig,
    devices: Sequence[jax.Device],
    *,
    schedule: Schedule | None = None,
    kernel: Kernel | None = None,
    flags: dict[str, str | bool] | None = None,
) -> jax.stages.Compiled:
    """Compiles the training step that a run would execute on these devices.

    Args:
      schedule, kernel: instead of the run's.
      flags: {name: value} of the compiler, for this step only.

    Raises:
      DoesNotFit: the step needs too much memory.
      UserError, ValueError: a mesh, a length or an option that cannot work.
    """
    check(run, "plan")
    mesh = make_mesh(run.mesh, devices, schedule or run.attention.schedule)
    objective = objective_class(run)
    transformer, batch = objective.abstract_model_and_batch(run, model, mesh)
    assert isinstance(transformer, Transformer)  # with a schedule and a kernel
    if schedule is not None:
        schedule = get_schedule(schedule, run.mesh.sequence, run.attention.layout)
        transformer = dataclasses.replace(transformer, schedule=schedule)
    if kernel is not None:
        transformer = dataclasses.replace(transformer, kernel=kernel)
    loss, totals = objective.loss_and_totals(run, transformer)
    builder = StepBuilder.of(run, transformer, loss, batch, totals)
    try:
        return builder.lower_train().compile(compiler_options=flags)
    except jax.errors.JaxRuntimeError as error:
        if error.error_code_string != "RESOURCE_EXHAUSTED":
            raise
        raise DoesNotFit(*refused_gib(str(error))) from None


def plan(job: Job) -> dict[str, Any]:
    """Returns a job's plan, which `python -m scripts.plan` writes as JSON.

    Keys that end in `_gib` are GiB per device.

    Returns:
      A dictionary, flat but for `mesh`, `made_with` and `communication`:
        jax, made_with, model, topology, devices, context, batch, tokens_per_device, schedule: the
        question, and `made_with`
          the versions of Python, jax, jaxlib and the compiler, and the user's flags by environment
          variable.
        mesh: the fields of MeshConfig; remat, attention_groups, query_chunks, prefetch, ...: the
          memory options.
        compile_seconds, and the compiler's figures: arguments_gib, outputs_gib, temporaries_gib,
        peak_gib, host_gib, ...
        device_gib, left_gib: the device's memory, and what the step leaves free; of_it_..._gib:
          parts of peak_gib.
        communication: {kind of collective: {times, received_gib, hidden}}, `hidden` from 0 to 1;
          None without a text.

    Raises:
      DoesNotFit: the device's or the host's memory is too small.
      UserError, ValueError: as `compile_run`.
    """
    # Before a topology adds its flags.
    user_flags = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    start = time.perf_counter()
    parts = parts_gib(job.run, job.model)
    try:
        compiled, text = job.compile_to_text()
    except DoesNotFit as error:
        raise DoesNotFit(error.needs_gib, error.has_gib, parts) from None
    seconds = time.perf_counter() - start
    sizes = memory(compiled)
    check_fits(job, sizes, parts)
    device_gib, devices = job.device_gib, device_count(job.topology)
    return {
        "jax": jax.__version__,
        "made_with": {**made_with(job.topology), "flags": user_flags},
        **_described(job, devices),
        "compile_seconds": seconds,
        **{f"{name}_gib": size for name, size in sizes.items()},
        **{f"of_it_{name.replace(' ', '_')}_gib": size for name, size in parts.items()},
        "device_gib": device_gib,
        "left_gib": None if device_gib is None else device_gib - sizes["peak"],
        "communication": communication(text, devices) if text else None,
    }


def check_fits(job: Job, sizes: dict[str, float], parts: dict[str, float]) -> None:
    """Raises DoesNotFit; CUDA's compiler never refuses, and none checks host memory."""
    device_gib = job.device_gib
    if device_gib is not None and sizes["peak"] > device_gib:
        taken = (
            f"what JAX may take, {GPU_MEMORY_SHARE:g} of a GPU's" if is_gpu(job.topology) else ""
        )
        raise DoesNotFit(sizes["peak"], device_gib, parts, taken)
    if job.host_gib is not None and sizes["host"] > job.host_gib:
        raise DoesNotFit(sizes["host"], job.host_gib, memory="the host's memory")


def _described(job: Job, devices: int) -> dict[str, Any]:
    """The job as a flat dictionary; attention_groups = 0 means one per key head of a device."""
    options = {name: getattr(job.run.memory, name) for name in MEMORY_OPTIONS}
    if job.group_per_key_head:
        options["attention_groups"] = 0
    if not job.run.memory.policy.every_k:
        del options["every_k"]
    return {
        "model": job.name,
        "topology": job.topology,
        "devices": devices,
        "context": job.context,
        "batch": job.batch,
        "mesh": dataclasses.asdict(job.run.mesh),
        "schedule": str(job.run.attention.schedule),
        "tokens_per_device": job.context * job.batch // devices,
        **options,
    }
