"""Checkpoints in a bucket, copied to the local cache for commands that read them from disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data import hub
from data.errors import UserError
from data.folders import building
from data.paths import cache_folder, on_this_machine
from data.untrusted_files import parse_json
from trainer.checkpoint.commit import CHECKPOINTS, MANIFEST, Files, located, remove, steps_in
from trainer.checkpoint.manifest import (
    DamagedError,
    ForeignError,
    fingerprint,
    none_good,
    read_manifest,
    require_present,
    use_previous,
    verify,
)
from trainer.run.bucket import Bucket, in_bucket
from trainer.run.mirror import Mirror

SMALL = ("assets", "data")
MODEL = ("model", *SMALL)  # what readers need; the moments are twice as large
# A file in a copy: the time of its last use. A copy without it is never removed: an adapter of an
# earlier version may name it as its base.
LAST_USE = ".longstripe-last-use"
UNUSED_SECONDS = 7 * 24 * 3600  # after which a copy is removed; reading one never takes as long


def local_copy(path: str | Path, items: Sequence[str] = MODEL) -> Path:
    """Returns a local path for `path`; as `copied`."""
    return copied(path, items)[0]


def copied(path: str | Path, items: Sequence[str] = MODEL) -> tuple[Path, str]:
    """Returns a local path for `path`; if that is in a bucket, downloads these items, and also
    returns the address of the checkpoint there, otherwise "".

    Args:
      path: a local path, which is returned unchanged; or in a bucket a checkpoint, a run (for its
        newest good one), or RUN/best.

    Raises:
      ForeignError: no checkpoint is in that folder of the bucket.
      DamagedError: a file has changed since it was written.
      TransientError: the checkpoint is removed meanwhile.
    """
    if not in_bucket(path):
        hub.refuse_page(path, of_model=True)
        return on_this_machine(path), ""
    folders, problems = _checkpoints(str(path).rstrip("/")), list[ValueError]()
    for folder in folders:
        try:
            copy = _copy(folder, items)
        except (DamagedError, ForeignError) as problem:
            require_present(folder)
            problems.append(problem)
        else:
            use_previous(problems)
            return copy, str(folder)
    raise problems[0] if len(problems) == 1 else none_good(folders[0].parent, problems)


def _copy(folder: Path, items: Sequence[str]) -> Path:
    """Returns the local copy of a checkpoint in a bucket; errors as in `local_copy`."""
    content = read_manifest(folder)
    items = [item for item in items if item in content["items"]]
    copy = cache_folder("checkpoints") / "-".join([fingerprint(folder), *sorted(items)])
    if (copy / MANIFEST).exists():
        with contextlib.suppress(OSError):  # an earlier version's, or another user's
            os.utime(copy / LAST_USE)
        return copy
    _remove_unused(copy.parent)
    names = [name for name in content["files"] if name.partition("/")[0] in items]
    size = sum(content["files"][name]["size"] for name in names)
    print(f"downloading {folder}: {size / 1e6:,.1f} MB to {copy}", file=sys.stderr, flush=True)
    source = Files(folder)
    with building(copy, lambda whole: (whole / MANIFEST).exists()) as scratch:
        target = Files(scratch)
        target.write(LAST_USE, b"")
        for name in [*names, MANIFEST]:
            try:
                target.write(name, source.read(name))
            except FileNotFoundError:
                raise DamagedError(f"{folder}: {name} is missing") from None
        verify(scratch, items, shown=folder)
    return copy


def _remove_unused(copies: Path) -> None:
    """Removes the copies, and the remains of killed downloads, that no command has used lately."""
    for file in copies.glob(f"*/{LAST_USE}"):
        with contextlib.suppress(OSError, UserError):  # another process was faster
            if time.time() - file.stat().st_mtime > UNUSED_SECONDS:
                remove(file.parent)


def run_copy(path: str | Path) -> Path:
    """Returns a local folder with a run's small files; for a run in a bucket, downloads them and
    its manifests.

    Args:
      path: of the run.
    """
    if not in_bucket(path):
        return on_this_machine(path)
    url = str(path).rstrip("/")
    bucket, name = Bucket(url), url.rpartition("/")[2]
    copy = cache_folder("reports") / hashlib.sha256(url.encode()).hexdigest()[:20] / name
    Mirror(bucket, copy).pull()
    for step in steps_in(located(url) / CHECKPOINTS):
        manifest = f"{CHECKPOINTS}/{step}/{MANIFEST}"
        with contextlib.suppress(FileNotFoundError):  # training may have just removed it
            Files(copy).write(manifest, bucket.read(manifest))
    return copy


def _checkpoints(url: str) -> list[Path]:
    """Returns the checkpoint folder at an address in a bucket; for a run all, newest first."""
    bucket = Bucket(url)
    if bucket.version(MANIFEST).content is not None:
        return [located(url)]
    run, best = (url.removesuffix("/best"), True) if url.endswith("/best") else (url, False)
    folder = located(run.removesuffix(f"/{CHECKPOINTS}")) / CHECKPOINTS
    steps = steps_in(folder)
    if not steps:
        raise ForeignError(
            f"{url}: no {MANIFEST} (a checkpoint) and no {CHECKPOINTS}/ with one (a run) is in "
            "this folder of the bucket; other models are read from disk or the hub"
        )
    if best:
        data = parse_json(Files(local_copy(run, ["data"])).read("data/data.json"))
        steps = [step for step in [(data.get("best") or {}).get("step")] if step is not None]
    if not steps:
        raise ForeignError(
            f"{url}: this run has no best checkpoint; checkpoint.best names the metric for one"
        )
    return [folder / str(step) for step in reversed(steps)]
