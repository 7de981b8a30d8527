"""One save of a checkpoint: the arrays are copied to the host at once, a thread writes them and makes them count."""
from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from trainer.checkpoint.manifest import DamagedError, write_manifest
from trainer.run.cluster import barrier

CHECKPOINTS = "checkpoints"


class Saving:
    """One save under way. Arrays are on the host when the constructor returns; a thread does the rest."""

    def __init__(
        self, target: Path, model: Mapping[str, Any], optimizer: Any, data: Mapping[str, Any] | None, assets: Path,
        after: Any = None, copy: bool = True,
    ) -> None:
        self.target, self.after, self.error = target, after, None
        self.scratch = target.with_name(target.name + ".tmp")
        if not assets.is_dir():
            raise ValueError(f"{assets}: no such folder; a checkpoint holds the assets of its model")
        if jax.process_index() == 0:
            # What a killed process left behind, of this step and of others.
            shutil.rmtree(self.scratch, ignore_errors=True)
            if target.parent.name == CHECKPOINTS and target.parent.is_dir():
                for left in target.parent.iterdir():
                    if re.fullmatch(r"\d+\.tmp(-removed)?", left.name):
                        shutil.rmtree(left, ignore_errors=True)
            self.scratch.mkdir(parents=True)
            shutil.copytree(assets, self.scratch / "assets")
            if data is not None:
                (self.scratch / "data").mkdir()
                text = json.dumps(dict(data), indent=1, allow_nan=False) + "\n"
                (self.scratch / "data" / "data.json").write_text(text, encoding="utf-8")
        barrier(f"checkpoint {target.name} begins")
        trees = {"model": _flat_model(model)}
        if optimizer is not None:
            trees["optimizer"] = flatten(optimizer)
        self.shapes = {item: {name: np.shape(value) for name, value in tree.items()} for item, tree in trees.items()}
        self.items = [*trees, "assets", *(["data"] if data is not None else [])]
        self.checkpointers = []
        try:
            for item, tree in trees.items():
                checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
                self.checkpointers.append(checkpointer)
                values = {name: _own(value) for name, value in tree.items()} if copy else tree
                # One piece per layer, so that a reader of one layer reads no other.
                pieces = {name: ocp.SaveArgs(shard_axes=(0,) if name.startswith("layers.") else ()) for name in tree}
                checkpointer.save(self.scratch / item, args=ocp.args.PyTreeSave(values, pieces))
        except BaseException:
            self._close()
            raise
        # Not a daemon: a program that ends without waiting still finishes its last checkpoint.
        self.thread = threading.Thread(target=self._finish, name=f"checkpoint-{target.name}", daemon=False)
        self.thread.start()

    def _finish(self) -> None:
        try:
            for checkpointer in self.checkpointers:
                checkpointer.wait_until_finished()  # with several processes: until all have written
            if jax.process_index() == 0:
                self._read_back()  # before the manifest makes it count, and before anything older goes
                write_manifest(self.scratch, self.items)
                if self.target.exists():  # a damaged one of the same step, met again after going back
                    remove(self.target)
                self.scratch.rename(self.target)
                if self.after is not None:
                    self.after(self.target)
        except BaseException as error:
            self.error = error
        finally:
            self._close()

    def _read_back(self) -> None:
        for item, shapes in self.shapes.items():
            if {name: array.shape for name, array in stored_shapes(self.scratch, item).items()} != shapes:
                raise DamagedError(f"{self.scratch}: the arrays of {item} are not those that were saved")

    def _close(self) -> None:
        for checkpointer in self.checkpointers:
            checkpointer.close()

    def wait(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise OSError(f"saving checkpoint {self.target} failed: {self.error}") from self.error
        barrier(f"checkpoint {self.target.name} ends")


def stored_shapes(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape and dtype of an Orbax item's arrays, each of which is opened; DamagedError where it cannot be."""
    try:
        tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder / item)).tree
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder}: Orbax finds no index of the arrays of {item} ({str(error).splitlines()[0]}); an older "
                           "checkpoint would work, or a path without *, ?, [ and backslash") from error
    return {name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items()}


def _flat_model(model: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in model.items():
        if not isinstance(name, str) or not hasattr(value, "shape"):
            raise ValueError(f"model: must be a flat dictionary name -> array, found {name!r}: {type(value)}")
    return dict(model)


def flatten(tree: Any) -> dict[str, Any]:
    """Path -> leaf of any pytree: `0.mu.norm.weight`. Names survive changes of containers, and read well."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("optimizer: two leaves of the state have the same path")
    return flat


def _own(value: Any) -> Any:
    """`value`, or a copy where a host view of it would share memory with the device.

    On the CPU an array's host view is the array itself, and the next step, to which it is donated, may write into it
    while it is being saved. jax 0.10.2 was seen to spare such arrays, but promises nothing; hence the copy. On
    accelerators Orbax's transfer is the copy.
    """
    if not isinstance(value, jax.Array):
        return np.array(value)
    if all(device.platform == "cpu" for device in value.sharding.device_set):
        return jnp.copy(value)
    return value


def remove(folder: Path) -> None:
    """Deletes a checkpoint so that a kill in the middle leaves no half of one under its name."""
    doomed = folder.with_name(folder.name + ".tmp-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
