"""Checkpoints: saved asynchronously and atomically, verified before use, restored onto any mesh.

The one file that imports Orbax.

A checkpoint is a folder:

    model/          Orbax: the flat dictionary of parameters
    optimizer/      Orbax: the optimizer's arrays, flat, by their path in the state        (from training)
    data/data.json  where the data stand: step, fingerprint                                 (from training)
    assets/         plain files: config.json, tokenizer, chat template, run configuration, source dtype
    manifest.json   size and sha256 of every file above; written last

A run keeps them as RUN/checkpoints/STEP. A checkpoint is written as STEP.tmp and renamed when whole, so a process
killed at any moment leaves nothing but a .tmp folder, which nobody reads and the next save removes. Orbax alone does
not notice most bits that flip on disk; the manifest does.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.experimental import multihost_utils

from model.config import LlamaConfig
from trainer.huggingface import hf_layout
from trainer.manifest import MANIFEST, DamagedError, ForeignError, read_manifest, verify, write_manifest
from trainer.padding import fits

_STEP = re.compile(r"\d+")
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Restored:
    """What a restore gives back. `assets` is a folder inside the checkpoint: copy what must outlive it."""

    step: int | None
    model: dict[str, jax.Array]
    optimizer: Any
    data: dict[str, Any] | None
    assets: Path


class CheckpointStore:
    """The checkpoints of one run: RUN/checkpoints/STEP.

    With several processes every one calls every method at the same place; they share a file system.
    """

    def __init__(self, run_dir: str | Path, keep: int = 3) -> None:
        """Keeps the last `keep` checkpoints. Creates nothing yet. Raises ValueError for keep < 1."""
        if keep < 1:
            raise ValueError(f"keep: {keep} checkpoints; needs at least 1")
        self.folder = Path(run_dir).absolute() / CHECKPOINTS
        self.keep = keep
        self._damaged: set[int] = set()
        self._saving: _Saving | None = None

    def steps(self) -> list[int]:
        """Steps that have a folder here, ascending, damaged ones among them."""
        if not self.folder.is_dir():
            return []
        found = (path for path in self.folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())
        return sorted(int(path.name) for path in found)

    def path(self, step: int) -> Path:
        """The folder of `step`'s checkpoint."""
        return self.folder / str(step)

    def save(
        self, step: int, *, model: Mapping[str, Any], optimizer: Any = None, data: Mapping[str, Any] | None = None,
        assets: str | Path,
    ) -> None:
        """Starts to save; returns as soon as the arrays are copied to the host, so they may be donated at once.

        `optimizer` is any pytree of arrays (None: not saved), `data` is JSON, `assets` a folder of plain files. Waits
        for the save before, whose error, if it had one, is raised here.
        """
        self.wait()
        self._saving = _Saving(self.path(step), model, optimizer, data, Path(assets), after=self._retain)

    def wait(self) -> None:
        """Returns when the last save is on disk and counts. Raises its error if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def latest_good(self) -> int | None:
        """The newest step whose files are all as they were written, or None if there is no checkpoint at all.

        A damaged one is told by a warning that names the file, and the one before is tried. Raises ValueError if there
        are checkpoints and none is good.
        """
        self.wait()
        step = -1
        if jax.process_index() == 0:
            step, error = None, None
            try:
                step = self._latest_good()
            except ValueError as found:
                error = found
            if jax.process_count() == 1 and error is not None:
                raise error
            step = -2 if error is not None else -1 if step is None else step
        if jax.process_count() > 1:
            # Reading a checkpoint is dear: one process verifies for all.
            step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
            if step == -2:
                raise ValueError(f"{self.folder}: no good checkpoint; process 0 tells why")
        return None if step == -1 else step

    def _latest_good(self) -> int | None:
        steps, problems = self.steps(), []
        for step in reversed(steps):
            try:
                verify(self.path(step))
            except (DamagedError, ForeignError) as error:
                self._damaged.add(step)
                problems.append(error)
                warnings.warn(f"{error}; using the checkpoint before", stacklevel=3)
            else:
                return step
        if problems and all(isinstance(problem, ForeignError) for problem in problems):
            raise problems[0]
        if problems:
            raise ValueError(f"{self.folder}: every checkpoint is damaged (newest: {problems[0]}); "
                             "start again in another run directory, or restore them from a copy")
        return None

    def restore(self, step: int, abstract_model: Mapping[str, Any], abstract_optimizer: Any = None) -> Restored:
        """Restores `step` (as latest_good gave it: it is not verified again); see the function `restore`."""
        return restore(self.path(step), abstract_model, abstract_optimizer, verified=True)

    def _retain(self, saved: Path) -> None:
        """Deletes the oldest good checkpoints beyond `keep`. Damaged ones neither count nor vanish."""
        self._damaged.discard(int(saved.name))
        good = [step for step in self.steps() if step not in self._damaged]
        for step in good[:-self.keep]:
            _remove(self.path(step))


class _Saving:
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
        _barrier(f"checkpoint {target.name} begins")
        trees = {"model": _flat_model(model)}
        if optimizer is not None:
            trees["optimizer"] = _flatten(optimizer)
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
                write_manifest(self.scratch, self.items)
                if self.target.exists():  # a damaged one of the same step, met again after going back
                    _remove(self.target)
                self.scratch.rename(self.target)
                if self.after is not None:
                    self.after(self.target)
        except BaseException as error:
            self.error = error
        finally:
            self._close()

    def _close(self) -> None:
        for checkpointer in self.checkpointers:
            checkpointer.close()

    def wait(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise OSError(f"saving checkpoint {self.target} failed: {self.error}") from self.error
        _barrier(f"checkpoint {self.target.name} ends")


def save_checkpoint(
    path: str | Path, *, model: Mapping[str, Any], assets: str | Path, optimizer: Any = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Writes one checkpoint at `path` (an imported model: without optimizer and data) and waits for it.

    Raises ValueError if there is something at `path` already.
    """
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: exists and is not an empty folder; name another one or remove it")
    # Nobody writes into the arrays while we wait, so they need not be copied.
    _Saving(path, model, optimizer, data, Path(assets), copy=False).wait()


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder that `path` means: itself, or the newest good one of a run folder.

    A checkpoint named itself is not verified here.

    Raises ForeignError (a ValueError) if it is neither.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        raise ForeignError(f"{path}: no such folder")
    if (path / MANIFEST).exists():
        return path
    run = path.parent if path.name == CHECKPOINTS else path
    store = CheckpointStore(run)
    if store.steps():
        step = store.latest_good()
        if step is not None:
            return store.path(step)
    if path.name.endswith(".tmp"):
        raise ForeignError(f"{path}: a checkpoint that was never finished; its run's folder finds the last good one")
    if (path / "config.json").exists():
        raise ForeignError(
                f"{path}: a Hugging Face folder, not a checkpoint; python -m scripts.import_hf makes one of it")
    raise ForeignError(f"{path}: neither a checkpoint (no {MANIFEST}) nor a run directory with {CHECKPOINTS}/")


