"""Checkpoints: saved asynchronously and atomically, verified before use, restored onto any mesh.

Only this module and trainer.checkpoint.saving import Orbax. A checkpoint is a folder:

    model/          Orbax: the flat dictionary of parameters
    optimizer/      Orbax: the optimizer's arrays by their path in the state             (if a
    training wrote it) data/data.json  the step, fingerprints of the data and of the first model,
    whether the evaluations of the step are done,
                    and the number and hash of each log's lines                          (if a
                    training wrote it)
    assets/         plain files: config.json, tokenizer, chat template, run configuration, source
    dtype manifest.json   size and sha256 of every file above, and the parameters' shapes without
    padding; written last

A run keeps them as RUN/checkpoints/STEP. A checkpoint is written as STEP.tmp and renamed when
whole. A process killed at any moment thus leaves only a .tmp folder, which no reader takes for a
checkpoint and the next save removes. Orbax alone does not notice most bits that flip on disk; the
manifest does.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from data.errors import UserError
from data.paths import new_folder
from data.within import parse_json
from model.config import TransformerConfig
from model.declarations import own_shapes
from model.padding import fits
from trainer.checkpoint.arrays import open_arrays, read_arrays, stored_shapes
from trainer.checkpoint.commit import (
    CHECKPOINTS,
    DAMAGED,
    MANIFEST,
    Files,
    located,
    orbax_reaches,
    remove,
    steps_in,
)
from trainer.checkpoint.fetch import MODEL, local_copy
from trainer.checkpoint.manifest import DamagedError, ForeignError, read_manifest, verify
from trainer.checkpoint.saving import Contents, Saving, flatten
from trainer.run.cluster import end_now, exchange, first_then_others

_STEP = re.compile(r"\d+")
# Of a process's share of a checkpoint, which it digests before the restore; more of it meanwhile.
DIGESTED_BEFORE = 4 << 30


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      step: finished optimizer steps; None for a checkpoint outside a run's folder.
      model: parameter name -> array.
      optimizer: the optimizer's state; None if it was not asked for.
      data: the item `data`; None if the checkpoint has none.
      assets: a folder inside the checkpoint: copy files that must outlive it.
    """

    step: int | None
    model: dict[str, jax.Array]
    optimizer: Any
    data: dict[str, Any] | None
    assets: Path


