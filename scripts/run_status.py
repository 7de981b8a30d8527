"""Shows a run's state in one screen: python -m scripts.run_status RUN | TRAIN_OPTIONS

RUN is a run's folder, local or in a bucket; TRAIN_OPTIONS are train.py's, such as --config
configs/NAME.yaml. Only the run's small files are read. With --checkpoint only the newest
checkpoint's step is printed, for launchers.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from data.errors import UserError, is_refusal, is_transient
from data.untrusted_files import check_within, parse_json
from trainer import entry
from trainer.options import AboveZero, command, option, other_words
from trainer.reporting.rows import is_number

EARLIER_STAGES = "stages"  # as in trainer.run.directory, which imports JAX
LAST_BYTES = 65536  # of metrics.jsonl: far more than the last line


class Status(NamedTuple):
    """The state of a run's folder; times are seconds since the epoch."""

    checkpoint: int | None
    saved: float | None
    metrics: dict[str, Any] | None
    logged: float | None
    local: int | None = None
    """The newest step on the hosts' own disks or memory (checkpoint.local)."""
    stage: int | None = None
    """The stage described here, from 1; None for a run without earlier stages."""
    earlier: int = 0
    """The steps of the stages before it."""

    @property
    def reached(self) -> int | None:
        """The newest step from which a start may continue, counting those of earlier stages."""
        steps = [step for step in (self.checkpoint, self.local) if step is not None]
        return self.earlier + max(steps, default=0) if steps or self.earlier else None


NOTHING = Status(None, None, None, None)


def read_status(run: str) -> Status:
    """Returns the status of a run's folder, any part of which may be absent; for a run with stages,
    that of the last stage begun."""
    from data.paths import open_file_system

    if _lacks_library(run):
        return _last_stage(list(map(_without_times, [*_stages_in_bucket(run), run])))
    with open_file_system(run) as (system, folder):
        system.invalidate_cache()  # a launcher asks again and again
        stages = f"{folder}/{EARLIER_STAGES}"
        folders = [*(f"{stages}/{number}" for number in _numbers_in(system, stages)), folder]
        return _last_stage([_status_in(system, path) for path in folders])


def _lacks_library(run: str) -> bool:
    """Returns whether a run is in a store whose library is not installed: s3:// without s3fs."""
    import fsspec

    try:
        fsspec.get_filesystem_class(run.partition("://")[0] if "://" in run else "file")
    except ImportError:
        return True
    except ValueError:  # not a store, which opening it says
        pass
    return False


def _has_begun(run: str) -> bool:
    """Returns whether a folder has a run's configuration, or its first stage's."""
    from data.paths import is_file, open_file_system

    names = ("config.yaml", f"{EARLIER_STAGES}/1/config.yaml")
    if _lacks_library(run):
        from trainer.run.bucket import Bucket

        return any(Bucket(run).version(name).content is not None for name in names)
    with open_file_system(run) as (system, folder):
        return any(is_file(system, f"{folder}/{name}") for name in names)


def _numbers_in(system: Any, folder: str) -> list[int]:
    """Returns the numbers among a folder's names, in order."""
    return _numbers(name.rstrip("/").rpartition("/")[2] for name in _paths_in(system, folder))


def _paths_in(system: Any, path: str) -> list[str]:
    """Returns the paths in a folder, or a file's own; none if there is neither.

    fsspec's isdir() would also return False when a store refuses or does not answer.
    """
    try:
        return system.ls(path, detail=False)
    except (FileNotFoundError, NotADirectoryError) as error:
        if is_refusal(error) or is_transient(error):
            raise
        return []


def _numbers(names: Iterable[str]) -> list[int]:
    """Returns the numbers among names, in order."""
    return sorted({int(name) for name in names if re.fullmatch(r"\d+", name)})


def _last_stage(stages: list[Status]) -> Status:
    """Returns the status of a run's last stage that has begun."""
    begun = [i for i, stage in enumerate(stages) if stage.metrics or stage.reached is not None]
    if len(stages) == 1 or not begun:
        return stages[-1]
    earlier = sum(stage.reached or 0 for stage in stages[: begun[-1]])
    return stages[begun[-1]]._replace(stage=begun[-1] + 1, earlier=earlier)


def _status_in(system: Any, folder: str) -> Status:
    """Returns the status of one folder of a file system."""
    from data.paths import is_file

    # Only a manifest makes a folder a checkpoint.
    steps = [
        step
        for step in _numbers_in(system, f"{folder}/checkpoints")
        if is_file(system, f"{folder}/checkpoints/{step}/manifest.json")
    ]
    newest = max(steps, default=None)
    saved = (
        None
        if newest is None
        else _modified(system, f"{folder}/checkpoints/{newest}/manifest.json")
    )
    metrics, logged, path = None, None, f"{folder}/metrics.jsonl"
    path = max(_paths_in(system, path), default=path)  # of a run in a bucket the newest part
    if "file" in system.protocol:
        check_within(folder, path)  # refuses a pipe too
    if is_file(system, path):
        lines = (
            system.cat_file(path, start=-min(LAST_BYTES, system.size(path)))
            .decode(errors="replace")
            .splitlines()
        )
        metrics = next((row for line in reversed(lines) if (row := _row(line))), None)
        logged = _modified(system, path)
    return Status(newest, saved, metrics, logged, _local_step(system, folder))