def assets_dir(path: str | Path) -> Path:
    """The assets folder of the checkpoint or run at `path`, verified. Errors as find_checkpoint and verify."""
    folder = find_checkpoint(path)
    verify(folder, ["assets"])
    return folder / "assets"


def read_data(path: str | Path) -> dict[str, Any] | None:
    """The `data` item of the checkpoint at `path`, or None if it has none."""
    file = find_checkpoint(path) / "data" / "data.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def model_shapes(path: str | Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape and dtype of the checkpoint's parameters, without reading them."""
    return _stored(find_checkpoint(path), "model")


def restore(
    path: str | Path, abstract_model: Mapping[str, Any], abstract_optimizer: Any = None, *, verified: bool = False,
) -> Restored:
    """Restores a checkpoint (or a run's newest good one) onto the shardings of the abstract trees: any mesh.

    `abstract_model` maps names to arrays or jax.ShapeDtypeStruct with a sharding; `abstract_optimizer` is a pytree
    of the same, of the state's structure (None: the moments are not read). A leaf without sharding comes back as numpy.
    Raises ForeignError, DamagedError, and ValueError that names the parameter whose name, shape or dtype differs.
    """
    folder = find_checkpoint(path)
    items = ["model", "data", "assets", *(["optimizer"] if abstract_optimizer is not None else [])]
    if not verified:
        verify(folder, items)
    model = _restore_item(folder, "model", dict(abstract_model))
    optimizer = None
    if abstract_optimizer is not None:
        flat = _restore_item(folder, "optimizer", _flatten(abstract_optimizer))
        structure = jax.tree_util.tree_structure(abstract_optimizer)
        optimizer = jax.tree_util.tree_unflatten(structure, list(flat.values()))
    step = int(folder.name) if _STEP.fullmatch(folder.name) else None
    return Restored(step, model, optimizer, read_data(folder), folder / "assets")


