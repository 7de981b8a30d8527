"""One save of a checkpoint: arrays are copied to the host at once; threads write, read back and
publish everything."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from data.folders import sync
from trainer.checkpoint.arrays import stored_shapes
from trainer.checkpoint.manifest import DamagedError, write_manifest
from trainer.run.cluster import barrier

CHECKPOINTS = "checkpoints"
# Folders of saves and removals that were killed.
_LEFTOVER = re.compile(r"\d+\.tmp(-removed)?")


@dataclass(frozen=True)
class Contents:
    """Everything that one checkpoint holds.

    Attributes:
      model: parameter name -> array.
      assets: a folder of plain files.
      optimizer: a pytree of arrays; None: not saved.
      data: JSON; None: not saved.
      shapes: parameter name -> its own shape, without the padding that its array may have; None
        where that is not known.
    """

    model: Mapping[str, Any]
    assets: Path
    optimizer: Any = None
    data: Mapping[str, Any] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None


class Saving:
    """A save in progress. All arrays are on the host when the constructor returns; a thread does
    the rest."""

    def __init__(
        self,
        target: Path,
        contents: Contents,
        after: Callable[[Path], None] | None = None,
        copy: bool = True,
    ) -> None:
        """Begins to save.

        Args:
          target: the checkpoint's folder; it is written as TARGET.tmp and renamed when whole.
          after: called with `target` by process 0 when the checkpoint counts.
          copy: arrays on the CPU are copied first, because the caller may donate them; see
            `_host_copy`.
        """
        self.target, self.after = target, after
        self.begun = time.monotonic()
        self.seconds: float | None = None  # that the whole save took, once it counts
        self.error: BaseException | None = None
        self.scratch = target.with_name(target.name + ".tmp")
        self.parameter_shapes = contents.shapes
        if not contents.assets.is_dir():
            raise ValueError(
                f"{contents.assets}: no such folder; a checkpoint holds the assets of its model"
            )
        self.assets = contents.assets
        self.data = (
            None
            if contents.data is None
            else json.dumps(dict(contents.data), indent=1, allow_nan=False) + "\n"
        )
        if jax.process_index() == 0:
            # Of a process that was killed; Orbax's thread makes it anew.
            shutil.rmtree(self.scratch, ignore_errors=True)
        barrier(f"checkpoint {target.name} begins")
        trees = {"model": _flat_model(contents.model)}
        if contents.optimizer is not None:
            trees["optimizer"] = flatten(contents.optimizer)
        self.array_shapes = {
            item: {name: np.shape(value) for name, value in tree.items()}
            for item, tree in trees.items()
        }
        self.items = [*trees, "assets", *(["data"] if self.data is not None else [])]
        self.checkpointers: list[ocp.AsyncCheckpointer] = []
        try:
            for item, tree in trees.items():
                self._start(
                    item,
                    {name: _host_copy(value) for name, value in tree.items()} if copy else tree,
                )
        except BaseException:
            self._close()
            raise
        # Not a daemon: a program that ends without waiting still finishes its last checkpoint.
        self.thread = threading.Thread(
            target=self._finish, name=f"checkpoint-{target.name}", daemon=False
        )
        self.thread.start()

    def wait(self) -> None:
        """Waits until the checkpoint counts, in every process. Raises OSError if saving failed."""
        self.thread.join()
        if self.error is not None:
            raise OSError(f"saving checkpoint {self.target} failed: {self.error}") from self.error
        barrier(f"checkpoint {self.target.name} ends")

    def _start(self, item: str, arrays: dict[str, Any]) -> None:
        """Has Orbax copy an item's arrays to the host and begin to write them."""
        checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self.checkpointers.append(checkpointer)
        # One piece per layer, so that a reader of one layer reads no other.
        pieces = {
            name: ocp.SaveArgs(shard_axes=(0,) if name.startswith("layers.") else ())
            for name in arrays
        }
        checkpointer.save(self.scratch / item, args=ocp.args.PyTreeSave(arrays, pieces))

    def _finish(self) -> None:
        """The thread's work: waits for Orbax; then process 0 reads the arrays back, writes the
        other files and renames the folder."""
        try:
            for checkpointer in self.checkpointers:
                checkpointer.wait_until_finished()  # with several processes: until all have written
            if jax.process_index() == 0:
                _remove_leftovers(self.target, self.scratch)
                # Before the manifest makes it a checkpoint, and before any older one is removed.
                self._read_back()
                # In this thread: a slow store may take as long for them as several training steps.
                self._write_plain_items()
                write_manifest(self.scratch, self.items, self.parameter_shapes)
                # A damaged checkpoint of this step, which training has reached again.
                if self.target.exists():
                    remove(self.target)
                self.scratch.rename(self.target)
                sync(self.target.parent)  # the name, before an older checkpoint is removed for it
                if self.after is not None:
                    self.after(self.target)
            self.seconds = time.monotonic() - self.begun
        except BaseException as error:
            self.error = error
            if jax.process_index() == 0:
                shutil.rmtree(self.scratch, ignore_errors=True)  # the disk may be full
        finally:
            self._close()

    def _write_plain_items(self) -> None:
        """Writes the items that are plain files: assets and data."""
        shutil.copytree(self.assets, self.scratch / "assets")
        if self.data is not None:
            (self.scratch / "data").mkdir()
            (self.scratch / "data" / "data.json").write_text(self.data, encoding="utf-8")

    def _read_back(self) -> None:
        """Raises DamagedError unless the arrays on disk have the names and shapes of those that
        were saved."""
        for item, shapes in self.array_shapes.items():
            if {
                name: array.shape for name, array in stored_shapes(self.scratch, item).items()
            } != shapes:
                raise DamagedError(
                    f"{self.scratch}: the arrays of {item} are not those that were saved"
                )

    def _close(self) -> None:
        for checkpointer in self.checkpointers:
            checkpointer.close()


def _remove_leftovers(target: Path, scratch: Path) -> None:
    """Removes the folders that killed processes left of the run's other checkpoints."""
    if target.parent.name == CHECKPOINTS and target.parent.is_dir():
        for path in target.parent.iterdir():
            if _LEFTOVER.fullmatch(path.name) and path != scratch:
                shutil.rmtree(path, ignore_errors=True)


def _flat_model(model: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in model.items():
        if not isinstance(name, str) or not hasattr(value, "shape"):
            raise ValueError(
                f"model: must be a flat dictionary name -> array, found {name!r}: {type(value)}"
            )
    return dict(model)


def flatten(tree: Any) -> dict[str, Any]:
    """Path -> leaf of any pytree, such as `0.mu.norm.weight`. Paths stay the same when a
    container's type changes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("optimizer: two leaves of the state have the same path")
    return flat


def _host_copy(value: Any) -> Any:
    """A copy of an array whose host view would share memory with the device; other arrays as they
    are.

    On the CPU the host view of an array is the array itself, and the next step, to which it is
    donated, may write into it while it is being saved. jax 0.10.2 was seen to spare such arrays,
    but does not promise to. On accelerators Orbax's transfer to the host is the copy.
    """
    if not isinstance(value, jax.Array):
        return np.array(value)
    devices: Any = value.sharding.device_set
    return jnp.copy(value) if all(device.platform == "cpu" for device in devices) else value


def remove(folder: Path) -> None:
    """Deletes a checkpoint. A kill in the middle leaves no partial one under its name, because it
    is renamed first."""
    renamed = folder.with_name(folder.name + ".tmp-removed")
    shutil.rmtree(renamed, ignore_errors=True)
    folder.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)