class CheckpointStore:
    """The checkpoints of one run, RUN/checkpoints/STEP.

    With several processes every process calls every method in the same order; they share a file
    system.
    """

    def __init__(self, run_dir: str | Path, keep: int = 3) -> None:
        """Opens the store without creating any folder.

        Args:
          keep: how many of the newest checkpoints are kept; at least 1.
        """
        if keep < 1:
            raise ValueError(f"keep: {keep} checkpoints; needs at least 1")
        self.folder = located(run_dir) / CHECKPOINTS
        self.keep = keep
        self.protected: int | None = None  # a step whose checkpoint is kept whatever `keep` says
        # Called by process 0 just before a checkpoint counts.
        self.before: Callable[[], None] | None = None
        # Called, with a line, by the thread that finds damage after training has gone on from it.
        self.on_damage: Callable[[str], object] = end_now
        self._digesting: threading.Thread | None = None
        self._damaged: set[int] = set()
        self._saving: Saving | None = None
        self.save_seconds = 0.0  # that the last save took; 0 before the first

    def steps(self) -> list[int]:
        """The steps that have a folder, ascending, those of damaged checkpoints included."""
        return steps_in(self.folder)

    def steps_for_all(self) -> list[int]:
        """`steps` as process 0 sees them, in every process."""
        return first_then_others(
            lambda message: self.steps() if message is None else json.loads(message), json.dumps
        )

    def path(self, step: int) -> Path:
        """The folder of `step`'s checkpoint."""
        return self.folder / str(step)

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Any],
        assets: str | Path,
        optimizer: Any = None,
        data: Mapping[str, Any] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Begins to save, and returns as soon as the arrays are copied to the host, so they may be
        donated at once.

        Waits for the save before, whose error, if it had one, is raised here. The arguments are
        those of `Contents`.
        """
        self.wait()
        self._saving = Saving(
            self.path(step),
            Contents(model, Path(assets), optimizer, data, shapes),
            after=self._retain,
            before=self.before,
            ready=self.finish_digests,
        )

    def wait(self) -> None:
        """Waits until the last save is on disk and counts. Raises its error if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()
            self.save_seconds = saving.seconds or 0.0

    def wait_at_most(self, seconds: float) -> None:
        """Waits for a save that is under way; unlike `wait` without the other processes, and from
        any thread."""
        if (saving := self._saving) is not None:
            saving.thread.join(seconds)

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the last save; after an error in this process alone, as the others may never
        reach this call."""
        if kind is None:
            self.wait()
            self.finish_digests()
        elif self._saving is not None:
            self._saving.thread.join()

    def latest_good(self, meanwhile: bool = False) -> int | None:
        """The newest step whose files are all as they were written; None if there is no checkpoint
        at all.

        A damaged checkpoint is named by a warning on standard error, and the one before is tried.

        Args:
          meanwhile: of a checkpoint of which a process has more than DIGESTED_BEFORE to read, only
            the sizes are compared, and a thread compares the digests while training goes on. What
            it finds is kept in the checkpoint, and given to `on_damage`; until it is done no other
            checkpoint counts.

        Raises:
          ValueError: there are checkpoints, and none is good.
        """
        self.wait()
        problems: list[ValueError] = []
        for step in reversed(self.steps_for_all()):
            folder = self.path(step)
            later = meanwhile and _share_of(folder) > DIGESTED_BEFORE
            problem = _problem_in_any(folder, digests=not later)
            if problem is None:
                if later:
                    self._digest(folder)
                for found in problems if jax.process_index() == 0 else ():
                    print(f"warning: {found}; using the checkpoint before", file=sys.stderr)
                return step
            self._damaged.add(step)
            problems.append(problem)
        if problems and all(isinstance(problem, ForeignError) for problem in problems):
            raise problems[0]
        if problems:
            raise ValueError(
                f"{self.folder}: every checkpoint is damaged (newest: {problems[0]}); "
                "start again in another run directory, or restore them from a copy"
            )
        return None

    def _digest(self, folder: Path) -> None:
        """Begins to compare this process's share of the digests."""

        def compare() -> None:
            try:
                verify(folder, share=(jax.process_index(), jax.process_count()))
            except DamagedError as error:
                with contextlib.suppress(OSError, UserError):
                    Files(folder).write(DAMAGED, str(error).encode())
                self.on_damage(
                    f"{error}; this was found after training had gone on from it, and another "
                    "start uses the checkpoint before"
                )
            except (OSError, UserError) as error:
                print(f"warning: {folder}: digests not compared ({error})", file=sys.stderr)

        self._digesting = threading.Thread(target=compare, name="digests", daemon=True)
        self._digesting.start()

    def finish_digests(self) -> None:
        """Waits for digests that are compared in the background."""
        if (thread := self._digesting) is not None:
            thread.join()

    def restore(
        self, step: int, abstract_model: Mapping[str, Any], abstract_optimizer: Any = None
    ) -> Restored:
        """Restores `step`, which `latest_good` has verified; arguments and errors as in the
        function `restore`."""
        return _restore(self.path(step), abstract_model, abstract_optimizer)

    def _retain(self, saved: Path) -> None:
        """Deletes the oldest good checkpoints beyond `keep`. Damaged ones are neither counted nor
        deleted."""
        self._damaged.discard(int(saved.name))
        good = [step for step in self.steps() if step not in self._damaged]
        for step in good[: -self.keep]:
            if step != self.protected:
                remove(self.path(step))


