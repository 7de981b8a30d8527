"""The second tier of checkpoints: every few steps each process writes its shards to its host, and
keeps a copy of another host's.

    FOLDER/RUN/process_2/step_40.part_2     its own shards, see `local_part`
    FOLDER/RUN/process_2/step_40.part_1     the copy of process 1's

RUN is the run's identifier, kept with the newest complete step in the run folder's `local.json`
(`local_record`).
FOLDER is on each host's disk or in its memory (`checkpoint.local`), where a restart finds it on the
hosts that are back: one host may be lost. No file is shared, so this does not depend on the store
of `run_dir` or its speed.

A step is restored only if each of its parts, all saved by one start of the same processes on the
same mesh, is on a host that is back; every process then has its part, from its host or sent by
another, verified by its digest. Otherwise the run continues from `run_dir`.

Orbax's emergency checkpoints copy replicas along a mesh axis of slices, or rely on a service in
Google's clusters. A model sharded over all hosts has no replica.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from data.paths import expanded
from data.printable import printable
from data.untrusted_files import parse_json
from trainer.checkpoint.items import Restored
from trainer.checkpoint.local_candidates import (
    Candidate,
    Expected,
    FoundPart,
    candidates,
    keeper_of,
    kept_for,
    key_of,
    part_name,
    scan,
)
from trainer.checkpoint.local_part import (
    Header,
    digest_of,
    host_copies,
    layout_of,
    read_header,
    read_part,
    size_of,
    verify_part,
    write_part,
)
from trainer.checkpoint.local_record import RECORD, own_record, place_of, read_record
from trainer.checkpoint.local_transfer import Hosts
from trainer.checkpoint.manifest import DamagedError
from trainer.checkpoint.saving import flatten
from trainer.run.cluster import (
    WAIT_MILLISECONDS,
    client,
    exchange,
    first_then_others,
)
from trainer.run.logs import replace_file

_MODEL, _OPTIMIZER = "model/", "optimizer/"  # prefixes of array names in a part
_GOOD = "good"  # what a process reports if nothing failed
_LONGEST_ORDER = 200  # characters


class LocalTier:
    """The local checkpoints of one run, in one process.

    With several processes every process calls every method in the same order.
    """

    def __init__(self, folder: str, run_folder: Path, location: str, mesh: Mesh) -> None:
        """Begins to serve this process's files to the others.

        Args:
          folder: FOLDER.
          run_folder: where process 0 finds and keeps `local.json`.
          location: of the run, for messages.
        """
        self.root, self.location = expanded(folder).absolute(), location
        self.run_folder = run_folder
        self.mesh = _described(mesh)
        self.process, self.processes = jax.process_index(), jax.process_count()
        # Called by process 0's thread just before a local checkpoint is written.
        self.before: Callable[[], None] = lambda: None
        self.newest: int | None = None  # newest complete step
        self._begun = time.time()
        self._files: dict[str, Path] = {}
        self._warned = ""  # the last failed save's warning
        self._saves = 0
        self._thread: threading.Thread | None = None
        self.attempt, secret = exchange([secrets.token_hex(8), secrets.token_hex()])[0]
        self.hosts = Hosts(secret, lambda key: self._files.get(key))
        self.run = ""

    @property
    def folder(self) -> Path:
        """This process's files."""
        return self.root / self.run / f"process_{self.process}"

    def close(self) -> None:
        """Stops serving files."""
        self.hosts.close()

    def recorded(self) -> dict[str, Any]:
        """Returns `own_record` of the run's folder, as process 0 sees it."""
        return first_then_others(
            lambda sent: (
                own_record(self.run_folder, self.location) if sent is None else parse_json(sent)
            ),
            json.dumps,
        )

    def describe(self, model: Mapping[str, Any], optimizer: Any, every: int) -> str:
        """Returns a log line that says what process 0 keeps where."""
        size = size_of(layout_of(_flat(model, optimizer)))
        line = f"local checkpoints: every {every} steps {size / 1e6:,.1f} MB to {self.folder}"
        if (keeper := keeper_of(self.process, self.hosts.names)) is None:
            return f"{line}; one process, so there is no copy"
        where = (
            "also on this machine" if len(set(self.hosts.names)) == 1 else self.hosts.names[keeper]
        )
        return f"{line}; copied to process {keeper} ({where})"

    def claim(self) -> None:
        """Writes the run's identifier and place to its folder, in process 0, once the run is
        locked."""
        if self.process == 0:
            self._write_record()

    # Restoring

    def restore(self, model: Mapping[str, Any], optimizer: Any, after: int) -> Restored | None:
        """Restores the newest usable local checkpoint after step `after`; None if there is none.

        Process 0 says why others are not used.

        Args:
          model: abstract arrays with shardings.
          optimizer: the same, of the state's structure.
        """
        record = self.recorded()
        self.run, self.newest = str(record.get("run") or self.attempt), None
        if "copy_of" in record:
            self._say(self._as_copy(record))
        abstract = _flat(model, optimizer)
        for path in self.folder.glob("*.tmp"):  # of a killed process
            path.unlink(missing_ok=True)
        own_parts, self._files = scan(self.root, self.run, self.folder)
        of_all = exchange([digest_of(layout_of(abstract)), own_parts])
        expected = Expected(self.run, self.mesh, [layout for layout, _ in of_all])
        found = [[FoundPart(*part) for part in parts] for _, parts in of_all]
        complete, refused = candidates(found, expected, after)
        for reason in refused:
            self._say(reason)
        for candidate in complete:
            problems = [problem for problem in exchange(self._obtain(candidate)) if problem]
            if not problems:
                return self._restored(candidate, abstract, optimizer)
            self._say(
                f"the local checkpoint of step {candidate.step} is not used: {'; '.join(problems)}"
            )
        step, found_steps = record.get("step"), {part.step for parts in found for part in parts}
        if isinstance(step, int) and step > after and step not in found_steps:
            self._say(f"none of the current hosts has the local checkpoint of step {step}")
        return None

    def _as_copy(self, record: Mapping[str, Any]) -> str:
        """Returns a warning that a copy of a run's folder does not use the original's local
        checkpoints, by `own_record`."""
        original, run = record["copy_of"], record.get("original_run")
        stays = "its local checkpoints stay that run's, and this one goes on without them"
        if run is None:
            return f"{self.location} is a copy of {original}; {stays}"
        # With the run too: this start will write its own over it.
        own = {"run": run, "location": record["location"]}
        return (
            f"{self.location} was moved or copied from {original}; {stays}. If it was moved, end "
            f"this start, and set {json.dumps(own)[1:-1]} in its {RECORD}"
        )

    def _say(self, text: str) -> None:
        if self.process == 0:
            line = f"warning: {self.root}: {text}"
            print(printable(line), file=sys.stderr, flush=True)

    def _obtain(self, candidate: Candidate) -> str:
        """Makes sure that this process has its verified part; returns why it does not."""
        key = f"{part_name(candidate.step, self.process)}.{candidate.attempt}"
        problems = []
        if (path := self._files.get(key)) is not None:
            try:
                verify_part(path)
                return ""
            except (DamagedError, OSError) as error:
                print(f"warning: {error}; a copy would be used", file=sys.stderr)
                problems.append(str(error))
        for process in candidate.holders[self.process]:
            if process == self.process:
                continue
            try:
                self._fetch(process, candidate.step, self.process, candidate.attempt)
            except (DamagedError, OSError) as error:
                problems.append(f"process {self.process}: {error}")
                continue
            print(
                f"local checkpoints: process {self.process} has its part of step "
                f"{candidate.step} from process {process} ({self.hosts.names[process]})",
                file=sys.stderr,
            )
            return ""
        return "; ".join(problems)

    def _fetch(self, process: int, step: int, part: int, attempt: str) -> None:
        """Copies a part from another process's host to this one."""
        name = part_name(step, part)
        target, key = self.folder / name, f"{name}.{attempt}"
        _make(self.folder)
        header = self.hosts.fetch(process, key, target)
        if (self.run, key) != (header.run, key_of(header)):
            target.unlink()
            raise DamagedError(f"process {process} sent a part other than {key}")
        self._files[key] = target

    def _restored(
        self, candidate: Candidate, abstract: Mapping[str, Any], optimizer: Any
    ) -> Restored:
        """Reads this process's verified part; the data is process 0's."""
        path = self._files[f"{part_name(candidate.step, self.process)}.{candidate.attempt}"]
        data = read_header(path).data
        arrays = read_part(path, abstract)
        self.newest = candidate.step
        state = [arrays[f"{_OPTIMIZER}{name}"] for name in flatten(optimizer)]
        return Restored(
            candidate.step,
            {name.removeprefix(_MODEL): x for name, x in arrays.items() if name.startswith(_MODEL)},
            jax.tree.unflatten(jax.tree.structure(optimizer), state),
            exchange(data if self.process == 0 else None)[0],
        )

    # Saving

    def save(
        self, step: int, model: Mapping[str, Any], optimizer: Any, data: Mapping[str, Any]
    ) -> None:
        """Begins to save, and returns when the arrays are copied to host memory.

        A thread writes and sends them. If that fails in any process, a warning says so, and the
        previous local checkpoint stays.
        """
        self.wait()
        arrays = _flat(model, optimizer)
        header = Header(
            self.run,
            self.location,
            self.attempt,
            step,
            self.process,
            self.processes,
            self.mesh,
            layout_of(arrays),
            dict(data),
        )
        shards = host_copies(arrays)
        self._saves += 1
        # A daemon: a run need not wait at its end for something the next start can do without.
        self._thread = threading.Thread(
            target=self._finish, args=(header, shards), name=f"local checkpoint {step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last save is complete on all hosts, or has failed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def finish(self) -> None:
        """Deletes the run's local checkpoints, once it has ended and `run_dir` has its last one."""
        self.wait()
        exchange(None)  # nobody reads them any more
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process's folder may still be there
            self.folder.parent.rmdir()
        self.newest = None
        if self.process == 0:
            self._write_record(step=None, begun=None)

    def _finish(self, header: Header, shards: Iterator[np.ndarray]) -> None:
        """The thread's work: writes this process's part and copies those it keeps for others."""
        problems = [_problem(self._write, header, shards)]
        if self.processes > 1:
            try:
                problems = self._with_others(header.step, problems[0])
            except Exception:  # of the cluster: it ends the run, and the loop says so
                return
        self._conclude(header.step, [problem for problem in problems if problem])

    def _write(self, header: Header, shards: Iterator[np.ndarray]) -> None:
        if self.process == 0:
            with contextlib.suppress(OSError):  # of the run's folder, as in `_conclude`
                self._write_record(begun=header.step)
            self.before()
        _make(self.folder)
        path = self.folder / part_name(header.step, self.process)
        write_part(path, header, shards)
        self._files[key_of(header)] = path

    def _with_others(self, step: int, problem: str) -> list[str]:
        """Copies the parts that this process keeps for others; returns the problems of all."""
        keys = f"longstripe/local/{self.attempt}/{self._saves}"
        client().key_value_set(f"{keys}/written/{self.process}", problem or _GOOD)
        for part in kept_for(self.process, self.hosts.names):
            written = client().blocking_key_value_get(f"{keys}/written/{part}", WAIT_MILLISECONDS)
            if written == _GOOD and not problem:
                problem = _problem(self._fetch, part, step, part, self.attempt)
        client().key_value_set(f"{keys}/done/{self.process}", problem or _GOOD)
        client().wait_at_barrier(f"{keys}/whole", timeout_in_ms=WAIT_MILLISECONDS)
        results = [text for _, text in client().key_value_dir_get(f"{keys}/done/")]
        if self.process == 0:  # all have read the previous save's
            client().key_value_delete(f"longstripe/local/{self.attempt}/{self._saves - 1}")
        return ["" if text == _GOOD else text for text in results]

    def _conclude(self, step: int, problems: list[str]) -> None:
        """Deletes what is no longer needed: older checkpoints, or this one if it failed."""
        if problems:
            self._delete(lambda header: header.step == step and header.attempt == self.attempt)
            if self._warned != problems[0]:
                self._warned = problems[0]
                self._say(
                    f"the local checkpoint of step {step} could not be saved: {'; '.join(problems)}"
                )
            return
        self._delete(lambda header: header.step != step or header.attempt != self.attempt)
        self._delete_elsewhere()
        self.newest = step
        if self.process == 0:
            with contextlib.suppress(OSError):  # of the run's folder, which the loop hits too
                self._write_record(step=step)

    def _delete(self, unneeded: Callable[[Header], bool]) -> None:
        """Deletes parts in this process's folder."""
        for path in self.folder.glob("step_*"):
            with contextlib.suppress(OSError):
                try:
                    delete = unneeded(read_header(path))
                except DamagedError:
                    delete = True
                if delete:
                    path.unlink()
        for key in [key for key, path in self._files.items() if not path.exists()]:
            del self._files[key]

    def _delete_elsewhere(self) -> None:
        """Deletes what earlier starts, with other process numbers, left in this run's other folders
        here; other processes of this start may write there."""
        for path in (self.root / self.run).glob("process_*/step_*"):
            with contextlib.suppress(OSError, DamagedError):
                if path.parent != self.folder and path.stat().st_mtime < self._begun:
                    path.unlink()

    def _write_record(self, **changes: int | None) -> None:
        """Writes `local.json`: what it says of this run, its place, and the changes."""
        record = read_record(self.run_folder)
        if record.get("run") != self.run:
            record = {"run": self.run, "step": None}
        written = {**record, **place_of(self.run_folder, self.location), **changes}
        replace_file(self.run_folder / RECORD, (json.dumps(written) + "\n").encode())


def _problem(work: Callable[..., None], *arguments: Any) -> str:
    """Runs a part of a save; returns why it failed, "" if it did not."""
    try:
        work(*arguments)
    except Exception as error:  # whatever it is, training continues without this checkpoint
        return str(error) or type(error).__name__
    return ""


def _flat(model: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Returns both trees' arrays by name."""
    return {
        **{f"{_MODEL}{name}": x for name, x in model.items()},
        **{f"{_OPTIMIZER}{name}": x for name, x in flatten(optimizer).items()},
    }


def _make(folder: Path) -> None:
    """Makes a folder that only this user reads: it will hold the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)


def _described(mesh: Mesh) -> str:
    """Returns a short text: a mesh's axes, and which process each device belongs to."""
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    owners = [device.process_index for device in mesh.devices.flat]
    order = " ".join(f"{owner}x{len(list(run))}" for owner, run in itertools.groupby(owners))
    if len(order) > _LONGEST_ORDER:
        order = hashlib.sha256(order.encode()).hexdigest()[:16]
    return f"{axes or 'one device'}; processes {order}"