def restore_model(
    path: str | Path, shardings: Mapping[str, Any] | jax.sharding.Sharding | None = None, *, dtype: Any = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Any]:
    """The parameters alone, verified: for evaluation and export, which never read moments.

    `shardings`: by name (a sharding, or a ShapeDtypeStruct that has one), one for all, or None for numpy arrays on the
    host. `shapes`: by name, where vocabulary or heads are padded for another mesh than the one it was saved from. Errors as
    restore's.
    """
    folder = find_checkpoint(path)
    verify(folder, ["model", "assets"])
    abstract = {}
    for name, stored in _stored(folder, "model").items():
        sharding = shardings.get(name) if isinstance(shardings, Mapping) else shardings
        if isinstance(shardings, Mapping) and sharding is None:
            raise ValueError(f"{folder}: parameter {name} is in the checkpoint, but not in the model asked for")
        if isinstance(sharding, jax.ShapeDtypeStruct):
            abstract[name] = sharding
        else:
            shape = stored.shape if shapes is None else shapes[name]
            abstract[name] = jax.ShapeDtypeStruct(shape, stored.dtype, sharding=sharding)
    if isinstance(shardings, Mapping):
        for name in shardings:
            if name not in abstract:
                raise ValueError(f"{folder}: parameter {name} is not in the checkpoint")
    params = _restore_item(folder, "model", abstract)
    return params if dtype is None else {name: value.astype(dtype) for name, value in params.items()}


def stored_parameters(path: str | Path) -> dict[str, tensorstore.TensorStore]:
    """`stored_arrays` of the parameters. For export, which needs one layer's tensor at a time."""
    return stored_arrays(path, "model")


def stored_arrays(path: str | Path, item: str) -> dict[str, tensorstore.TensorStore]:
    """An item's arrays (model, optimizer) by name as they lie on disk, verified: with shape and dtype, of which a part is read
    when it is taken (`numpy.asarray(found[name][layer])`). Errors as restore's."""
    folder = find_checkpoint(path)
    verify(folder, [item, "assets"])
    base = (folder / item).as_uri() + "/"
    return {name: tensorstore.open({"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}},
                                   open=True, read=True).result() for name in _stored(folder, item)}


def _restore_item(folder: Path, item: str, abstract: dict[str, Any]) -> dict[str, Any]:
    """One Orbax item as a flat dictionary in the order of `abstract`."""
    stored = _stored(folder, item)
    what = "parameter" if item == "model" else "optimizer state"
    for name, wanted in abstract.items():
        if name not in stored:
            raise ValueError(f"{folder}: {what} {name} is not in the checkpoint")
        found = stored[name]
        # Checked here, since Orbax would cast to another dtype, and may cut or pad another shape, without a word.
        if not _fits(folder, name, tuple(found.shape), tuple(np.shape(wanted))) or found.dtype != wanted.dtype:
            raise ValueError(f"{folder}: {what} {name} is {found.dtype}{list(found.shape)} in the checkpoint, and "
                             f"{np.dtype(wanted.dtype)}{list(np.shape(wanted))} in this run")
    for name in stored:
        if name not in abstract:
            raise ValueError(f"{folder}: {what} {name} is in the checkpoint, but not in this run")
    arguments = {}
    for name, wanted in abstract.items():
        sharding = getattr(wanted, "sharding", None)
        arguments[name] = ocp.RestoreArgs(restore_type=np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(
            sharding=sharding, global_shape=tuple(wanted.shape), dtype=wanted.dtype, strict=False)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(folder / item, args=ocp.args.PyTreeRestore(
            item=dict.fromkeys(abstract, 0), restore_args=arguments))
    return {name: found[name] for name in abstract}


def _fits(folder: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Equal shapes, or equal but for padding, which Orbax may add or leave out; nothing of the model itself is left out."""
    if found == wanted or not fits(name, found, wanted):
        return found == wanted
    assets = folder / "assets"
    layout = hf_layout(LlamaConfig.from_hf(assets)) if (assets / "config.json").exists() else ()
    return fits(name, found, wanted, next((entry.shape for entry in layout if name.endswith(entry.name)), None))


def _stored(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape and dtype of an Orbax item. Raises ForeignError if the checkpoint does not have the item."""
    if item not in read_manifest(folder)["items"]:
        raise ForeignError(f"{folder}: this checkpoint has no {item}" + (
            " (an imported or exported model: start a run from it as model.path)" if item == "optimizer" else ""))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(folder / item).item_metadata.tree
    return {name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for name, leaf in tree.items()}


def _flat_model(model: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in model.items():
        if not isinstance(name, str) or not hasattr(value, "shape"):
            raise ValueError(f"model: must be a flat dictionary name -> array, found {name!r}: {type(value)}")
    return dict(model)


def _flatten(tree: Any) -> dict[str, Any]:
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


def _remove(folder: Path) -> None:
    """Deletes a checkpoint so that a kill in the middle leaves no half of one under its name."""
    doomed = folder.with_name(folder.name + ".tmp-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
