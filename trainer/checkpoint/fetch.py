"""Checkpoints in a bucket, copied to the local cache for commands that read them from disk."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from data.folders import building
from data.paths import cache_folder, on_this_machine
from data.within import parse_json
from trainer.checkpoint.commit import CHECKPOINTS, MANIFEST, Files, located, steps_in
from trainer.checkpoint.manifest import ForeignError, fingerprint, read_manifest, verify
from trainer.run.bucket import Bucket, in_bucket
from trainer.run.mirror import Mirror

MODEL = ("model", "assets", "data")  # what readers need; the moments are twice as large


def local_copy(path: str | Path, items: Sequence[str] = MODEL) -> Path:
    """Returns a local path for `path`; of a checkpoint in a bucket it downloads these items.

    Args:
      path: a local path, which is returned unchanged; or in a bucket a checkpoint, a run (for its
        newest), or RUN/best.

    Raises:
      ForeignError: no checkpoint is in that folder of the bucket.
      DamagedError: a file has changed since it was written.
    """
    if not in_bucket(path):
        return on_this_machine(path).expanduser()
    folder = _checkpoint(str(path).rstrip("/"))
    content = read_manifest(folder)
    items = [item for item in items if item in content["items"]]
    copy = cache_folder("checkpoints") / "-".join([fingerprint(folder), *sorted(items)])
    if (copy / MANIFEST).exists():
        return copy
    names = [name for name in content["files"] if name.partition("/")[0] in items]
    size = sum(content["files"][name]["size"] for name in names)
    print(f"downloading {folder}: {size / 1e6:,.1f} MB to {copy}", file=sys.stderr, flush=True)
    source = Files(folder)
    with building(copy, lambda whole: (whole / MANIFEST).exists()) as scratch:
        target = Files(scratch)
        for name in [*names, MANIFEST]:
            target.write(name, source.read(name))
        verify(scratch, items)
    return copy


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
        Files(copy).write(manifest, bucket.read(manifest))
    return copy


def _checkpoint(url: str) -> Path:
    """Returns the checkpoint folder for an address in a bucket."""
    bucket = Bucket(url)
    if bucket.version(MANIFEST).content is not None:
        return located(url)
    run, best = (url.removesuffix("/best"), True) if url.endswith("/best") else (url, False)
    run = run.removesuffix(f"/{CHECKPOINTS}")
    steps = steps_in(located(run) / CHECKPOINTS)
    if not steps:
        raise ForeignError(
            f"{url}: no {MANIFEST} (a checkpoint) and no {CHECKPOINTS}/ with one (a run) is in "
            "this folder of the bucket; other models are read from disk or the hub"
        )
    step = steps[-1]
    if best:
        data = parse_json(Files(located(run) / CHECKPOINTS / str(step)).read("data/data.json"))
        best_step = (data.get("best") or {}).get("step")
        if best_step is None:
            raise ForeignError(
                f"{url}: this run has no best checkpoint; checkpoint.best names the metric for one"
            )
        step = best_step
    return located(run) / CHECKPOINTS / str(step)
