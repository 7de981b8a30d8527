"""Prepares episodes once: checked, with one task's rewards, in array_record files in RLDS form."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from data import paths
from data.errors import UserError
from data.folders import building, check_files, file_hash, read_or_warn, record_files
from data.progress import ProgressBar
from data.record_store import open_records, readable, write_records
from data.untrusted_files import check_tree, read_json

from .episodes import Episode, episode_files, episode_return, read_episode
from .tasks import Task, get_task, relabel

INDEX = "index.npz"
EPISODES = "episodes"
RULES = 1
"""Version of the preparation rules; a new one prepares episodes again."""


@dataclasses.dataclass(frozen=True)
class PreparedTrajectories:
    """The episodes of a task, read at random.

    Attributes:
      folder: holds them; key: a hash of the files' contents and the task, which names the folder.
      returns: of each episode; lengths: its simulator steps.
      dropped: the reason for each file left out.
      copies: how many have the states and actions of an earlier one; 0 for folders that do not say.
    """

    folder: Path
    returns: Float64[np.ndarray, " n"]
    lengths: Int64[np.ndarray, " n"]
    dropped: tuple[str, ...]
    copies: int = 0

    @property
    def key(self) -> str:
        """The name of the folder."""
        return self.folder.name

    def __len__(self) -> int:
        return len(self.returns)

    @cached_property
    def _records(self) -> Any:
        return open_records(self.folder, EPISODES)

    def episode(self, number: int) -> Episode:
        """Returns an episode, from 0.

        Raises:
          UserError: the folder was damaged after it was opened.
        """
        with readable(self.folder, "an episode"):
            steps = self._records[number]["steps"]
        return Episode(*(np.asarray(steps[name]) for name in Episode._fields))

    @property
    def report(self) -> str:
        """The number of episodes, the spread of their returns, and what was left out."""
        quartiles = np.quantile(self.returns, [0, 0.25, 0.5, 0.75, 1])
        text = (
            f"{len(self)} episodes of {self.lengths.min()} to {self.lengths.max()} steps; returns: "
            f"least {quartiles[0]:.1f}, quartiles {quartiles[1]:.1f} {quartiles[2]:.1f} "
            f"{quartiles[3]:.1f}, best {quartiles[4]:.1f}, mean {self.returns.mean():.1f}"
        )
        if self.copies:
            text += (
                f"\n{self.copies} episodes have the states and actions of others, so held-out ones "
                "may be among the trained; tasks collected with another --seed have none"
            )
        if self.dropped:
            text += f"\n{len(self.dropped)} files left out:\n" + "\n".join(
                f"  {reason}" for reason in self.dropped[:10]
            )
        return text


def prepare_trajectories(
    path: str | Path,
    task_name: str,
    prepared: str | Path,
    progress: bool = False,
    key: str | None = None,
) -> PreparedTrajectories:
    """Returns the episodes below `path`, preparing them into `prepared` if necessary.

    Rewards are the task's: recomputed from the stored states unless the folder says that they are
    this task's.

    Args:
      prepared: parent of the prepared folders. If it is in a store (gs://, s3://), the folder is
        made and read in the local cache, and copied to or from the store.
      progress: shows a progress bar.
      key: the folder's name, if another process has prepared it: then no episode is read.

    Raises:
      UserError: no task of this name, no episode, or none that can be used; or there is no folder
        of the name `key`.
    """
    task = get_task(task_name)
    files = [] if key else episode_files(paths.expanded(path), task)
    name = key or f"trajectories-{_key(files, task)}"
    folder, shared = paths.local_folder(prepared) / name, f"{str(prepared).rstrip('/')}/{name}"
    stored = read_or_warn(folder, INDEX, _read)
    if stored is None and paths.is_remote(prepared):
        paths.download(shared, folder, INDEX, _is_whole)
        stored = read_or_warn(folder, INDEX, _read)
    if stored is None and key:
        raise UserError(
            f"{shared}: not found on this machine, but another process has prepared it; a "
            "data.prepared that all processes share would work"
        )
    if stored is None:
        _build(files, task, folder, progress)
    if paths.is_remote(prepared) and not key:
        paths.upload_missing(folder, shared, INDEX)
    return stored or _read(folder)


def _read(folder: Path) -> PreparedTrajectories:
    """Reads a prepared folder, not all of it; raises UserError if it looks damaged."""
    try:
        check_tree(folder)
        with np.load(folder / INDEX) as index:
            check_files(folder, json.loads(str(index["files"])))
            dropped = read_json(folder / "dropped.json")
            copies = int(index["copies"]) if "copies" in index else 0
            return PreparedTrajectories(
                folder, index["returns"], index["lengths"], tuple(dropped), copies
            )
    except (PermissionError, UserError):
        raise
    except Exception as error:  # zipfile, zlib, numpy and json raise a dozen different types
        raise UserError(
            f"{folder}: {INDEX} is damaged ({str(error) or type(error).__name__})"
        ) from error


def _is_whole(folder: Path) -> bool:
    try:
        _read(folder)
    except UserError:
        return False
    return True


def _key(files: list[Path], task: Task) -> str:
    digest = hashlib.sha256(f"{RULES} {task.name}".encode())
    for file in files:
        digest.update(file.name.encode())
        if file.is_file():  # anything else is left out, and counted
            digest.update(bytes.fromhex(file_hash(file)))
        digest.update(_recorded_task(file).encode())
    return digest.hexdigest()[:20]


def read_with_rewards(file: Path, task: Task) -> Episode:
    """Reads an episode with the task's rewards: the file's if its folder says that they are this
    task's, or else recomputed from the stored states.

    Raises:
      UserError: see `read_episode`.
    """
    episode = read_episode(file, task)
    if _recorded_task(file) == task.name:
        return episode
    return episode._replace(reward=relabel(task, episode.physics, episode.action))


def _recorded_task(file: Path) -> str:
    """Returns the task of a file's rewards, according to its folder; "" if unknown."""
    about = file.parent.parent / "collected.json"
    try:
        return str(read_json(about, about.parent)["task"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _build(files: list[Path], task: Task, folder: Path, progress: bool) -> None:
    """Prepares the episodes; if another process was faster, its folder is kept."""
    returns: list[float] = []
    lengths: list[int] = []
    dropped: list[str] = []
    contents: set[bytes] = set()

    def episodes() -> Iterator[dict[str, Any]]:
        for file in files:
            bar.advance()
            try:
                episode = read_with_rewards(file, task)
            except UserError as error:
                dropped.append(str(error))
                continue
            returns.append(episode_return(episode.reward))
            lengths.append(len(episode.reward) - 1)
            # Without rewards, which another task has from the same seeds.
            played = episode.observation.tobytes() + episode.action.tobytes()
            contents.add(hashlib.sha256(played).digest())
            yield {
                "steps": episode._asdict() | _borders(episode),
                "file": "/".join(file.parts[-4:]),
            }
        if not returns:
            raise UserError(
                f"{files[0].parent}: none of {len(files)} episodes can be used; the first: "
                f"{dropped[0]}"
            )

    bar = ProgressBar(f"preparing {task.name}", len(files), "episodes", progress)
    with building(folder, _is_whole) as temporary, bar:
        write_records(
            temporary, EPISODES, functools.partial(_features, task), episodes, name="trajectories"
        )
        (temporary / "dropped.json").write_text(json.dumps(dropped, indent=1), encoding="utf-8")
        np.savez(
            temporary / INDEX,
            returns=np.array(returns),
            lengths=np.array(lengths),
            copies=np.array(len(returns) - len(contents)),
            files=np.array(json.dumps(record_files(temporary, ["dropped.json", EPISODES]))),
        )


def _borders(episode: Episode) -> dict[str, Bool[np.ndarray, " T+1"]]:
    """Returns RLDS's flags; the last step is terminal if its discount is 0, not by time-out."""
    number = np.arange(len(episode.reward))
    is_last = number == number[-1]
    return {
        "is_first": number == 0,
        "is_last": is_last,
        "is_terminal": is_last & (episode.discount == 0),
    }


def _features(task: Task, tfds: ModuleType) -> dict[str, Any]:
    """Fields of a stored episode in RLDS: each field of `steps` has a leading time dimension.

    As in ExoRL's files a step's action, reward and discount are those that led to its observation;
    RLDS itself has those that follow. Older folders under the same key lack the flags is_first,
    is_last and is_terminal, which `PreparedTrajectories` does not need.
    """

    def array(dtype, *shape, **options):
        return tfds.features.Tensor(shape=(None, *shape), dtype=dtype, **options)

    steps = {
        "observation": array(np.float32, task.observation_size),
        "action": array(np.float32, task.action_size),
        "reward": array(np.float32),
        "discount": array(np.float32),
        "physics": array(np.float64, None, encoding="zlib"),
        **{name: array(np.bool_) for name in ("is_first", "is_last", "is_terminal")},
    }
    return {"steps": steps, "file": tfds.features.Text()}
