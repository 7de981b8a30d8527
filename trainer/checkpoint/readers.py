"""Finds checkpoints by users' paths, and reads them for evaluations, exports and new runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import tensorstore

from trainer.checkpoint.arrays import open_arrays
from trainer.checkpoint.commit import CHECKPOINTS, MANIFEST
from trainer.checkpoint.fetch import MODEL, local_copy
from trainer.checkpoint.items import data_of, require_item, restore_item, stored_item
from trainer.checkpoint.manifest import ForeignError, reading
from trainer.checkpoint.store import CheckpointStore, problem_in_any

# Files of models in other formats -> what they are, and what would work.
_OTHER_FORMATS = {
    "consolidated*.pth": "is Meta's own format; the copy in Hugging Face's, with config.json",
    "consolidated*.safetensors": "is Mistral's own format; the same model's config.json and "
    "model*.safetensors",
    "*.gguf": "is llama.cpp's format, which is not read; the model it was made of",
    "model*.safetensors": "needs the config.json and tokenizer of its model beside it, which",
}


def find_checkpoint(path: str | Path, items: Sequence[str] = ()) -> Path:
    """The checkpoint folder at `path`; for a run folder the newest good one, for RUN/best the best
    one.

    Args:
      items: the items to verify of a checkpoint at `path`. One in a run folder is verified
        completely.

    Raises:
      ForeignError: the folder is neither; the message says what it is, if known.
      DamagedError: a verified file has changed.
    """
    path = best_or_itself(local_copy(path).absolute())
    if not path.is_dir():
        raise ForeignError(f"{path}: no such folder")
    if (path / MANIFEST).exists():
        if items and (problem := problem_in_any(path, items)):
            with reading(path):
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
            f"{path}: an unfinished checkpoint; its run's folder leads to the last good one"
        )
    if (path / "config.json").exists():
        raise ForeignError(
            f"{path}: a Hugging Face folder, not a checkpoint; python -m scripts.import_hf makes "
            "one of it"
        )
    # Such as an output folder of transformers' Trainer, or of peft for adapters with names.
    kinds = ("adapter_config.json", "config.json")
    inside = sorted({file.parent.name for kind in kinds for file in path.glob(f"*/{kind}")})
    raise ForeignError(
        f"{path}: no {MANIFEST} (a checkpoint), no {CHECKPOINTS}/ (a run), no config.json (a "
        "Hugging Face model) and no adapter_config.json (an adapter) is in this folder"
        + (f"; {path / inside[0]} has one and may work" if inside else _other_format(path))
    )


def _other_format(folder: Path) -> str:
    """What a folder has of another format, for a message; "" if nothing known."""
    for pattern, kind in _OTHER_FORMATS.items():
        if found := sorted(folder.glob(pattern)):
            return f"; {found[0].name} {kind} would work"
    return ""


def best_or_itself(path: Path) -> Path:
    """RUN/best as the folder of the run's best checkpoint by its metric `checkpoint.best`; other
    paths unchanged.

    Raises:
      ForeignError: the run has no best checkpoint.
    """
    run = path.parent
    if path.name != "best" or path.exists() or not (run / CHECKPOINTS).is_dir():
        return path
    best = (read_data(run) or {}).get("best") or {}
    if best.get("step") is None:
        raise ForeignError(
            f"{path}: this run has no best checkpoint; checkpoint.best names the metric for one"
        )
    return CheckpointStore(run).path(best["step"])


def assets_dir(path: str | Path) -> Path:
    """The verified assets folder of the checkpoint or run at `path`; errors as in
    `find_checkpoint`."""
    return find_checkpoint(path, ["assets"]) / "assets"


def read_data(path: str | Path) -> dict[str, Any] | None:
    """The item `data` of the checkpoint at `path`; None if it has none."""
    return data_of(find_checkpoint(path))


def restore_model(
    path: str | Path,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    *,
    dtype: Any = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    verified: bool = False,
) -> dict[str, Any]:
    """Restores only the parameters, of a checkpoint or a run's newest good one: for evaluation and
    export, which never read moments.

    Args:
      shardings: by name; None for numpy arrays on the host.
      dtype: to cast the arrays to: by name, or one for all; None keeps the stored dtypes.
      shapes: by name, if parameters are padded for another mesh than that of the save.
      verified: the checkpoint has been compared with its manifest already.

    Raises:
      ForeignError, DamagedError: as in `find_checkpoint`.
      TransientError: the checkpoint is removed meanwhile.
      ValueError: names the parameter whose name or shape differs.
    """
    folder = find_checkpoint(path, [] if verified else ["model", "assets"])
    with reading(folder):
        params = restore_item(folder, "model", _abstract_model(folder, shardings, shapes))
    if dtype is None:
        return params
    return {
        name: value.astype(dtype[name] if isinstance(dtype, Mapping) else dtype)
        for name, value in params.items()
    }


def _abstract_model(
    folder: Path,
    shardings: Mapping[str, jax.sharding.Sharding] | None,
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> dict[str, Any]:
    """Parameter name -> its shape, stored dtype and sharding; arguments as in `restore_model`."""
    stored = stored_item(folder, "model")
    wanted = dict.fromkeys(stored) if shardings is None else shardings
    for name in stored:
        if name not in wanted:
            raise ValueError(
                f"{folder}: parameter {name} is in the checkpoint, but not in the requested model"
            )
    for name in wanted:
        if name not in stored:
            raise ValueError(f"{folder}: parameter {name} is not in the checkpoint")
    return {
        name: jax.ShapeDtypeStruct(
            x.shape if shapes is None else shapes[name], x.dtype, sharding=wanted[name]
        )
        for name, x in stored.items()
    }


def stored_parameters(
    path: str | Path, *, verified: bool = False
) -> dict[str, tensorstore.TensorStore]:
    """`stored_arrays` of the parameters, for exports, which need one layer's tensor at a time."""
    return stored_arrays(path, "model", verified=verified)


def stored_average(path: str | Path) -> dict[str, tensorstore.TensorStore]:
    """`stored_arrays` of the trained parameters' moving average (optimizer.average_decay), by
    parameter name.

    Raises:
      ForeignError: the checkpoint holds none; others as in `find_checkpoint`.
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

    Errors as in `find_checkpoint`.
    """
    folder = find_checkpoint(path, [] if verified else [item, "assets"])
    require_item(folder, item)
    return open_arrays(folder, item)
