"""Episodes on disk, as in ExoRL: {domain}/{algorithm}/buffer/{time}_{index}_{length}.npz."""

import sys
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64

from data.compression import MOST_TIMES, most_unpacked
from data.errors import UserError
from data.folders import replacing
from data.untrusted_files import check_within

from .tasks import Task

# Errors of numpy and zipfile for damaged files; the last is for an unknown compression method.
DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    AttributeError,
    TypeError,
    NotImplementedError,
)


SEARCH_STATE = "search.npz"  # of a collection, beside its buffer
UNPACKING = ".unpacking"  # ends the name of a download's unfinished folder
LARGEST_ACTION = 1 + 1e-3  # actions are in -1 .. 1, but for another program's rounding


class Episode(NamedTuple):
    """An episode of T simulator steps. Row 0 is the reset, with meaningless action and reward; row
    t has the action that led to its observation, and its reward.

    Attributes:
      physics: the simulator's state, from which rewards of other tasks can be computed.
    """

    observation: Float32[np.ndarray, "T+1 O"]
    action: Float32[np.ndarray, "T+1 A"]
    reward: Float32[np.ndarray, " T+1"]
    discount: Float32[np.ndarray, " T+1"]
    physics: Float64[np.ndarray, "T+1 P"]


def episode_return(reward: Float32[np.ndarray, " T+1"]) -> float:
    """Returns the sum of an episode's rewards, without the first row's."""
    return float(np.sum(reward[1:], dtype=np.float64))


def read_episode(path: Path, task: Task) -> Episode:
    """Reads an episode of the task's domain.

    Raises:
      UserError: the file is damaged, or its arrays do not form such an episode.
    """
    arrays = _read_arrays(path)
    for name in ("reward", "discount"):
        arrays[name] = arrays[name].reshape(-1)
    _check_lengths(path, arrays)
    _check_sizes(path, arrays, task)
    _check_numbers(path, arrays)
    with np.errstate(over="ignore"):  # becomes infinite, and is refused
        episode = Episode(
            *(
                arrays[name].astype(np.float64 if name == "physics" else np.float32)
                for name in Episode._fields
            )
        )
    _check_values(path, episode)
    return episode


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an episode's file, unchecked."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            # Nothing is read from a file that unpacks to more than memory.
            unpacked = sum(member.file_size for member in stored.zip.infolist())
            if unpacked > most_unpacked(path.stat().st_size):
                raise UserError(
                    f"{path}: unpacks to more than {MOST_TIMES} times its size; an episode's own "
                    "arrays would work"
                )
            return {name: np.asarray(stored[name]) for name in Episode._fields}
    except KeyError as missing:
        raise UserError(
            f"{path}: has no array {missing.args[0].split()[0]}; needs {', '.join(Episode._fields)}"
        ) from None
    except DAMAGE:
        raise UserError(f"{path}: damaged, or not an .npz file of arrays") from None


def _check_lengths(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Raises UserError unless all arrays have one length, that of the file's name if it has one."""
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or min(lengths.values()) < 2:
        raise UserError(
            f"{path}: lengths are "
            f"{', '.join(f'{name} {length}' for name, length in lengths.items())}; all must be "
            "equal and at least 2"
        )
    promised = path.stem.rpartition("_")[2]
    if promised.isdigit() and int(promised) != lengths["reward"] - 1:
        raise UserError(f"{path}: has {lengths['reward'] - 1} steps, but its name says {promised}")


def _check_sizes(path: Path, arrays: dict[str, np.ndarray], task: Task) -> None:
    """Raises UserError unless states and actions have the sizes of the task's domain."""
    sizes = {
        "observation": task.observation_size,
        "action": task.action_size,
        "physics": task.physics_size,
    }
    for name, size in sizes.items():
        if arrays[name].shape[1:] != (size,):
            raise UserError(
                f"{path}: {name} has shape {arrays[name].shape[1:]}; {task.domain}'s is {(size,)}"
            )


def _check_numbers(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Raises UserError unless all arrays hold numbers."""
    for name, array in arrays.items():
        if array.dtype.kind not in "fiu":
            raise UserError(f"{path}: {name} holds {array.dtype}; numbers would work")


def _check_values(path: Path, episode: Episode) -> None:
    """Raises UserError unless all values with a meaning are finite, and actions in -1 .. 1."""
    for name, array in episode._asdict().items():
        # Those of the reset mean nothing.
        first = 1 if name in ("action", "reward", "discount") else 0
        if not np.isfinite(array[first:]).all():
            raise UserError(f"{path}: {name} holds values that are not finite numbers")
    if (most := float(np.abs(episode.action[1:]).max())) > LARGEST_ACTION:
        raise UserError(
            f"{path}: action holds values up to {most:g}; actions in -1 .. 1, which a model can "
            "predict, would work"
        )


def write_episode(folder: Path, name: str, index: int, episode: Episode) -> Path:
    """Writes {name}_{index}_{length}.npz atomically; returns its path."""
    path = folder / f"{name}_{index}_{len(episode.reward) - 1}.npz"
    with replacing(path) as scratch, scratch.open("wb") as file:
        np.savez_compressed(file, **episode._asdict())
    return path


def episode_files(root: Path, task: Task) -> list[Path]:
    """Returns the files below a folder that may be episodes of the task's domain, in a fixed order.

    Args:
      root: contains {domain}/{algorithm}/buffer, or is such a buffer.

    Raises:
      UserError: there are none, or one leads out of the folder.
    """
    files = sorted(root.glob(f"{task.domain}/*/buffer/*.npz")) or sorted(root.glob("*.npz"))
    if not files:
        raise UserError(
            f"{root}: found no episodes; needs {task.domain}/ALGORITHM/buffer/*.npz below it"
        )
    for file in files:
        check_within(root, file)
    if others := _others(root, files, task):
        print(
            f"warning: {len(others)} .npz files below {root} are not read, since they are not in "
            f"{task.domain}/ALGORITHM/buffer; the first: {others[0]}",
            file=sys.stderr,
            flush=True,
        )
    return files


def _others(root: Path, files: list[Path], task: Task) -> list[Path]:
    """Returns the folder's .npz files that are in no buffer, and were not written by a collection
    or an interrupted download."""
    found = {*root.glob("*.npz"), *(root / task.domain).rglob("*.npz")} - set(files)
    return sorted(
        file
        for file in found
        if file.name != SEARCH_STATE
        and not any(part.endswith(UNPACKING) for part in file.relative_to(root).parts)
    )
