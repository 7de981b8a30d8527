"""Prints a checkpoint's size, and its times to save and restore on a disk and in buckets.

    python -m scripts.benchmarks.checkpoint_stores /tmp/here gs://BUCKET/there [--mib 256]

A checkpoint of float32 arrays and their two moments, as a run saves it, is written to each folder,
verified, restored and removed.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from trainer.options import AtLeastOne, StorePath, command, option

LAYERS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    folders: tuple[StorePath, ...] = option(
        "on a disk, or gs://BUCKET/FOLDER, s3://BUCKET/FOLDER", positional=True, metavar="FOLDER"
    )
    mib: AtLeastOne = option("MiB of parameters; the moments take twice that", 64)


def measure(folder: str, mib: int) -> dict[str, float]:
    """Returns a checkpoint's MiB in a folder, and the seconds to save, verify and restore it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from trainer.checkpoint.commit import remove
    from trainer.checkpoint.manifest import read_manifest
    from trainer.checkpoint.store import CheckpointStore

    rows = mib * 2**20 // (4 * LAYERS * 1024)
    model = {"layers.w": jax.random.normal(jax.random.key(0), (LAYERS, rows, 1024), jnp.float32)}
    moments = {"mu": model, "nu": model}
    jax.block_until_ready(model)
    store = CheckpointStore(f"{folder.rstrip('/')}/checkpoint_stores")
    with tempfile.TemporaryDirectory() as assets:
        (Path(assets) / "config.json").write_text("{}")
        begun = time.monotonic()
        store.save(1, model=model, optimizer=moments, data={"step": 1}, assets=assets)
        store.wait()
        saved = time.monotonic()
    try:
        store.latest_good()
        verified = time.monotonic()
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
        restored = store.restore(1, abstract, {"mu": abstract, "nu": abstract})
        ended = time.monotonic()
        if not np.array_equal(restored.model["layers.w"], model["layers.w"]):
            raise ValueError(f"{folder}: the restored arrays differ from the saved ones")
        files = read_manifest(store.path(1))["files"].values()
    finally:
        remove(store.path(1))
    return {
        "MiB": sum(file["size"] for file in files) / 2**20,
        "save s": saved - begun,
        "verify s": verified - saved,
        "restore s": ended - verified,
    }


def run(options: Options) -> None:
    """Prints a line for each folder."""
    print(f"{'':40} {'MiB':>9} {'save s':>9} {'verify s':>9} {'restore s':>9}")
    for folder in options.folders:
        figures = measure(folder, options.mib)
        print(f"{folder:40} " + " ".join(f"{value:9.2f}" for value in figures.values()))


main = command(Options, run)

if __name__ == "__main__":
    sys.exit(main())
