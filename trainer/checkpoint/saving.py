"""One save of a checkpoint: arrays are copied to the host at once; threads write, verify and
publish everything."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from data.errors import first_line, is_transient
from data.folders import storage_error
from data.paths import cache_folder
from trainer.checkpoint.arrays import join_parts, stored_shapes
from trainer.checkpoint.commit import (
    DATA_FILE_BYTES,
    Files,
    clear,
    orbax_reaches,
    publish,
    remove_leftovers,
    scratch_of,
)
from trainer.checkpoint.manifest import DamagedError, manifest, seal
from trainer.run.bucket import in_bucket
from trainer.run.cluster import WAIT_MILLISECONDS, barrier, client, decoded_error, encoded_error

# Orbax's folder of one process's part, and of the joined item.
_WRITER = re.compile(r"(?:^|/)(?:ocdbt\.|array_metadatas/)process_(\d+)(?:/|$)")
_JOINED = re.compile(r"\w+/(?:manifest\.ocdbt|d/.*)")
_UPLOADS = 4  # files of DATA_FILE_BYTES in memory at a time
# Numbers the saves, equally in every process.
_saves = itertools.count()


@dataclass(frozen=True)
class Contents:
    """Everything that one checkpoint holds.

    Attributes:
      model: parameter name -> array.
      assets: a folder of plain files.
      optimizer: a pytree of arrays; None: not saved.
      data: JSON; None: not saved.
      shapes: parameter name -> shape without the array's padding; None if unknown.
    """

    model: Mapping[str, Any]
    assets: Path
    optimizer: Any = None
    data: Mapping[str, Any] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None


class SaveError(OSError):
    """Saving a checkpoint failed in this process.

    Attributes:
      may_pass: whether another save may succeed. False with several processes: the others may be
        waiting for this one, so that only a restart makes them agree again.
    """

    def __init__(self, message: str, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class Saving:
    """A save in progress. The constructor returns when all arrays are on the host; a thread does
    the rest."""

    def __init__(
        self,
        target: Path,
        contents: Contents,
        *,
        ready: Callable[[], None] = lambda: None,
        before: Callable[[], None] = lambda: None,
        after: Callable[[Path], None] = lambda _: None,
        copy: bool = True,
    ) -> None:
        """Begins to save.

        Args:
          target: the checkpoint's folder; `trainer.checkpoint.commit` says where it is written and
            when it counts.
          ready: every process waits for this before the checkpoint can count.
          before: called by process 0 when everything is written, just before the checkpoint counts.
          after: called with `target` by process 0 when the checkpoint counts.
          copy: arrays on the CPU are copied first, because the caller may donate them; see
            `_host_copy`.
        """
        # Not the arrays, which the caller may donate.
        self.target, self.assets, self.shapes = target, contents.assets, contents.shapes
        self.ready, self.before, self.after = ready, before, after
        self.begun = time.monotonic()
        self.seconds: float | None = None  # seconds of the whole save, once it counts
        self.error: BaseException | None = None
        self.awaited = False  # `wait` will raise the error
        self.may_clear = True  # False for a checkpoint, or what may be another process's
        self.scratch = scratch_of(target)
        self.local = None if orbax_reaches(target) else _local_scratch(target)
        self.number = next(_saves)
        if jax.process_index() == 0 and not contents.assets.is_dir():
            raise ValueError(
                f"{contents.assets}: no such folder; a checkpoint needs its model's assets"
            )
        self.data = (
            None
            if contents.data is None
            else json.dumps(dict(contents.data), indent=1, allow_nan=False) + "\n"
        )
        if jax.process_index() == 0:
            clear(self.scratch)  # Orbax's thread creates it
        if self.local is not None:
            shutil.rmtree(self.local, ignore_errors=True)
        barrier(f"checkpoint {target.name} begins")
        trees = {"model": dict(contents.model)}
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
        except BaseException as error:
            self.error = error
            self._close()
            raise
        # Not a daemon, so that a program that ends without waiting still finishes its last
        # checkpoint.
        self.thread = threading.Thread(
            target=self._finish, name=f"checkpoint-{target.name}", daemon=False
        )
        self.thread.start()

    def wait(self) -> None:
        """Waits until the checkpoint counts, in every process.

        Raises:
          SaveError: saving failed in this process.
        """
        self.awaited = True
        self.thread.join()
        if self.error is not None:
            message = f"saving checkpoint {self.target} failed: {self.error}"
            message += self._resumes(self.error)
            raise SaveError(message, self._may_pass(self.error)) from self.error
        barrier(f"checkpoint {self.target.name} ends")

    def _may_pass(self, error: BaseException) -> bool:
        """See SaveError."""
        return jax.process_count() == 1 and is_transient(error) and self.may_clear

    def _resumes(self, error: BaseException) -> str:
        """What a message adds for a failure that ends several processes but may not recur."""
        if jax.process_count() == 1 or not is_transient(error):
            return ""
        return "; the same command resumes from the last checkpoint"

    def _start(self, item: str, arrays: dict[str, Any]) -> None:
        """Has Orbax copy an item's arrays to the host and begin to write them."""
        checkpointer = _checkpointer(everyone_writes_here=self.local is not None)
        self.checkpointers.append(checkpointer)
        # One piece per layer, so that reading a layer reads no other.
        pieces = {
            name: ocp.SaveArgs(shard_axes=(0,) if name.startswith("layers.") else ())
            for name in arrays
        }
        size = DATA_FILE_BYTES if in_bucket(self.target) else None
        checkpointer.save(
            (self.local or self.scratch) / item,
            args=ocp.args.PyTreeSave(arrays, pieces, ocdbt_target_data_file_size=size),
        )

    def _finish(self) -> None:
        """The thread's work: waits for Orbax; each process reads back its files; process 0 then
        publishes."""
        try:
            for checkpointer in self.checkpointers:
                checkpointer.wait_until_finished()  # with several processes: until all have written
            self.ready()
            if self.local is not None:
                _upload(self.local, self.scratch)
            records = seal_together(self.scratch, self.number)
            if jax.process_index() == 0:
                if self.local is not None:
                    records |= self._join(records)
                remove_leftovers(self.target)
                # Before the manifest makes it a checkpoint, and before any older one is removed.
                self._read_back()
                # In this thread: on a slow store they may take as long as several training steps.
                records |= self._write_plain_items()
                self.may_clear = False  # if `before` raises, another process may save this step
                self.before()
                self.may_clear = True
                publish(self.target, manifest(self.items, records, self.shapes))
                self.may_clear = False
                self.after(self.target)
            self.seconds = time.monotonic() - self.begun
        except BaseException as error:
            self.error = error
            if not self.awaited:  # until then hours may pass, or the process may be killed
                ends = "it is not saved, and training ends before its next save"
                ends += self._resumes(error)
                if self._may_pass(error):
                    ends = "it is not saved; training ends if its next save fails too"
                problem = storage_error(error, self.target, ends)
                print(
                    f"warning: {problem or f'{self.target}: {first_line(error)}; {ends}'}",
                    file=sys.stderr,
                )
            if jax.process_index() == 0 and self.may_clear:
                with contextlib.suppress(Exception):  # such as a full disk or an unreachable store
                    clear(self.scratch)
        finally:
            self._close()

    def _write_plain_items(self) -> dict[str, dict[str, Any]]:
        """Writes the plain-file items, assets and data; returns their records."""
        files = Files(self.scratch)
        plain = {
            f"assets/{path.relative_to(self.assets).as_posix()}": path.read_bytes()
            for path in sorted(self.assets.rglob("*"))
            if path.is_file()
        }
        if self.data is not None:
            plain["data/data.json"] = self.data.encode()
        for name, content in plain.items():
            files.write(name, content)
        return seal(self.scratch, list(plain))

    def _read_back(self) -> None:
        """Raises DamagedError unless the arrays on disk have the saved names and shapes."""
        for item, shapes in self.array_shapes.items():
            if {
                name: array.shape for name, array in stored_shapes(self.scratch, item).items()
            } != shapes:
                raise DamagedError(
                    f"{self.scratch}: the arrays of {item} are not those that were saved"
                )

    def _join(self, records: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Joins what all processes uploaded; returns the records of the resulting files."""
        for item in self.array_shapes:
            join_parts(self.scratch / item, jax.process_count())
        return seal(self.scratch, sorted(set(Files(self.scratch).names()) - set(records)))

    def _close(self) -> None:
        for checkpointer in self.checkpointers:
            if self.error is None:
                checkpointer.close()
            else:
                with contextlib.suppress(Exception):  # it raises the same error again
                    checkpointer.close()
        if self.local is not None:
            shutil.rmtree(self.local, ignore_errors=True)


def _checkpointer(everyone_writes_here: bool) -> ocp.AsyncCheckpointer:
    """Returns Orbax's checkpointer.

    Args:
      everyone_writes_here: whether each process saves to a separate folder, with only its part of
        each array.
    """
    if not everyone_writes_here:
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    options = ocp.options.MultiprocessingOptions(primary_host=None)
    parts = ocp.BasePyTreeCheckpointHandler(
        multiprocessing_options=options, enable_post_merge_validation=False
    )
    handler = ocp.PyTreeCheckpointHandler(handler_impl=parts, multiprocessing_options=options)
    return ocp.AsyncCheckpointer(handler, multiprocessing_options=options)


def _local_scratch(target: Path) -> Path:
    """Returns the local folder for a process's part of a checkpoint; the same for all saves of a
    run, so that killed saves leave at most one."""
    run = hashlib.sha256(str(target.parent).encode()).hexdigest()[:20]
    return cache_folder("uploads").absolute() / f"{run}-{jax.process_index()}"


def _upload(local: Path, target: Path) -> None:
    """Copies this process's files from its machine to a bucket."""
    names = [
        name
        for name in Files(local).names()
        if _writer(name) == jax.process_index() and not _JOINED.fullmatch(name)
    ]
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(lambda name: Files(target).write(name, (local / name).read_bytes()), names))


