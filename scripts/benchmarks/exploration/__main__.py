"""Trains and evaluates in-context reinforcement learning on an explorer's episodes.

    python -m scripts.benchmarks.exploration --data trajectories/exploration

A cell is a task, a protocol, a method and a training seed. Cells that are finished, or that another
such command is working on, are skipped, and interrupted cells continue, so any number of these
commands can share a folder, for example one per core. A task waits until its domain has 1,000
episodes. Writes docs/results/exploration.json after each cell, even if the table is incomplete, and
at the end docs/exploration.png; cells already in the result, from any machine, are not measured
again.

Everything below was chosen before any result was seen. CPU hours per cell, measured with cartpole
on one busy core of an AMD EPYC: BC-10% 0.3, DT 0.3, AT N = 4 0.4, N = 16 0.7, N = 32 0.6 (evaluated
by a later, faster program); all cells about 40, if the other tasks take as long. The result has
each cell's hours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
from collections.abc import Iterator
from pathlib import Path

from data.errors import TransientError, UserError
from data.folders import exclusive
from data.trajectories.tasks import TASKS, Task, get_task
from data.untrusted_files import read_json
from scripts.benchmarks.commands import python, write_json
from scripts.benchmarks.exploration.cells import (
    ATTENDING,
    EPISODES,
    EVALUATION_SEEDS,
    PAPER_RETURNS,
    PLAYED,
    PROTOCOLS,
    RECIPE,
    TRAININGS,
    Cell,
    Training,
    cells,
)
from scripts.benchmarks.exploration.table import Answer, draw_result, is_stored, save_result
from trainer import entry
from trainer.options import AtLeastOne, command, option


def action_repeat(data: Path, task: Task) -> int:
    """Returns the action repeat of a domain's episodes.

    Raises:
      UserError: the domain's folders differ.
    """
    repeats = {
        int(read_json(about, about.parent)["action_repeat"])
        for about in data.glob(f"{task.domain}/*/collected.json")
    }
    if len(repeats) != 1:
        raise UserError(
            f"--data: {data}/{task.domain} has action_repeat {sorted(repeats)}; expected one value"
        )
    return repeats.pop()


def has_episodes(data: Path, task: Task) -> bool:
    """Returns whether a domain's collection is finished."""
    return len(list(data.glob(f"{task.domain}/*/buffer/*.npz"))) >= EPISODES


def run_folder(cell: Cell, args: Options) -> Path:
    """Returns the folder of a cell's run; runs with a share of the steps have separate folders."""
    share = () if args.share == 1 else (f"{args.share:g}_of_the_steps",)
    return Path(args.output, *share, cell.name)


def is_measured(cell: Cell, args: Options) -> bool:
    """Returns whether all of a cell's evaluations are finished."""
    answers = (f"in_context_{number}/cpu.json" for number in range(len(cell.requests)))
    return all((run_folder(cell, args) / answer).exists() for answer in answers)


def measure(cell: Cell, args: Options) -> bool:
    """Trains and evaluates a cell; returns False if its episodes or its initial training are
    missing, or another process is working on it."""
    if not has_episodes(Path(args.data), get_task(cell.task)):
        return False
    try:
        train(cell, args)
        with locked(cell, args):
            for number in range(len(cell.requests)):
                evaluate(cell, number, args)
    except TransientError:
        return False
    return True


@contextlib.contextmanager
def locked(cell: Cell, args: Options) -> Iterator[Path]:
    """Yields the folder of a cell's run, locked against other processes.

    Raises:
      TransientError: another process holds the lock.
    """
    folder = run_folder(cell, args)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_suffix(".lock"), f"measures {folder.name}"):
        yield folder


