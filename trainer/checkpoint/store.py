"""Checkpoints: saved asynchronously and atomically, verified before use, restored onto any mesh.

With trainer.checkpoint.saving, which writes them, the one place that imports Orbax.

A checkpoint is a folder:

    model/          Orbax: the flat dictionary of parameters
    optimizer/      Orbax: the optimizer's arrays, flat, by their path in the state            (from training)
    data/data.json  where it stands: step, fingerprints of data and first model, is the held-out loss logged  (from training)
    assets/         plain files: config.json, tokenizer, chat template, run configuration, source dtype
    manifest.json   size and sha256 of every file above; written last

A run keeps them as RUN/checkpoints/STEP. A checkpoint is written as STEP.tmp and renamed when whole, so a process
killed at any moment leaves nothing but a .tmp folder, which nobody reads and the next save removes. Orbax alone does
not notice most bits that flip on disk; the manifest does.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from data.paths import new_folder
from model.config import LlamaConfig
from model.padding import fits
from trainer.checkpoint.manifest import MANIFEST, DamagedError, ForeignError, read_manifest, verify
from trainer.checkpoint.saving import CHECKPOINTS, Saving, flatten, remove, stored_shapes
from trainer.huggingface.read import hf_layout
from trainer.run.cluster import first_then_others

_STEP = re.compile(r"\d+")


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
        self._saving: Saving | None = None

    def steps(self) -> list[int]:
        """Steps that have a folder here, ascending, damaged ones among them."""
        if not self.folder.is_dir():
            return []
        found = (path for path in self.folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())
        return sorted(int(path.name) for path in found)

    def steps_for_all(self) -> list[int]:
        """As `steps`; with several processes those that the first sees."""
        return first_then_others(lambda told: self.steps() if told is None else json.loads(told), json.dumps)

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
        self._saving = Saving(self.path(step), model, optimizer, data, Path(assets), after=self._retain)

    def wait(self) -> None:
        """Returns when the last save is on disk and counts. Raises its error if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """As `wait`; where an error ends this process the others are not waited for: they may never come here."""
        if kind is None:
            self.wait()
        elif self._saving is not None:
            self._saving.thread.join()

    def latest_good(self) -> int | None:
        """The newest step whose files are all as they were written, or None if there is no checkpoint at all.

        A damaged one is told by a warning that names the file, and the one before is tried. Raises ValueError if there
        are checkpoints and none is good.
        """
        self.wait()
        step = _by_first(lambda: -1 if (found := self._latest_good()) is None else found)
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
            remove(self.path(step))


def save_checkpoint(
    path: str | Path, *, model: Mapping[str, Any], assets: str | Path, optimizer: Any = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Writes one checkpoint at `path` (an imported model: without optimizer and data) and waits for it.

    Raises UserError if there is something at `path` already.
    """
    path = new_folder(Path(path).absolute())
    # Nobody writes into the arrays while we wait, so they need not be copied.
    Saving(path, model, optimizer, data, Path(assets), copy=False).wait()


def _by_first(work: Callable[[], int]) -> int:
    """The number that `work` gives. With several processes the first works for all: reading a checkpoint is dear, and may take
    longer than a collective waits."""
    return first_then_others(lambda told: work() if told is None else int(told), str)


def find_checkpoint(path: str | Path, items: Sequence[str] = ()) -> Path:
    """The checkpoint folder that `path` means: itself, or the newest good one of a run folder.

    Its `items` are verified: of a checkpoint named itself only they, in that of a run folder all.

    Raises ForeignError (a ValueError) if it is neither, and DamagedError.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        raise ForeignError(f"{path}: no such folder")
    if (path / MANIFEST).exists():
        if items:
            _by_first(lambda: len(verify(path, items)))
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
    raise ForeignError(f"{path}: no {MANIFEST} (a checkpoint), no {CHECKPOINTS}/ (a run) and no config.json (a Hugging Face "
                       "model) is in this folder")


def assets_dir(path: str | Path) -> Path:
    """The assets folder of the checkpoint or run at `path`, verified. Errors as find_checkpoint's."""
    return find_checkpoint(path, ["assets"]) / "assets"


def read_data(path: str | Path) -> dict[str, Any] | None:
    """The `data` item of the checkpoint at `path`, or None if it has none."""
    file = find_checkpoint(path) / "data" / "data.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def restore(
    path: str | Path, abstract_model: Mapping[str, Any], abstract_optimizer: Any = None, *, verified: bool = False,
) -> Restored:
    """Restores a checkpoint (or a run's newest good one) onto the shardings of the abstract trees: any mesh.

    `abstract_model` maps names to arrays or jax.ShapeDtypeStruct with a sharding; `abstract_optimizer` is a pytree
    of the same, of the state's structure (None: the moments are not read). A leaf without sharding comes back as numpy.
    Raises ForeignError, DamagedError, and ValueError that names the parameter whose name, shape or dtype differs.
    """
    items = ["model", "data", "assets", *(["optimizer"] if abstract_optimizer is not None else [])]
    folder = find_checkpoint(path, [] if verified else items)
    model = _restore_item(folder, "model", dict(abstract_model))
    optimizer = None
    if abstract_optimizer is not None:
        flat = _restore_item(folder, "optimizer", flatten(abstract_optimizer))
        structure = jax.tree_util.tree_structure(abstract_optimizer)
        optimizer = jax.tree_util.tree_unflatten(structure, list(flat.values()))
    step = int(folder.name) if _STEP.fullmatch(folder.name) else None
    return Restored(step, model, optimizer, read_data(folder), folder / "assets")


def restore_model(
    path: str | Path, shardings: Mapping[str, Any] | jax.sharding.Sharding | None = None, *, dtype: Any = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None, verified: bool = False,
) -> dict[str, Any]:
    """The parameters alone, verified unless they are `verified`: for evaluation and export, which never read moments.

    `shardings`: by name (a sharding, or a ShapeDtypeStruct that has one), one for all, or None for numpy arrays on the
    host. `shapes`: by name, where vocabulary or heads are padded for another mesh than the one it was saved from. Errors as
    restore's.
    """
    folder = find_checkpoint(path, [] if verified else ["model", "assets"])
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


def stored_parameters(path: str | Path, *, verified: bool = False) -> dict[str, tensorstore.TensorStore]:
    """`stored_arrays` of the parameters. For export, which needs one layer's tensor at a time."""
    return stored_arrays(path, "model", verified=verified)


def stored_arrays(path: str | Path, item: str, *, verified: bool = False) -> dict[str, tensorstore.TensorStore]:
    """An item's arrays (model, optimizer) by name as they lie on disk, verified: with shape and dtype, of which a part is read
    when it is taken (`numpy.asarray(found[name][layer])`). Errors as restore's."""
    folder = find_checkpoint(path, [] if verified else [item, "assets"])
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
    try:
        layout = hf_layout(LlamaConfig.from_hf(folder / "assets"))
    except ValueError:  # no model of ours: what would be padding is not known
        return False
    own = next((entry.shape for entry in layout if name.endswith(entry.name)), None)
    return own is not None and fits(name, found, wanted, own)


def _stored(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """As stored_shapes; ForeignError if the checkpoint does not have the item."""
    if item not in read_manifest(folder)["items"]:
        raise ForeignError(f"{folder}: this checkpoint has no {item}" + (
            " (an imported or exported model: start a run from it as model.path)" if item == "optimizer" else ""))
    return stored_shapes(folder, item)