def _local_step(system: Any, folder: str) -> int | None:
    """Returns the newest local checkpoint's step, if the run has one."""
    from data.paths import is_file

    path = f"{folder}/local.json"
    if "file" in system.protocol:
        check_within(folder, path)
    if not is_file(system, path):
        return None
    return _step_in(system.cat_file(path, end=LAST_BYTES))


def _step_in(record: bytes | None) -> int | None:
    """Returns the step in a run's local.json."""
    row = _row((record or b"").decode(errors="replace"))
    return row["step"] if row and isinstance(row["step"], int) else None


def _stages_in_bucket(run: str) -> list[str]:
    """Returns the folders of a run's earlier stages in a bucket."""
    from trainer.run.bucket import Bucket

    names = Bucket(run).names(f"{EARLIER_STAGES}/")
    numbers = _numbers(name.split("/")[1] for name in names)
    return [f"{run.rstrip('/')}/{EARLIER_STAGES}/{number}" for number in numbers]


def _without_times(run: str) -> Status:
    """Returns the status of a run in a bucket, read by TensorStore, which reports no times."""
    from trainer.checkpoint.commit import CHECKPOINTS, located, steps_in
    from trainer.run.bucket import Bucket
    from trainer.run.logs import logs_and_others

    bucket = Bucket(run)
    logs, _ = logs_and_others(bucket.read_all("metrics.jsonl/"))
    _, content = logs.get("metrics.jsonl", (0, b""))
    rows = (_row(line.decode(errors="replace")) for line in reversed(content.splitlines()))
    steps = steps_in(located(f"{run.rstrip('/')}/{CHECKPOINTS}"))
    local = _step_in(bucket.version("local.json").content)
    return Status(max(steps, default=None), None, next(filter(None, rows), None), None, local)


def _modified(system: Any, path: str) -> float | None:
    """Returns a file's modification time, if its file system reports it."""
    try:
        return system.modified(path).timestamp()
    except (NotImplementedError, KeyError):
        return None


def _row(line: str) -> dict[str, Any] | None:
    """Returns a line's row; None for an incomplete line."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def describe(run: str, status: Status, now: float, price_per_hour: float | None = None) -> str:
    """Returns the screen's text."""
    metrics, lines = status.metrics or {}, [f"run          {run}"]
    if status.stage is not None:
        lines.append(f"stage        {status.stage}, after {status.earlier} steps of earlier ones")
    if metrics:
        lines.append(f"step         {metrics['step']}, {_age(status.logged, now)}")
        if is_number(loss := metrics.get("loss_nats_per_target")):
            lines.append(f"loss         {loss:.4f} nats per target")
        if is_number(rate := metrics.get("tokens_per_second")):
            lines.append(f"speed        {rate:,.0f} tokens/s")
    else:
        lines.append("step         none logged yet")
    lines.append(
        "checkpoint   "
        + (
            "none yet"
            if status.checkpoint is None
            else f"{status.checkpoint}, {_age(status.saved, now)}"
        )
    )
    if status.local is not None:
        lines.append(f"local        {status.local}, on the hosts themselves (checkpoint.local)")
    if price_per_hour is not None and is_number(seconds := metrics.get("wall_seconds")):
        lines.append(
            f"cost         {seconds / 3600 * price_per_hour:,.2f} for {seconds / 3600:.1f} hours "
            "of training; idle time is billed too"
        )
    return "\n".join(lines)


def _age(moment: float | None, now: float) -> str:
    if moment is None:
        return "of unknown age"
    seconds = max(0, round(now - moment))
    return (
        f"{seconds} s ago"
        if seconds < 120
        else f"{seconds // 60} min ago"
        if seconds < 7200
        else f"{seconds // 3600} h ago"
    )


def run_folder(words: list[str]) -> str:
    """Returns the run's folder named by train.py's options or given as `words`."""
    if len(words) == 1 and not words[0].startswith("--"):
        return words[0]
    from trainer.config import load as configuration

    config = configuration.load(words)
    return config.run_dir if config.run_dir and "://" in config.run_dir else str(config.folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    price_per_hour: AboveZero | None = option(
        "for all machines together: prints the cost so far", None, metavar="P"
    )
    checkpoint: bool = option(
        "print only the newest checkpoint's step, or nothing; includes local checkpoints and the "
        "steps of earlier stages"
    )
    words: tuple[str, ...] = other_words("RUN | TRAIN_OPTIONS")


def work(args: Options) -> None:
    """Prints the status."""
    if not args.words:
        raise UserError("no run was named; pass its folder, or train.py's options")
    run = run_folder(list(args.words))
    status = read_status(run)
    is_named = [run] == list(args.words)  # a recipe's run may not have begun
    if is_named and not args.checkpoint and status == NOTHING and not _has_begun(run):
        raise UserError(
            f"{run}: not a run (config.yaml is missing); a folder written by train.py would work"
        )
    if args.checkpoint:
        print("" if status.reached is None else status.reached)
    else:
        print(describe(run, status, time.time(), args.price_per_hour))


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