def train(cell: Cell, args: Options) -> Path:
    """Trains a cell unless done, after its initial training; returns its folder."""
    training, task, data = TRAININGS[cell.method], get_task(cell.task), Path(args.data)
    fields = [*PROTOCOLS[cell.protocol], *training.options]
    repeat = action_repeat(data, task)
    tokens = (2 if "none" in fields else 4) * (task.episode_steps // repeat) * training.in_context
    fields += ["in_context", str(training.in_context), "action_repeat", str(repeat)]
    more = [
        f"--trajectories.{name} {value}"
        for name, value in zip(fields[::2], fields[1::2], strict=True)
    ]
    values = {"data": data.resolve(), "prepared": (Path(args.output) / "prepared").resolve()}
    if training.start:
        values["start"] = train(dataclasses.replace(cell, method=training.start), args)
        more += ["--model.path {start} --optimizer.learning_rate 5.0e-4"]
    if training.devices > 1:
        devices = training.devices
        more += [f"--mesh.sequence {devices} --mesh.simulate {devices} --attention.layout striped"]
    with locked(cell, args) as folder:
        if (folder / "trained.json").exists():
            return folder.resolve()
        seconds = timed(
            folder,
            f"train.py --config {RECIPE} --name {cell.task} --stages [] --run_dir {{run}} "
            "--trajectories.path {data} --data.prepared {prepared} "
            f"--trajectories.task {cell.task} --data.context_length {tokens} "
            f"--model.overrides.max_position_embeddings {tokens} "
            f"--train.batch_size {training.rows} --train.steps {steps(training, args)} "
            f"--checkpoint.every {max(10, training.steps // 10)} "
            f"--model.seed {cell.seed} --data.seed {cell.seed} " + " ".join(more),
            run=folder.resolve(),
            **values,
        )
        write_json(folder / "trained.json", {"cpu_seconds": seconds})
    return folder.resolve()


def steps(training: Training, args: Options) -> int:
    """Returns the optimizer steps of a training."""
    return max(2, round(training.steps * args.share))


def evaluate(cell: Cell, number: int, args: Options) -> None:
    """Plays a cell's model, unless done, conditioned on return `number` of its `requests`."""
    folder = run_folder(cell, args)
    answer = folder / f"in_context_{number}"
    if (answer / "cpu.json").exists():
        return
    options = f" --target {PAPER_RETURNS[cell.task]}" if number else ""
    if TRAININGS[cell.method].in_context > 1:
        options += f" --attention {ATTENDING}"
    seconds = timed(
        answer,
        "-m eval.in_context --checkpoint {run} --output {output} "
        f"--seeds {args.seeds} --episodes {args.episodes}" + options,
        run=folder.resolve(),
        output=answer.resolve(),
    )
    write_json(answer / "cpu.json", {"cpu_seconds": seconds})


def timed(folder: Path, text: str, **values: object) -> float:
    """Runs a command like `python`; returns its CPU seconds, including interrupted attempts.

    Args:
      folder: the seconds of interrupted attempts are stored next to it.
    """
    spent = folder.with_name(f"{folder.name}.spent.json")
    before = read_json(spent) if spent.exists() else 0.0
    begun = _children_seconds()
    try:
        python(text, **values)
    finally:
        total = before + _children_seconds() - begun
        write_json(spent, total)
    return total


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def work(args: Options) -> None:
    """Measures cell by cell, and saves after each, until no more cells can be measured."""
    text = "python -m scripts.benchmarks.exploration"  # wherever this machine keeps the episodes
    progress = True
    while progress:
        progress = False
        for cell in unmeasured(args):
            if not measure(cell, args):
                continue
            progress = True
            if args.share == 1:
                finished = {
                    other: answers_of(other, args) for other in cells() if is_measured(other, args)
                }
                with exclusive(Path(args.output) / "result.lock", "writes the result"):
                    save_result(finished, text)
    draw_result()
    left = len(unmeasured(args))
    print(
        f"{left} cells are left: they wait for {EPISODES} episodes of their domain, or another "
        "command is measuring them"
    )


def unmeasured(args: Options) -> list[Cell]:
    """Returns the cells that are neither in the folder of runs nor in the result."""
    return [
        cell
        for cell in cells(args.tasks)
        if not (is_measured(cell, args) or (args.share == 1 and is_stored(cell)))
    ]


def answers_of(cell: Cell, args: Options) -> list[Answer]:
    """Returns the results of a finished cell's evaluations."""
    folder = run_folder(cell, args)
    trained = read_json(folder / "trained.json")["cpu_seconds"]
    answers = []
    for number, request in enumerate(cell.requests):
        answer = folder / f"in_context_{number}"
        result = read_json(answer / "results.json")
        played = read_json(answer / "cpu.json")["cpu_seconds"]
        answers.append(Answer(request, result, (trained + played) / 3600))
    return answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    tasks: tuple[str, ...] = option("tasks", tuple(TASKS), choices=TASKS)
    data: str = option("output of scripts.collect_trajectories", "trajectories/exploration")
    output: str = option("folder of the runs", "runs/exploration")
    seeds: AtLeastOne = option("evaluation seeds", EVALUATION_SEEDS)
    episodes: AtLeastOne = option("consecutive evaluation episodes", PLAYED)
    share: float = option(
        "share of the steps to take; less than 1 tries the commands and saves no result", 1.0
    )


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
