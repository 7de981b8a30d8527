"""Ends a stalled run: every process prints its stacks, and the message says which process is
behind.

A thread in each process compares the time since the last progress with a limit: one for steps,
others for compiling, saving and evaluating. It also sends process 0 a sign of life every few
seconds; when a process falls silent, process 0 ends all before JAX would abort without a reason.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

from trainer.config.schema import DistributedConfig
from trainer.run import cluster
from trainer.run.outcome import TRY_AGAIN

# A step may take this many times as long as usual, if that exceeds distributed.stall_minutes.
USUAL_STEPS = 10
# JAX's heartbeats end a process after cluster.HEARTBEAT_SECONDS; a pause of 20 seconds is
# tolerated.
SILENT_SECONDS = 35.0
_PERIOD = 5.0  # seconds between two looks
_PROGRESS = "longstripe/progress"


class Watchdog:
    """Watches this process from construction to `close`; processes share their state."""

    def __init__(self, config: DistributedConfig, period: float = _PERIOD) -> None:
        self.config, self.period = config, period
        self.step, self.doing = 0, "starting"
        self.limit: float | None = None  # seconds; None without a limit
        self.since = time.monotonic()
        self._recent: deque[float] = deque(maxlen=20)  # seconds of the last steps
        self._beats = 0
        # In process 0: number -> count of its messages, and when the last one came.
        self._heard: dict[str, tuple[int, float]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()

    def begin_step(self, step: int) -> None:
        """Begins a step, and ends the previous one."""
        now = time.monotonic()
        if self.doing == "in a step" and step == self.step + 1:
            self._recent.append(now - self.since)
        self.step, self.doing, self.since = step, "in a step", now
        if not self._recent:  # the first step may load and tune kernels
            self.limit = _seconds(self.config.compile_minutes)
        elif (stall := _seconds(self.config.stall_minutes)) is not None:
            self.limit = max(stall, USUAL_STEPS * statistics.median(self._recent))
        else:
            self.limit = None

    def step_seconds_left(self) -> float | None:
        """Returns the expected seconds until the running step ends; None if none is running or was
        timed."""
        if self.doing != "in a step" or not self._recent:
            return None
        return max(0.0, statistics.median(self._recent) - (time.monotonic() - self.since))

    @contextlib.contextmanager
    def phase(self, doing: str, minutes: float) -> Iterator[None]:
        """Sets a limit within the context; afterwards the previous limit starts over."""
        before = self.doing, self.limit
        self.doing, self.limit, self.since = doing, _seconds(minutes), time.monotonic()
        try:
            yield
        finally:
            # An interrupted step is not measured.
            earlier = f"after {doing}" if before[0] == "in a step" else before[0]
            self.doing, self.limit, self.since = earlier, before[1], time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(self.period):
            self._say()
            limit, waited = self.limit, time.monotonic() - self.since
            if limit is not None and waited > limit:
                self._end(
                    f"nothing has moved for {waited / 60:.1f} minutes ({self._progress()}); "
                    f"{self._who_is_behind()}"
                )
            elif silent := self._silent():
                self._end(
                    f"process{'es' * (len(silent) > 1)} {', '.join(silent)} of "
                    f"{cluster.processes()} ha{'ve' if len(silent) > 1 else 's'} not been heard "
                    f"from for {SILENT_SECONDS:.0f} s"
                )

    def _progress(self) -> str:
        return f"step {self.step}, {self.doing}"

    def _say(self) -> None:
        """Tells the others what this process does."""
        if cluster.processes() > 1:
            self._beats += 1
            # Fails if the service is gone, which its client reports.
            with contextlib.suppress(Exception):
                cluster.client().key_value_set(
                    f"{_PROGRESS}/{cluster.process()}",
                    json.dumps({"beat": self._beats, "step": self.step, "doing": self.doing}),
                    allow_overwrite=True,
                )

    def _others(self) -> dict[str, dict]:
        """Process number -> its last message."""
        if cluster.processes() == 1:
            return {}
        try:
            entries = cluster.client().key_value_dir_get(_PROGRESS)
            return {key.rpartition("/")[2]: json.loads(value) for key, value in entries}
        except Exception:  # the service is gone, as above
            return {}

    def _silent(self) -> list[str]:
        """In process 0, the started processes that have been silent for SILENT_SECONDS."""
        if cluster.process() != 0:
            return []
        now = time.monotonic()
        for number, heartbeat in self._others().items():
            if self._heard.get(number, (None, 0.0))[0] != heartbeat["beat"]:
                self._heard[number] = heartbeat["beat"], now
        return sorted(
            (number for number, (_, heard) in self._heard.items() if now - heard > SILENT_SECONDS),
            key=int,
        )

    def _who_is_behind(self) -> str:
        """Names the processes that are behind the others, or silent ones."""
        others = self._others()
        if not others:
            return "the stacks above show where this process waits"
        steps = {number: heartbeat["step"] for number, heartbeat in others.items()}
        behind = [
            f"process {number} is in step {step} ({others[number]['doing']})"
            for number, step in sorted(steps.items(), key=lambda entry: int(entry[0]))
            if step < max(steps.values())
        ]
        missing = [
            f"process {number} has not reported"
            for number in range(cluster.processes())
            if str(number) not in steps
        ]
        return "; ".join(missing + behind) or f"all processes are in step {max(steps.values())}"

    def _end(self, reason: str) -> None:
        """Ends all processes, each after printing its threads' stacks."""
        if self._closed.is_set():
            return
        print_stacks()
        message = f"{reason}; the same command resumes from the last checkpoint"
        print(f"error: {message}", file=sys.stderr, flush=True)
        cluster.end_all(message)
        os._exit(TRY_AGAIN)


def print_stacks() -> None:
    """Prints the stacks of this process's threads to standard error."""
    sys.stderr.flush()
    faulthandler.dump_traceback(file=2, all_threads=True)


def _seconds(minutes: float) -> float | None:
    return 60 * minutes or None
