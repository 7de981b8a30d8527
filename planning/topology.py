"""Absent machines' devices, as their compilers describe them; the only file that queries them.

A step lowered for such devices goes through the real compiler: memory plan, collectives and their
schedule are the machine's. TPUs need the `libtpu` wheel, GPUs need JAX's CUDA plugin and its
compiler's wheels; neither needs the device.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

import jax

from trainer.devices import GPUS, Gpu

from .machines import ANY_GPU, split_topology

SECONDS_BETWEEN_LINES = 30.0  # while compiling


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a topology, to lower for.

    Args:
      name: TPUs as generation:shape (v4:4x4x4, v5e:16x16) or several slices of it (2xv5e:16x16);
        GPUs as chip:number or chip:hosts x GPUs per host (h100:8, a100:4x8).

    Raises:
      ValueError: the compiler does not know the topology, or is not installed.
    """
    slices, generation, shape = split_topology(name)
    gpu = GPUS.get(generation)
    if gpu is not None:
        return _gpus(name, generation, gpu, shape)
    if generation == ANY_GPU:
        raise ValueError(
            f"topology: {name!r} cannot be compiled for: the CUDA compiler has no description of "
            f"it here, only of {', '.join(GPUS)}; the estimate needs no "
            "compiler"
        )
    return _tpus(name, slices, generation, shape)


def _tpus(name: str, slices: int, generation: str, shape: str) -> list[jax.Device]:
    from jax.experimental import topologies

    # Several processes may use the compiler at once, and there is no TPU to query for metadata.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    options = {"chip_config_name": "megacore"} if generation == "v4" else {}
    try:
        with _silent_stderr():
            return topologies.get_topology_desc(
                platform="tpu", topology_name=f"{generation}:{shape}", num_slices=slices, **options
            ).devices
    except Exception as error:
        raise ValueError(
            f"topology: {name!r} is not known to the TPU compiler ({str(error).splitlines()[0]}); "
            "write generation:shape, such as v4:4x4x4 or v5e:16x16 (the compiler comes with "
            f"`libtpu`), or chip:number for GPUs ({', '.join(GPUS)})"
        ) from None


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drops stderr: without a TPU, the compiler prints warnings that look like failures."""
    sys.stderr.flush()
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Reports compile time on stderr, and drops what the compiler writes there.

    A refusal reaches the caller as an exception with the same figures; on stderr it is a memory
    dump.

    Raises:
      ValueError: the compiler fails for a reason other than memory; the first line of its message.
    """
    start, done = time.monotonic(), threading.Event()
    with open(os.dup(2), "w", encoding="utf-8") as stderr, _silent_stderr():

        def tell() -> None:
            while not done.wait(SECONDS_BETWEEN_LINES):
                print(f"still compiling, {time.monotonic() - start:.0f} s", file=stderr, flush=True)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"the compiler fails: {str(error).splitlines()[0]}") from error
        finally:
            done.set()
            teller.join()


def _gpus(name: str, chip: str, gpu: Gpu, shape: str) -> list[jax.Device]:
    from jax.experimental import topologies

    hosts, _, gpus_per_host = shape.rpartition("x")
    if not (gpus_per_host.isdigit() and (hosts or "1").isdigit()):
        raise ValueError(
            f"topology: found {name!r}; write {chip}:8 for 8 GPUs of one host, {chip}:4x8 for 4 "
            "hosts of 8"
        )
    # An absent GPU cannot time kernels, so autotuning is off; the latency-hiding scheduler is on,
    # as in a run.
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_latency_hiding_scheduler=true"
    user_flags = os.environ.get("XLA_FLAGS", "")
    if flags not in user_flags:
        os.environ["XLA_FLAGS"] = f"{flags} {user_flags}"  # the user's flags come last, so they win
    try:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=chip,
            target_config=_target(gpu),
            topology=f"1x{hosts or 1}x{gpus_per_host}",
        ).devices
    except Exception as error:
        raise ValueError(
            f"topology: {name!r} needs the CUDA compiler ({str(error).splitlines()[0]}); "
            "make install PLATFORM=cuda installs it, and needs no GPU"
        ) from None


def _target(gpu: Gpu) -> str:
    """The GPU as text for the CUDA compiler (XLA's GpuTargetConfigProto).

    The system keeps 1 KiB of a core's shared memory. The other limits on threads, blocks and
    registers are the same for all capabilities in the table (CUDA C++ Programming Guide, technical
    specifications of 8.0, 8.9, 9.0 and 10.0).
    """
    assert gpu.memory_gib is not None
    major, minor = gpu.compute_capability
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024  threads_per_warp: 32
          threads_per_core_limit: {gpu.threads_per_core}
          shared_memory_per_block: 49152  shared_memory_per_core: {gpu.shared_memory_per_core}
          shared_memory_per_block_optin: {gpu.shared_memory_per_core - 1024}
          core_count: {gpu.cores}  fpus_per_core: {gpu.fpus_per_core}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
          registers_per_core_limit: 65536  registers_per_block_limit: 65536
          memory_bandwidth: {round(gpu.memory_bandwidth)}  l2_cache_size: {gpu.l2_cache}
          clock_rate_ghz: {gpu.clock_ghz}  device_memory_size: {round(gpu.memory_gib * 2**30)}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{gpu.product}"
        """
