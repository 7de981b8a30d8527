"""The code that trains a run: this project's source, the step's libraries and JAX's settings."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path

from data.errors import TransientError
from trainer.jax_settings import chosen_settings
from trainer.run.cluster import require_same

ROOT = Path(__file__).resolve().parents[2]
# The folders that can affect training's result.
_TRAINED_WITH = ("train.py", "trainer", "data", "model", "eval")
_LIBRARIES = ("jax", "jaxlib", "libtpu")
_PLUGINS = ("jax-cuda", "jax-rocm")  # prefixes of GPU packages
_SHOWN = 12  # characters of a digest or commit


@functools.cache
def versions() -> dict[str, str]:
    """Returns name -> version of this project's source and each library, and JAX's settings.

    `source` is a digest of the project's Python files, committed or not; `commit` is git's, if
    there is one. Settings are those of `jax_settings.CHOSEN` that are not the default.
    """
    found = {"source": source_digest(ROOT)}
    if commit := _commit(ROOT):
        found["commit"] = commit
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in _LIBRARIES or name.startswith(_PLUGINS):
            found[name] = distribution.version
    found |= {name: str(value) for name, value in chosen_settings().items() if value is not None}
    return dict(sorted(found.items()))


def source_digest(root: Path) -> str:
    """Returns a digest of the names and contents of training's Python files below `root`."""
    digest = hashlib.sha256()
    for name in _TRAINED_WITH:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            content = file.read_bytes()
            digest.update(
                f"{file.relative_to(root).as_posix()} {len(content)}\n".encode() + content
            )
    return digest.hexdigest()[:_SHOWN]


def require_same_code() -> None:
    """Compares this process with process 0.

    A launcher reinstalls before a restart, which may then pass. Only the commit may differ: a tree
    copied without git has the same source.

    Raises:
      TransientError: in every process, if one has another source or JAX.
      UserError: in every process, if one has other settings of JAX.
    """
    settings = chosen_settings()
    require_same(
        {
            f"the version of {name}" if name != "source" else "this project's source": version
            for name, version in versions().items()
            if name != "commit" and name not in settings
        },
        TransientError,
    )
    require_same({name.upper(): value for name, value in settings.items()})


def difference(recorded: Mapping[str, str]) -> str:
    """Describes changes from recorded versions, such as `jax 0.10.2, now 0.10.3`; "" if none."""
    now = versions()
    names = [
        name
        for name in sorted({*recorded, *now})
        if name != "commit" and recorded.get(name) != now.get(name)
    ]
    words = [
        f"{name} {recorded.get(name, '(none)')}, now {now.get(name, '(none)')}" for name in names
    ]
    if "source" in names and recorded.get("commit") and recorded["commit"] != now.get("commit"):
        words.append(f"commit {recorded['commit']}, now {now.get('commit', '(none)')}")
    return "; ".join(words)


def _commit(root: Path) -> str | None:
    """The commit that is checked out at `root`; None without git."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):  # no git here, or another user's folder
        return None
    return done.stdout.strip()[:_SHOWN]
