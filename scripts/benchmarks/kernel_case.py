"""One measurement of bench_kernels in a process of its own, so that its memory is its own: a Case as JSON in, JSON out.

    python -m scripts.benchmarks.kernel_case '{"peer": "ours", "block": "diagonal", "length": 4096, "backward": true}'

With {"peer": "matmul", ...} it measures the device's rate of matrix products, and tells what the device is.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .kernel_peers import PEERS, Case, LeftOut, make_block

# (batch, m, k, n): one large product, and products of the size that a tile of attention makes. The best is the device's rate.
PRODUCTS = {"cpu": ((1, 2048, 2048, 2048), (8, 512, 512, 512), (8, 512, 64, 512)), "other": ((1, 8192, 8192, 8192),)}


def best_of(run: Callable, repeats: int) -> tuple[float, float]:
    """The least wall-clock seconds and the least processor seconds (of all threads) of some runs."""
    times = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in times), min(cpu for _, cpu in times)


def _host_bytes(what: str) -> int:
    """This process's memory: `VmRSS` now, or `VmHWM`, the most since that mark was last reset."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes, and only the most
    return int(re.search(rf"{what}:\s+(\d+) kB", status.read_text()).group(1)) * 1024


def _memory_now_and_most() -> tuple[Callable, Callable]:
    """Two functions that tell bytes: of the accelerator where there is one, else of this process."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch and torch.cuda.is_available():
        return torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
    if jax and jax.default_backend() != "cpu":
        stats = jax.devices()[0].memory_stats
        return lambda: stats()["bytes_in_use"], lambda: stats()["peak_bytes_in_use"]
    return lambda: _host_bytes("VmRSS"), lambda: _host_bytes("VmHWM")


def first_run_bytes(run: Callable) -> int:
    """The most that the first run holds beyond what was there: the program, and the inputs."""
    now, most = _memory_now_and_most()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the mark starts anew, so that compiling does not count
    before = now()
    run()
    return most() - before


def measure(case: Case) -> dict:
    """Seconds, processor seconds and peak memory of one case, or why it was left out."""
    try:
        run = PEERS[case.peer](case, make_block(case))
        peak = first_run_bytes(run)
        wall, cpu = best_of(run, case.repeats)
    except LeftOut as why:
        return {"left_out": str(why)}
    return {"seconds": wall, "cpu_seconds": cpu, "peak_mib": peak / 2**20}


def measure_products(dtype: str) -> dict:
    """The device, and its best rate of matrix products in `dtype` with float32 results."""
    import jax
    import jax.numpy as jnp

    platform, best = jax.default_backend(), 0.0
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    for batch, m, k, n in PRODUCTS.get(platform, PRODUCTS["other"]):
        a, b = jnp.ones((batch, m, k), dtype), jnp.ones((batch, k, n), dtype)
        multiply(a, b).block_until_ready()
        # Several are in flight at once, so that an accelerator does not wait for the host between them.
        seconds, _ = best_of(lambda a=a, b=b: jax.block_until_ready([multiply(a, b) for _ in range(10)]), 8)
        best = max(best, 10 * 2.0 * batch * m * k * n / seconds)
    device = f"{len(os.sched_getaffinity(0))} CPU cores" if platform == "cpu" else jax.devices()[0].device_kind
    return {"platform": platform, "device": device, "jax": jax.__version__, "matmul_flops": best}


def main(argv: list[str]) -> None:
    case = Case(**json.loads(argv[0]))
    print(json.dumps(measure_products(case.dtype) if case.peer == "matmul" else measure(case)))


if __name__ == "__main__":
    main(sys.argv[1:])
