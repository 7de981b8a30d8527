"""The host memory that this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def host_bytes(
    cgroups: Path = Path("/sys/fs/cgroup"), joined: Path = Path("/proc/self/cgroup")
) -> int:
    """Returns the bytes of host memory, or of this process's smallest control group.

    Containers and Slurm jobs have control groups.

    Args:
      cgroups: where control groups are mounted, of version 2 or 1.
      joined: lists this process's control groups.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = joined.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (
            (cgroups / "memory", "memory.limit_in_bytes")
            if controllers
            else (cgroups, "memory.max")
        )
        folder = root / group.lstrip("/")
        # Enclosing groups limit a group's memory too. Inside a container its group may be mounted
        # as the root.
        for enclosing in dict.fromkeys([folder, *folder.parents, root]):
            if enclosing.is_relative_to(root):
                limits.append(_limit(enclosing / name))
    return min(limit for limit in limits if limit)


def _limit(file: Path) -> int:
    """Returns a control group's limit in bytes; 0 if it has none."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
