"""A run's metrics: memory, times and rates of its steps, and the names that logs give them.

A line of metrics.jsonl is {"step": ..., NAMES...}, and with several sources `loss_by_source/NAME`
for each with a target in the step. Losses, target_tokens, grad_norm and learning_rate are the
step's. Times and rates are means over the steps since the previous line; data_wait_seconds is the
time the devices waited for data. compile_seconds and the peaks cover the process so far; epoch,
tokens_seen (without padding) and wall_seconds (training, including evaluations and saves) the whole
run, over all its starts.
"""

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from model.attention import Mask
from model.config import TransformerConfig
from trainer.devices import peak_flops
from trainer.flops import flops_per_step, frozen_weights, pairs_per_layer

NAMES = (
    "loss_nats_per_target",
    "target_tokens",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu",
    "grad_norm",
    "learning_rate",
    "data_wait_seconds",
    "step_seconds",
    "compile_seconds",
    "peak_device_gib",
    "peak_host_gib",
    "padding_share",
)


def peak_device_gib(devices: Iterable[Any]) -> float | None:
    """The peak memory over this process's `devices` so far; None if not reported."""
    stats = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    peaks = [peak for peak in stats if peak is not None]
    return max(peaks) / 2**30 if peaks else None


def peak_host_gib() -> float:
    """The peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux


class Meter:
    """Measures steps, data waits and compiling; computes rates and the time left.

    meter = Meter(model_config, devices, mask=mask)
    with meter.compiling(): ...                 # before or between steps; not part of a step
    meter.start()
    for step in ...:
        loss = ...                              # dispatched
        computed = meter.when_computed(loss)
        with meter.waiting_for_data(computed): batch = ...
        wait for the loss
        meter.count(lengths, batch_tokens)
        if time to log: row = meter.read(step, loss_nats_per_target=..., target_tokens=..., ...)
        with meter.paused(): save, evaluate     # not part of a step
    """

    def __init__(
        self,
        config: TransformerConfig,
        devices: Iterable[Any],
        clock: Callable[[], float] = time.perf_counter,
        mask: Mask = Mask(),
        frozen: Collection[str] | None = None,
    ) -> None:
        """Starts measuring.

        Args:
          config: the model, for FLOPs.
          devices: all devices of the mesh, including other processes'.
          clock: returns seconds.
          mask: the attention mask, for FLOPs.
          frozen: names of the parameters that are not trained; by default all but adapters, if
            the model has adapters.
        """
        self._config, self._devices, self._clock, self._mask = config, list(devices), clock, mask
        # Counted here, since it traces the model's declaration, and the devices wait for `read`.
        self._frozen = None if frozen is None else frozen_weights(config, frozen)
        peak = peak_flops(self._devices[0].device_kind)
        self._peak = peak * len(self._devices) if peak else None
        self.compile_seconds = 0.0
        self.seconds_per_step: float | None = None
        self._start = clock()
        self._watcher = ThreadPoolExecutor(1, "when_computed")
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._batch_tokens = 0
        self._pairs = 0.0
        self._not_counted = 0.0
        # (begin, end, when the devices became idle).
        self._data_waits: list[tuple[float, float, Future[float] | None]] = []
        self._start = self._clock()

    def start(self) -> None:
        """Begins the first interval; earlier time counts for no step."""
        self._reset()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context for compiling: its time counts as compile_seconds and for no step."""
        before = self._clock()
        with self.paused():
            yield
        self.compile_seconds += self._clock() - before

    @contextlib.contextmanager
    def waiting_for_data(self, computed: Future[float] | None = None) -> Iterator[None]:
        """A context for a wait for data, which is part of the step.

        Its time counts as data_wait_seconds; with `computed`, from `when_computed`, only the time
        after that, since the devices were still busy.
        """
        before = self._clock()
        yield
        self._data_waits.append((before, self._clock(), computed))

    def when_computed(self, arrays: Any) -> Future[float]:
        """Returns a future of the clock's time at which the devices have computed these arrays."""

        def wait() -> float:
            import jax

            jax.block_until_ready(arrays)
            return self._clock()

        return self._watcher.submit(wait)

    def _data_wait(self) -> float:
        """Returns the seconds that the devices waited for data since the last reading."""
        return sum(
            max(0.0, end - (max(begin, computed.result()) if computed else begin))
            for begin, end, computed in self._data_waits
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time counts for no step."""
        before = self._clock()
        yield
        self._not_counted += self._clock() - before

    def count(self, lengths: np.ndarray, batch_tokens: int, shared: np.ndarray | int = 0) -> None:
        """Counts a finished step's global batch.

        Args:
          lengths: tokens of each document in it.
          batch_tokens: all tokens, padding included.
          shared: tokens of earlier documents that each document also sees.
        """
        self._steps += 1
        self._tokens += int(np.sum(lengths))
        self._batch_tokens += batch_tokens
        self._pairs += pairs_per_layer(self._config, lengths, self._mask, shared)

    def read(self, step: int, **values: float) -> dict[str, Any]:
        """Returns metrics for `step`, with the loop's `values`; begins the next interval."""
        seconds = max(self._clock() - self._start - self._not_counted, 1e-9)
        steps = max(self._steps, 1)
        self.seconds_per_step = seconds / steps
        rate = self._tokens / seconds
        flops = flops_per_step(self._config, self._tokens, self._pairs, self._frozen)
        row = {
            **values,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / len(self._devices),
            "mfu": flops / seconds / self._peak if self._peak else None,
            "data_wait_seconds": self._data_wait() / steps,
            "step_seconds": self.seconds_per_step,
            "compile_seconds": self.compile_seconds,
            "peak_device_gib": peak_device_gib(_local(self._devices)),
            "peak_host_gib": peak_host_gib(),
            "padding_share": 1 - self._tokens / self._batch_tokens if self._batch_tokens else 0.0,
        }
        self._reset()
        names = dict.fromkeys([*(name for name in NAMES if name in row), *values])
        return {"step": step, **{name: plain_number(row[name]) for name in names}}

    def seconds_left(self, step: int, steps: int) -> float | None:
        """The seconds left after `step` at the last pace; None before the first reading."""
        return None if self.seconds_per_step is None else (steps - step) * self.seconds_per_step


def _local(devices: Iterable[Any]) -> list[Any]:
    """This process's devices; only they report their memory."""
    import jax

    return [device for device in devices if device.process_index == jax.process_index()]


def plain_number(value: Any) -> float | int | None:
    """`value` as a plain number; None for nan and inf, which JSON cannot express."""
    if value is None or isinstance(value, int):
        return value
    value = value.item() if hasattr(value, "item") else value
    return value if math.isfinite(value) else None
