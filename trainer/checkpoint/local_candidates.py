"""Which local checkpoint a run continues from, given the parts on its hosts; and which process
keeps whose copy."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint.local_part import Header, digest_of, read_header
from trainer.checkpoint.manifest import DamagedError


@dataclass(frozen=True)
class Expected:
    """What the parts of a usable local checkpoint must match.

    Attributes:
      run: the run's identifier.
      mesh: as in `local_part.Header`.
      layouts: of each process's arrays, `local_part.digest_of`.
    """

    run: str
    mesh: str
    layouts: Sequence[str]


class FoundPart(NamedTuple):
    """A part found on a process's host; the fields of `local_part.Header`, with the layout's
    digest."""

    run: str
    location: str
    attempt: str
    step: int
    part: int
    processes: int
    mesh: str
    layout: str


class Candidate(NamedTuple):
    """A step whose parts were all found.

    Attributes:
      step: finished optimizer steps.
      attempt: of the start that saved it.
      holders: the processes that found each part.
    """

    step: int
    attempt: str
    holders: list[list[int]]


def part_name(step: int, part: int) -> str:
    """Returns the name of a part's file."""
    return f"step_{step}.part_{part}"


def candidates(
    found: Sequence[Sequence[FoundPart]], expected: Expected, after: int
) -> tuple[list[Candidate], list[str]]:
    """Returns the complete steps after `after`, newest first, and for each of the others a line
    that says why it is not used.

    Args:
      found: the parts found by each process.
    """
    count = len(expected.layouts)
    held: defaultdict[tuple[int, str], defaultdict[int, list[int]]]
    held = defaultdict(lambda: defaultdict(list))
    refused: dict[str, None] = {}
    for process, parts in enumerate(found):
        for part in parts:
            if part.run != expected.run:
                refused[
                    f"found a local checkpoint of another run ({part.location}); if that run no "
                    "longer needs it, delete it to free its space"
                ] = None
            elif part.step <= after:
                continue
            elif reason := _difference(part, expected):
                refused[f"the local checkpoint of step {part.step} {reason}; it is not used"] = None
            else:
                held[part.step, part.attempt][part.part].append(process)
    complete = []
    for (step, attempt), holders in sorted(held.items(), reverse=True):
        if missing := [str(part) for part in range(count) if not holders[part]]:
            refused[
                f"the local checkpoint of step {step} is incomplete: no host has the "
                f"part{'s' * (len(missing) > 1)} of process{'es' * (len(missing) > 1)} "
                + ", ".join(missing)
            ] = None
        else:
            complete.append(Candidate(step, attempt, [holders[part] for part in range(count)]))
    return complete, list(refused)


def _difference(part: FoundPart, expected: Expected) -> str | None:
    """Returns why a part of the run does not fit the arrays to restore."""
    count = len(expected.layouts)
    if part.processes != count:
        return f"was saved by {part.processes} processes, and {count} are here"
    if part.mesh != expected.mesh:
        return f"was saved on another mesh ({part.mesh}; now {expected.mesh})"
    if part.layout != expected.layouts[part.part]:
        return "has other arrays, or divides them differently"
    return None


def keeper_of(part: int, hosts: Sequence[str]) -> int | None:
    """Returns the process that keeps the copy of a process's part: one on the next host, or the
    next process if all share a host; None if it is alone.

    Args:
      hosts: the name of each process's host.
    """
    if len(hosts) == 1:
        return None
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return (part + 1) % len(hosts)
    of_host = {name: [i for i, host in enumerate(hosts) if host == name] for name in names}
    following = of_host[names[(names.index(hosts[part]) + 1) % len(names)]]
    return following[of_host[hosts[part]].index(part) % len(following)]


def kept_for(process: int, hosts: Sequence[str]) -> Iterator[int]:
    """Yields the processes whose copies a process keeps."""
    return (part for part in range(len(hosts)) if keeper_of(part, hosts) == process)


def key_of(header: Header) -> str:
    """Returns the name by which processes request a part."""
    return f"{part_name(header.step, header.part)}.{header.attempt}"


def scan(root: Path, run: str, own_folder: Path) -> tuple[list[FoundPart], dict[str, Path]]:
    """Returns the parts on this host (one per other run), and this run's files by `key_of`.

    Args:
      root: checkpoint.local.
      run: the run's identifier.
      own_folder: this process's, searched first. Other folders have its part if a restart
        numbers the hosts differently.
    """
    found: dict[FoundPart, None] = {}
    files: dict[str, Path] = {}
    others: set[str] = set()
    paths = [path for path in root.glob("*/process_*/step_*.part_*") if path.suffix != ".tmp"]
    for path in sorted(paths, key=lambda path: path.parent != own_folder):
        try:
            header = read_header(path)
        except (DamagedError, OSError) as error:
            print(f"warning: {error}; not used", file=sys.stderr)
            continue
        if header.run == run:
            files.setdefault(key_of(header), path)
        elif header.run in others:
            continue
        others.add(header.run)
        known = {name: getattr(header, name) for name in FoundPart._fields if name != "layout"}
        found[FoundPart(**known, layout=digest_of(header.layout))] = None
    return list(found), files