def flatten(tree: Any) -> dict[str, Any]:
    """Path -> leaf of any pytree, such as `0.mu.norm.weight`. Paths do not depend on container
    types."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("optimizer: two leaves of the state have the same path")
    return flat


def _host_copy(value: Any) -> Any:
    """Copies an array whose host view would share memory with the device; returns other arrays
    unchanged.

    On the CPU the host view of an array is the array itself, and the next step, which gets it
    donated, may overwrite it while it is being saved. jax 0.10.2 was seen to spare such arrays, but
    does not promise to. On accelerators Orbax's transfer to the host is the copy.
    """
    if not isinstance(value, jax.Array):
        return np.array(value)
    devices: Any = value.sharding.device_set
    return jnp.copy(value) if all(device.platform == "cpu" for device in devices) else value


def seal_together(scratch: Path, number: int) -> dict[str, dict[str, Any]]:
    """Has every process seal the files it wrote; returns all records in process 0.

    Args:
      scratch: the folder that Orbax has written to, which all processes see.
      number: of the save, equal in all processes.

    Raises:
      OSError: this process could not, or a file is missing.
      UserError, TransientError: in process 0, another process could not.
    """
    written = [name for name in Files(scratch).names() if _writer(name) == jax.process_index()]
    if jax.process_count() == 1:
        return seal(scratch, written)
    key = f"longstripe/sealed/{number}"
    if jax.process_index() != 0:
        try:
            message = json.dumps({"records": seal(scratch, written)})
        except Exception as error:
            failure = encoded_error(error, f"process {jax.process_index()}: ")
            client().key_value_set(f"{key}/{jax.process_index()}", failure)
            raise
        client().key_value_set(f"{key}/{jax.process_index()}", message)
        return {}
    records = seal(scratch, written)
    for process in range(1, jax.process_count()):
        answer = json.loads(client().blocking_key_value_get(f"{key}/{process}", WAIT_MILLISECONDS))
        client().key_value_delete(f"{key}/{process}")
        if "code" in answer:
            raise decoded_error(answer)
        records |= answer["records"]
    if missing := sorted(set(Files(scratch).names()) - set(records)):
        raise OSError(
            f"{scratch / missing[0]}: only process 0 sees it; all processes need the same folder"
        )
    return records


def _writer(name: str) -> int:
    """Returns the number of the process that wrote an Orbax file."""
    match = _WRITER.search(name)
    return int(match[1]) if match and int(match[1]) < jax.process_count() else 0
