"""The checkpoints of one run: saved asynchronously and atomically, verified before use.

Only this folder's items and saving import Orbax. A checkpoint is a folder:

    model/          Orbax: the flat dictionary of parameters
    optimizer/      Orbax: the optimizer's arrays by their path in the state (of a training)
    data/data.json  the step, fingerprints of the data and of the first model, whether the
                    evaluations of the step are done, and the number and hash of each log's lines
                    (of a training)
    assets/         plain files: config.json, tokenizer, chat template, run configuration, source
                    dtype
    manifest.json   size and sha256 of every file above, and the parameters' shapes without padding;
                    written last

A run keeps them as RUN/checkpoints/STEP. A checkpoint is written as STEP.tmp and renamed when
whole. A process killed at any moment thus leaves only a .tmp folder, which no reader takes for a
checkpoint and the next save removes. Orbax alone does not notice most bits that flip on disk; the
manifest does.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from data.errors import TransientError, UserError, first_line
from data.outputs import new_folder
from trainer.checkpoint.commit import (
    CHECKPOINTS,
    DAMAGED,
    Files,
    located,
    remove,
    steps_in,
)
from trainer.checkpoint.items import Restored, data_of, restore_item
from trainer.checkpoint.manifest import (
    DamagedError,
    ForeignError,
    none_good,
    read_manifest,
    use_previous,
    verify,
)
from trainer.checkpoint.saving import Contents, Saving, flatten
from trainer.run.cluster import end_now, exchange, first_then_others

# A process digests at most this much of its share before the restore, the rest meanwhile.
DIGESTED_BEFORE = 4 << 30
_REMOVED = 5  # checkpoints by another process, after which no further one is tried


class CheckpointStore:
    """The checkpoints of one run, RUN/checkpoints/STEP.

    All processes call every method in the same order, and share a file system.
    """

    def __init__(self, run_dir: str | Path, keep: int = 3) -> None:
        """Opens the store without creating any folder.

        Args:
          keep: how many of the newest checkpoints to keep; at least 1.
        """
        self.folder = located(run_dir) / CHECKPOINTS
        self.keep = keep
        self.protected: int | None = None  # a step whose checkpoint is kept regardless of `keep`
        # Called by process 0 just before a checkpoint counts.
        self.before: Callable[[], None] = lambda: None
        # Called with a line by the thread that finds damage after training has continued from it.
        self.on_damage: Callable[[str], object] = end_now
        self._digesting: threading.Thread | None = None
        self._damaged: set[int] = set()
        self._saving: Saving | None = None
        self.save_seconds = 0.0  # seconds of the last save; 0 before the first

    def steps(self) -> list[int]:
        """The steps that have a folder, ascending, including damaged checkpoints."""
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

        Waits for the previous save and raises its error, if any. The arguments are those of
        `Contents`.
        """
        self.wait()
        self._saving = Saving(
            self.path(step),
            Contents(model, Path(assets), optimizer, data, shapes),
            ready=self.finish_digests,
            before=self.before,
            after=self._retain,
        )

    def wait(self) -> None:
        """Waits until the last save is on disk and counts. Raises its error if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()
            self.save_seconds = saving.seconds or 0.0

    def wait_at_most(self, seconds: float) -> None:
        """Waits for a running save; unlike `wait`, without the other processes, and from any
        thread."""
        if (saving := self._saving) is not None:
            saving.thread.join(seconds)

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the last save; after an error without the other processes, which may never get
        here."""
        if kind is None:
            self.wait()
            self.finish_digests()
        elif self._saving is not None:
            self._saving.thread.join()

    def latest_good(self, meanwhile: bool = False) -> int | None:
        """The newest step whose files are all unchanged; None if there is no checkpoint.

        A warning on standard error names a damaged checkpoint, and the previous one is tried. One
        that a training in another process removes meanwhile is not damaged.

        Args:
          meanwhile: if a process would read more than DIGESTED_BEFORE, only sizes are compared, and
            a thread compares digests during training. It records damage in the checkpoint and calls
            `on_damage`; no other checkpoint counts until it is done.

        Raises:
          ValueError: there are checkpoints, but none is good.
          TransientError: they are removed faster than they are read.
        """
        self.wait()
        problems: dict[int, ValueError] = {}
        steps, removed = self.steps_for_all(), 0
        while untried := [step for step in steps if step not in problems]:
            step = untried[-1]
            folder = self.path(step)
            later = meanwhile and _share_of(folder) > DIGESTED_BEFORE
            problem = problem_in_any(folder, digests=not later)
            if problem is None:
                if later:
                    self._digest(folder)
                if jax.process_index() == 0:
                    use_previous([problems[old] for old in sorted(problems)[::-1] if old > step])
                return step
            steps = self.steps_for_all()
            if step in steps:
                self._damaged.add(step)
                problems[step] = problem
            elif (removed := removed + 1) == _REMOVED:
                raise TransientError(
                    f"{folder}: was removed while it was read, as the {_REMOVED - 1} before it "
                    "were; a higher checkpoint.keep, or a copy of one, would work"
                )
        if problems:
            raise none_good(self.folder, [problems[step] for step in sorted(problems)[::-1]])
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
                    f"{error}; this was found after training had continued from it; a restart "
                    "uses the previous checkpoint"
                )
            except (OSError, UserError) as error:
                print(f"warning: {folder}: digests not compared ({error})", file=sys.stderr)

        self._digesting = threading.Thread(target=compare, name="digests", daemon=True)
        self._digesting.start()

    def finish_digests(self) -> None:
        """Waits for digests being compared in the background."""
        if (thread := self._digesting) is not None:
            thread.join()

    def restore(
        self, step: int, abstract_model: Mapping[str, Any], abstract_optimizer: Any
    ) -> Restored:
        """Restores a training's checkpoint, which `latest_good` has verified, on any mesh.

        Args:
          abstract_model: as in `restore_item`, which says what is raised.
          abstract_optimizer: a pytree of the same kind, with the state's structure.
        """
        folder = self.path(step)
        model = restore_item(folder, "model", dict(abstract_model))
        moments = restore_item(folder, "optimizer", flatten(abstract_optimizer))
        optimizer = jax.tree.unflatten(jax.tree.structure(abstract_optimizer), moments.values())
        return Restored(step, model, optimizer, data_of(folder) or {})

    def _retain(self, saved: Path) -> None:
        """Deletes the oldest good checkpoints beyond `keep`. Damaged ones are neither counted nor
        deleted; one that cannot be deleted is tried again after the next save."""
        self._damaged.discard(int(saved.name))
        try:
            good = [step for step in self.steps() if step not in self._damaged]
        except (OSError, UserError) as error:
            _warn_kept(self.folder, error)
            return
        for step in good[: -self.keep]:
            if step != self.protected:
                try:
                    remove(self.path(step))
                except (OSError, UserError) as error:
                    _warn_kept(self.path(step), error)


def _warn_kept(folder: Path, error: Exception) -> None:
    print(
        f"warning: {folder}: beyond checkpoint.keep and not removed ({first_line(error)}); the "
        "next save tries again",
        file=sys.stderr,
    )


def save_checkpoint(
    path: str | Path,
    *,
    model: Mapping[str, Any],
    assets: str | Path,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Writes a model's checkpoint at `path` and waits for it. The arguments are those of
    `Contents`.

    Raises:
      UserError: `path` already exists.
    """
    # Nothing writes to the arrays while we wait, so they need no copy.
    Saving(
        new_folder(Path(path).absolute()),
        Contents(model, Path(assets), shapes=shapes),
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


def problem_in_any(
    folder: Path, items: Sequence[str] | None = None, digests: bool = True
) -> ValueError | None:
    """Returns what is wrong with a checkpoint, or None, the same in all processes; each reads a
    share."""
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