def save_checkpoint(
    path: str | Path,
    *,
    model: Mapping[str, Any],
    assets: str | Path,
    optimizer: Any = None,
    data: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Writes one checkpoint at `path` and waits for it. The arguments are those of `Contents`.

    Raises:
      UserError: something exists at `path` already.
    """
    # Nobody writes into the arrays while we wait, so they need not be copied.
    Saving(
        new_folder(Path(path).absolute()),
        Contents(model, Path(assets), optimizer, data, shapes),
        copy=False,
    ).wait()


def _share_of(folder: Path) -> float:
    """Returns the bytes of a checkpoint that each process reads to verify it; 0 if its manifest
    cannot be read."""
    try:
        files = read_manifest(folder)["files"].values()
    except (DamagedError, ForeignError):
        return 0
    return sum(record["size"] for record in files) / jax.process_count()


def _require_unmarked(folder: Path) -> None:
    """Raises DamagedError if damage was found in the background, which sizes do not show."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        raise DamagedError(Files(folder).read(DAMAGED).decode(errors="replace"))


def _problem_in_any(
    folder: Path, items: Sequence[str] | None = None, digests: bool = True
) -> ValueError | None:
    """Returns what is wrong with a checkpoint, None if nothing; alike in all processes, each of
    which reads its share of it."""
    problem: ValueError | None = None
    try:
        if not digests:
            _require_unmarked(folder)
        verify(folder, items, (jax.process_index(), jax.process_count()), digests)
    except (DamagedError, ForeignError) as error:
        problem = error
    for kind, text in exchange([type(problem).__name__, str(problem)] if problem else ["", ""]):
        if kind:
            return DamagedError(text) if kind == "DamagedError" else ForeignError(text)
    return None


def find_checkpoint(path: str | Path, items: Sequence[str] = ()) -> Path:
    """The checkpoint folder at `path`, or the newest good one of the run folder at `path`; of
    RUN/best the best one.

    Args:
      items: the items of a checkpoint at `path` that are verified. That of a run folder is verified
        as a whole.

    Raises:
      ForeignError: the folder is neither; the message names what it is, if it is known.
      DamagedError: a verified file has changed.
    """
    path = best_or_itself(local_copy(path).absolute())
    if not path.is_dir():
        raise ForeignError(f"{path}: no such folder")
    if (path / MANIFEST).exists():
        if items and (problem := _problem_in_any(path, items)):
            raise problem
        return path
    run = path.parent if path.name == CHECKPOINTS else path
    store = CheckpointStore(run)
    if store.steps():
        step = store.latest_good()
        if step is not None:
            return store.path(step)
    if path.name.endswith(".tmp"):
        raise ForeignError(
            f"{path}: a checkpoint that was never finished; its run's folder finds the last good "
            "one"
        )
    if (path / "config.json").exists():
        raise ForeignError(
            f"{path}: a Hugging Face folder, not a checkpoint; python -m scripts.import_hf makes "
            "one of it"
        )
    raise ForeignError(
        f"{path}: no {MANIFEST} (a checkpoint), no {CHECKPOINTS}/ (a run) and no config.json (a "
        "Hugging Face model) is in this folder"
    )


def best_or_itself(path: Path) -> Path:
    """RUN/best as the folder of the run's best checkpoint, by the metric that its `checkpoint.best`
    names; others unchanged.

    Raises:
      ForeignError: the run measured none.
    """
    run = path.parent
    if path.name != "best" or path.exists() or not (run / CHECKPOINTS).is_dir():
        return path
    best = (read_data(run) or {}).get("best") or {}
    if best.get("step") is None:
        raise ForeignError(
            f"{path}: this run has measured no best checkpoint; checkpoint.best names the metric "
            "for one"
        )
    return CheckpointStore(run).path(best["step"])


def assets_dir(path: str | Path) -> Path:
    """The verified assets folder of the checkpoint or run at `path`; errors as in
    `find_checkpoint`."""
    return find_checkpoint(path, ["assets"]) / "assets"


def read_data(path: str | Path) -> dict[str, Any] | None:
    """The item `data` of the checkpoint at `path`; None if it has none."""
    return _data_of(find_checkpoint(path))


def _data_of(folder: Path) -> dict[str, Any] | None:
    if "data" not in read_manifest(folder)["items"]:
        return None
    return parse_json(Files(folder).read("data/data.json"))


def restore(
    path: str | Path,
    abstract_model: Mapping[str, Any],
    abstract_optimizer: Any = None,
    *,
    verified: bool = False,
) -> Restored:
    """Restores a checkpoint, or a run's newest good one, onto the shardings of the abstract trees,
    on any mesh.

    Args:
      abstract_model: parameter name -> array or jax.ShapeDtypeStruct with a sharding. One without
        comes back as numpy.
      abstract_optimizer: a pytree of the same, of the state's structure; None: the moments are not
        read.
      verified: the checkpoint has been compared with its manifest already.

    Raises:
      ForeignError, DamagedError: as in `find_checkpoint`.
      ValueError: names the parameter whose name, shape or dtype differs.
    """
    items = ["model", "data", "assets", *(["optimizer"] if abstract_optimizer is not None else [])]
    return _restore(
        find_checkpoint(path, [] if verified else items), abstract_model, abstract_optimizer
    )


def _restore(
    folder: Path, abstract_model: Mapping[str, Any], abstract_optimizer: Any = None
) -> Restored:
    """`restore` of the verified checkpoint in a folder, here or in a bucket."""
    model = _restore_item(folder, "model", dict(abstract_model))
    optimizer = None
    if abstract_optimizer is not None:
        flat = _restore_item(folder, "optimizer", flatten(abstract_optimizer))
        structure = jax.tree_util.tree_structure(abstract_optimizer)
        optimizer = jax.tree_util.tree_unflatten(structure, list(flat.values()))
    step = int(folder.name) if _STEP.fullmatch(folder.name) else None
    return Restored(step, model, optimizer, _data_of(folder), folder / "assets")


def restore_model(
    path: str | Path,
    shardings: Mapping[str, Any] | jax.sharding.Sharding | None = None,
    *,
    dtype: Any = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    verified: bool = False,
) -> dict[str, Any]:
    """Restores the parameters alone: for evaluation and export, which never read moments.

    Args:
      shardings: by name (a sharding, or a ShapeDtypeStruct that has one), one for all, or None for
        numpy arrays on the host.
      dtype: what the arrays are cast to: by name, or one for all; None keeps the stored dtypes.
      shapes: by name, where parameters are padded for another mesh than the one that the checkpoint
        was saved from.
      verified: the checkpoint has been compared with its manifest already.

    Raises:
      As `restore`.
    """
    folder = find_checkpoint(path, [] if verified else ["model", "assets"])
    abstract = {}
    for name, stored in _stored(folder, "model").items():
        sharding = shardings.get(name) if isinstance(shardings, Mapping) else shardings
        if isinstance(shardings, Mapping) and sharding is None:
            raise ValueError(
                f"{folder}: parameter {name} is in the checkpoint, but not in the model asked for"
            )
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
    if dtype is None:
        return params
    return {
        name: value.astype(dtype[name] if isinstance(dtype, Mapping) else dtype)
        for name, value in params.items()
    }


def stored_parameters(
    path: str | Path, *, verified: bool = False
) -> dict[str, tensorstore.TensorStore]:
    """`stored_arrays` of the parameters, for export, which needs one layer's tensor at a time."""
    return stored_arrays(path, "model", verified=verified)


def stored_average(path: str | Path) -> dict[str, tensorstore.TensorStore]:
    """`stored_arrays` of the trained parameters' moving average (optimizer.average_decay), by
    parameter name.

    Raises:
      ForeignError: the checkpoint holds none; others as in `restore`.
    """
    folder, mark = find_checkpoint(local_copy(path, [*MODEL, "optimizer"])), ".average."
    arrays = stored_arrays(folder, "optimizer") if (folder / "optimizer").is_dir() else {}
    average = {name.partition(mark)[2]: array for name, array in arrays.items() if mark in name}
    if not average:
        raise ForeignError(
            f"{folder}: holds no average of the weights; training keeps one with "
            "optimizer.average_decay"
        )
    return average


def stored_arrays(
    path: str | Path, item: str, *, verified: bool = False
) -> dict[str, tensorstore.TensorStore]:
    """The arrays of an item (model, optimizer) by name, on disk: indexing one reads that part
    (`numpy.asarray(array[layer])`).

    Errors as in `restore`.
    """
    folder = find_checkpoint(path, [] if verified else [item, "assets"])
    _require_item(folder, item)
    return open_arrays(folder, item)


def _restore_item(folder: Path, item: str, abstract: dict[str, Any]) -> dict[str, Any]:
    """The arrays of one Orbax item, in the order of `abstract`."""
    _check_arrays(folder, item, abstract)
    if not orbax_reaches(folder):
        return read_arrays(folder, item, abstract)
    arguments = {}
    for name, leaf in abstract.items():
        sharding = getattr(leaf, "sharding", None)
        arguments[name] = (
            ocp.RestoreArgs(restore_type=np.ndarray)
            if sharding is None
            else ocp.ArrayRestoreArgs(
                sharding=sharding, global_shape=tuple(leaf.shape), dtype=leaf.dtype, strict=False
            )
        )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(
            folder / item,
            args=ocp.args.PyTreeRestore(item=dict.fromkeys(abstract, 0), restore_args=arguments),
        )
    return {name: arrays[name] for name in abstract}


def _check_arrays(folder: Path, item: str, abstract: dict[str, Any]) -> None:
    """Raises ValueError for the first array whose name, dtype or shape (but for padding) is another
    one in the checkpoint.

    Orbax itself would silently cast to another dtype, and might cut or pad another shape.
    """
    stored = _stored(folder, item)
    kind = "parameter" if item == "model" else "optimizer state"
    for name, leaf in abstract.items():
        if name not in stored:
            raise ValueError(f"{folder}: {kind} {name} is not in the checkpoint")
        array = stored[name]
        if array.dtype != leaf.dtype or not _fits(
            folder, name, tuple(array.shape), tuple(np.shape(leaf))
        ):
            raise ValueError(
                f"{folder}: {kind} {name} is {array.dtype}{list(array.shape)} in the checkpoint, "
                f"and {np.dtype(leaf.dtype)}{list(np.shape(leaf))} in this run"
            )
    for name in stored:
        if name not in abstract:
            raise ValueError(f"{folder}: {kind} {name} is in the checkpoint, but not in this run")


def _fits(folder: Path, name: str, stored: tuple[int, ...], requested: tuple[int, ...]) -> bool:
    """Whether the shapes are equal but for padding, which Orbax may add or leave out, and none of
    the model is left out."""
    if stored == requested:
        return True
    # An optimizer's array is named by its path in the state, which ends with its parameter's name.
    shapes = _recorded_shapes(folder)
    own = next(
        (shape for parameter, shape in shapes.items() if f".{name}".endswith(f".{parameter}")), None
    )
    return own is not None and fits(name, stored, requested, own)


def _recorded_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape without padding, as the manifest records it.

    Earlier releases did not record it: then it is that of the model in the checkpoint's
    config.json, if it is a LLaMA.
    """
    recorded = read_manifest(folder).get("shapes")
    if recorded is not None:
        return {name: tuple(shape) for name, shape in recorded.items()}
    try:
        return own_shapes(TransformerConfig.from_hf(folder / "assets"))
    except ValueError:
        return {}


def _stored(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The result of `stored_shapes`; errors as in `_require_item`."""
    _require_item(folder, item)
    return stored_shapes(folder, item)


def _require_item(folder: Path, item: str) -> None:
    """Raises ForeignError if the checkpoint does not have the item."""
    if item not in read_manifest(folder)["items"]:
        raise ForeignError(
            f"{folder}: this checkpoint has no {item}"
            + (
                " (an imported or exported model: start a run from it as model.path)"
                if item == "optimizer"
                else ""
            )
        )
