"""Measures cases of bench_kernels in a separate process, to measure their peak memory.

    python -m scripts.benchmarks.bench_kernels.case '[{"peer": "ours", "block": "diagonal", ...}]'

Takes a list of `Case`s as JSON and prints their measurements as JSON. For {"peer": "matmul", ...}
it measures the device's rate of matrix products and describes the device.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.bench_kernels.block import Case, LeftOut, make_block
from scripts.benchmarks.bench_kernels.peers import PEERS
from scripts.benchmarks.commands import process_bytes

# (batch, m, k, n): one large product and, on a CPU, products of the sizes in an attention tile. The
# best rate counts.
PRODUCTS = {
    "cpu": ((1, 2048, 2048, 2048), (8, 512, 512, 512), (8, 512, 64, 512)),
    "other": ((1, 8192, 8192, 8192),),
}


def best_of(run: Callable, repeats: int) -> tuple[float, float]:
    """Returns the least wall-clock seconds and the least CPU seconds of `repeats` runs."""
    times = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in times), min(cpu for _, cpu in times)


def _memory_readers() -> tuple[Callable[[], int], Callable[[], int], bool]:
    """Returns functions for the current and peak bytes (of the accelerator if there is one).

    The third value says whether the peak was reset by this call.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, True
    if jax and jax.default_backend() != "cpu":
        stats = jax.devices()[0].memory_stats
        return lambda: stats()["bytes_in_use"], lambda: stats()["peak_bytes_in_use"], False
    with contextlib.suppress(OSError):
        # Linux: resets the peak, so that compiling does not count.
        Path("/proc/self/clear_refs").write_text("5")
    return lambda: process_bytes("VmRSS"), lambda: process_bytes("VmHWM"), True


def first_run_mib(run: Callable) -> float | None:
    """Returns the first run's peak above the memory in use before; None if unknown.

    It is unknown if an earlier peak was as high and cannot be reset.
    """
    current, peak, was_reset = _memory_readers()
    before, former_peak = current(), peak()
    run()
    if not was_reset and peak() <= former_peak:
        return None
    return max(peak() - before, 0) / 2**20  # Linux updates both with a delay


def measure(case: Case) -> dict:
    """Returns a case's seconds, CPU seconds and peak memory, or {"left_out": the reason}."""
    try:
        run = PEERS[case.peer](case, make_block(case))
        peak = first_run_mib(run)
        wall, cpu = best_of(run, case.repeats)
    except LeftOut as reason:
        return {"left_out": str(reason)}
    except Exception as error:  # another peer's failure must not lose later cases
        return {
            "left_out": (
                f"{type(error).__name__}: "
                f"{str(error).strip().splitlines()[0][:200] if str(error) else ''}"
            )
        }
    return {"seconds": wall, "cpu_seconds": cpu, "peak_mib": peak}


def measure_products(dtype: str) -> dict:
    """Returns the device and its best matmul rate in `dtype` with float32 results, in FLOP/s."""
    import jax
    import jax.numpy as jnp

    platform, best = jax.default_backend(), 0.0
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    for batch, m, k, n in PRODUCTS.get(platform, PRODUCTS["other"]):
        # Random numbers, since accelerators multiply ones and zeros faster, with less power.
        a, b = (
            jax.random.normal(jax.random.key(seed), shape, dtype)
            for seed, shape in enumerate(((batch, m, k), (batch, k, n)))
        )
        multiply(a, b).block_until_ready()
        # Several are in flight, so that an accelerator does not wait for the host.
        seconds, _ = best_of(
            lambda a=a, b=b: jax.block_until_ready([multiply(a, b) for _ in range(10)]), 8
        )
        best = max(best, 10 * 2.0 * batch * m * k * n / seconds)
    device = (
        f"{len(os.sched_getaffinity(0))} CPU cores"
        if platform == "cpu"
        else jax.devices()[0].device_kind
    )
    return {"platform": platform, "device": device, "jax": jax.__version__, "matmul_flops": best}


def measure_all(cases: list[Case]) -> list[dict]:
    """Returns the measurements of cases, in their order."""
    return [
        measure_products(case.dtype) if case.peer == "matmul" else measure(case) for case in cases
    ]


def main(argv: list[str]) -> None:
    print(json.dumps(measure_all([Case(**case) for case in json.loads(argv[0])])))


if __name__ == "__main__":
    main(sys.argv[1:])
