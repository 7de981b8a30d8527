"""Reads a trace from jax.profiler: a device's time by kernel, with each instant counted once.

CPU, GPU and TPU kernels are in different places of a trace:

    GPU   plane /device:GPU:n, lines "Stream #..."
    TPU   plane /device:TPU:n, lines "XLA Ops" and "Async XLA Ops"
    CPU   plane /host:CPU, events that name an instruction (hlo_op), of device device_ordinal
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

from data.errors import UserError

# Instructions that only run other instructions, and so are not kernels.
CONTROL = re.compile(r"(while|conditional|call|async-(start|done|update))([.\d]*)$")


class Event(NamedTuple):
    """One run of a kernel: its name, start and end in nanoseconds."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class DeviceTrace:
    """A device's nanoseconds by kernel, its number of runs by kernel, and the traced span.

    Attributes:
      nanoseconds: sums to the device's busy time: concurrent kernels share their time equally, and
        communication counts only while nothing else runs.
      span: nanoseconds from the start of the first kernel to the end of the last.
    """

    nanoseconds: dict[str, float]
    runs: dict[str, int]
    span: float

    @property
    def idle(self) -> float:
        """Nanoseconds of the span in which no kernel ran."""
        return self.span - sum(self.nanoseconds.values())


def read_trace(folder: Path, is_communication: Callable[[str], bool]) -> dict[str, DeviceTrace]:
    """Returns the device traces of the newest trace in a folder, by device name.

    Raises:
      UserError: there is no trace, or it contains no kernel.
    """
    paths = sorted(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise UserError(
            f"trace: no *.xplane.pb in {folder}; pass a folder that jax.profiler wrote, such as "
            "RUN/profile of a run with logging.profile_steps"
        )
    devices = device_events(ProfileData.from_file(str(paths[-1])))
    if not devices:
        raise UserError(f"trace: {paths[-1]} contains no kernel of a device; trace a full step")
    return {name: summarize(lines, is_communication) for name, lines in sorted(devices.items())}


def device_events(profile: ProfileData) -> dict[str, list[list[Event]]]:
    """Returns each device's lines of kernels: streams, or a CPU's threads."""
    devices: dict[str, list[list[Event]]] = collections.defaultdict(list)
    for plane in profile.planes:
        accelerator = re.fullmatch(r"/device:((?:GPU|TPU):\d+)", plane.name)
        for line in plane.lines:
            if accelerator and ("Stream" in line.name or line.name.endswith("XLA Ops")):
                devices[accelerator[1]].append([_event(event) for event in line.events])
            elif plane.name == "/host:CPU":
                for device, events in _on_cpu(line.events).items():
                    devices[device].append(events)
    busy = {device: [line for line in lines if line] for device, lines in devices.items()}
    on_accelerator = {name: lines for name, lines in busy.items() if "CPU" not in name and lines}
    return on_accelerator or {name: lines for name, lines in busy.items() if lines}


def _event(event) -> Event:
    # A TPU event's name is the instruction's text, %fusion.1 = ...
    name = event.name.split(" = ")[0].lstrip("%")
    return Event(name, event.start_ns, event.start_ns + event.duration_ns)


def _on_cpu(events: Iterable) -> dict[str, list[Event]]:
    """Returns a thread's events that name an instruction, by device."""
    devices: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        stats = dict(event.stats)
        if "hlo_op" in stats:
            devices[f"CPU:{stats.get('device_ordinal', 0)}"].append(_event(event))
    return devices


def summarize(lines: list[list[Event]], is_communication: Callable[[str], bool]) -> DeviceTrace:
    """Returns the time of each kernel of a device."""
    events = [event for line in lines for event in line if not CONTROL.match(event.name)]
    pieces = [piece for line in lines for piece in innermost(line) if not CONTROL.match(piece.name)]
    if not pieces:
        return DeviceTrace({}, {}, 0.0)
    span = max(piece.end for piece in pieces) - min(piece.start for piece in pieces)
    runs = collections.Counter(event.name for event in events)
    return DeviceTrace(shared_time(pieces, is_communication), dict(runs), span)


def innermost(line: list[Event]) -> list[Event]:
    """Returns the pieces of a line's events during which no nested event of the line runs."""
    pieces: list[Event] = []
    open_events: list[Event] = []
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        if open_events and until > now:
            pieces.append(Event(open_events[-1].name, now, until))
        now = max(now, until)

    def close(until: float) -> None:
        while open_events and open_events[-1].end <= until:
            advance(open_events[-1].end)
            open_events.pop()

    for event in sorted(line, key=lambda event: (event.start, -event.end)):
        close(event.start)
        advance(event.start)
        open_events.append(event)
    close(float("inf"))
    return pieces


def shared_time(pieces: list[Event], is_communication: Callable[[str], bool]) -> dict[str, float]:
    """Returns nanoseconds by name: concurrent kernels share their time equally, and communication
    counts only while nothing else runs."""
    changes = sorted(
        [(piece.start, 1, piece.name) for piece in pieces]
        + [(piece.end, -1, piece.name) for piece in pieces]
    )
    total: dict[str, float] = collections.defaultdict(float)
    running: collections.Counter[str] = collections.Counter()
    now = 0.0
    for time, change, name in changes:
        if running and time > now:
            computing = {other: n for other, n in running.items() if not is_communication(other)}
            sharing = computing or running
            share = (time - now) / sum(sharing.values())
            for other, count in sharing.items():
                total[other] += share * count
        now = time
        running[name] += change
        if not running[name]:
            del running[name]
    return dict(total)
