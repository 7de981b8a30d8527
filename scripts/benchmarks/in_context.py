"""Trains and evaluates in-context reinforcement learning on collected episodes.

The methods are behaviour cloning of the best tenth, Decision Transformer, and
Agentic Transformer with 2, 8 and on the first task 4 episodes in a context, on episodes of
scripts.collect_trajectories.

    python -m scripts.benchmarks.in_context --tasks cartpole_swingup --data trajectories/collected

All see the same episodes, have the same parameters and take the same number of steps of 16 episodes
each. Agentic Transformers learn the actions of a context's last episode, the best one, and take
their first steps with one episode in a context: with many from the start, they hardly learn in that
time (docs/notes/in_context.md). The same command continues after an interruption, also within a
training. Adds each method of each task to docs/results/in_context.json.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
import sys
from pathlib import Path

from data.errors import UserError
from data.trajectories.tasks import TASKS, get_task
from scripts.benchmarks.commands import identifier, python, read_json, training_seconds
from scripts.benchmarks.results import commit, load, renew, row
from trainer.options import command, option

NAME = "in_context"
EPISODES_IN_A_STEP = 16
STEPS = 2000  # optimizer steps
EVALUATION_SEEDS = 20  # five, tried first, left intervals of a third of the mean
TRAINING_SEEDS = 3  # on the first task
METHODS: dict[str, dict[str, float | int | str]] = {
    "BC-10%": {"in_context": 1, "conditioning": "none", "best": 0.1},
    "DT": {"in_context": 1},
    "AT, N = 2": {"in_context": 2, "loss_on": "last"},
    "AT, N = 4": {"in_context": 4, "loss_on": "last"},
    "AT, N = 8": {"in_context": 8, "loss_on": "last"},
}
FIRST_TASK = "cartpole_swingup"
FIRST_TASK_ONLY = "AT, N = 4"
BASELINES, LONGEST = ("BC-10%", "DT"), "AT, N = 8"
SCORES = "returns, mean over evaluation seeds, and 95% bootstrap intervals"
EPISODES = "return of each episode, mean over evaluation seeds"
SEEDS = "last of 8 episodes, three training seeds"
LINE = ["task", "method", "steps"]  # identify a line of a table
TABLES = {
    SCORES: [
        *LINE,
        "last",
        "best of 8",
        "mean of 8",
        "best in data",
        "mean of data",
        "seeds",
        "minutes",
    ],
    EPISODES: [*LINE, *map(str, range(1, 9))],
    SEEDS: [*LINE, *(f"seed {seed}" for seed in range(TRAINING_SEEDS))],
}
RECIPE = "configs/trajectories/walker_walk.yaml"  # whose task is replaced


def run_one(task: str, method: str, seed: int, args: Options) -> dict:
    """Trains and evaluates one method on one task unless done; returns eval.in_context's result.

    A finished training is evaluated again if more seeds are requested.
    """
    options = METHODS[method]
    folder = Path(args.output) / f"{args.steps}_steps" / task / f"{identifier(method)}_seed_{seed}"
    results = folder / "in_context" / "results.json"
    if not results.exists():
        in_context = int(options["in_context"])
        tokens = (
            (4 if options.get("conditioning") is None else 2) * get_task(task).episode_steps // 5
        )
        if in_context > 1:
            take_first_stage(folder, seed)
        python(
            f"train.py --config {RECIPE} --name {task} --trajectories.task {task} "
            "--run_dir {run} --trajectories.path {data} --data.prepared {prepared} "
            f"--data.context_length {in_context * tokens} "
            f"--train.batch_size {EPISODES_IN_A_STEP // in_context} --train.steps {args.steps} "
            f"--stages {{stages}} --model.seed {seed} --data.seed {seed} "
            + " ".join(f"--trajectories.{field} {value}" for field, value in options.items()),
            run=folder,
            data=args.data,
            prepared=Path(args.output) / "prepared",
            stages=json.dumps(stages(in_context, tokens, args.steps)),
        )
    if not results.exists() or len(read_json(results)["returns"]) < args.seeds:
        python(
            f"-m eval.in_context --checkpoint {{run}} --output {{output}} --seeds {args.seeds}",
            run=folder,
            output=results.parent,
        )
    return read_json(results) | {"minutes": training_seconds(folder) / 60}


def stages(in_context: int, tokens: int, steps: int) -> list[dict[str, int]]:
    """Returns a training's stages: one episode per context, then `in_context`; none if that is one.

    Args:
      tokens: of an episode; steps: of the whole training.
    """
    alone = min(2 * steps // 5, 500)
    if in_context == 1:
        return []
    return [
        {
            "context_length": tokens,
            "steps": alone,
            "batch_size": EPISODES_IN_A_STEP,
            "in_context": 1,
        },
        {
            "context_length": tokens * in_context,
            "steps": steps - alone,
            "batch_size": EPISODES_IN_A_STEP // in_context,
            "in_context": in_context,
        },
    ]


def take_first_stage(folder: Path, seed: int) -> None:
    """Copies another method's first stage with the same task and seed: an identical run."""
    target = folder / "stages" / "1"
    finished = [
        run / "stages" / "1"
        for run in sorted(folder.parent.glob(f"*_seed_{seed}"))
        if (run / "in_context" / "results.json").exists() and (run / "stages" / "1").exists()
    ]
    if finished and not target.exists():
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(finished[0], partial)
        partial.rename(target)


def save_result(results: dict[tuple[str, str, int], list[dict]], command: str) -> None:
    """Stores the results of some methods, and keeps other methods' results.

    Args:
      results: (task, method, steps) -> eval.in_context's result for each training seed.
    """
    stored, stored_rows = load(NAME).tables, load(NAME).rows
    measured_now = {(task, method, str(steps)) for task, method, steps in results}
    tables = {
        title: {
            "columns": columns,
            "rows": [
                line
                for line in stored.get(title, {}).get("rows", [])
                if tuple(line[:3]) not in measured_now
            ],
        }
        for title, columns in TABLES.items()
    }
    for (task, method, steps), by_seed in results.items():
        _add_lines(tables, [task, method, str(steps)], by_seed)
    for table in tables.values():
        table["rows"].sort(
            key=lambda line: (
                list(TASKS).index(line[0]),
                int(line[2]),
                list(METHODS).index(line[1]),
            )
        )
    rows = {
        task: _task_row(task, lines)
        for task in TASKS
        if (lines := [line for line in tables[SCORES]["rows"] if line[0] == task])
    }
    for task in set(rows) & set(stored_rows) - {task for task, _, _ in results}:
        rows[task].update({key: stored_rows[task][key] for key in ("date", "commit")})
    tables = {title: table for title, table in tables.items() if table["rows"]}
    renew(NAME, rows, command=command, tables=tables)


def _task_row(task: str, lines: list[list[str]]) -> dict[str, str]:
    """Returns a task's row: its methods at the largest number of steps, by SCORES."""
    steps = max((line[2] for line in lines), key=int)
    scores = {line[1]: line[3] for line in lines if line[2] == steps}
    text = "; ".join(
        f"{method.replace('AT, N =', 'AT')} {float(score.split()[0]):.0f}"
        for method, score in scores.items()
    )
    held = None
    if set(scores) >= {*BASELINES, LONGEST}:
        held = all(
            _interval(scores[LONGEST])[0] > _interval(scores[method])[1] for method in BASELINES
        )
    return row(
        f"{task}: return of the last of 8 episodes after {steps} training steps",
        text,
        "AT 8 above BC-10% and DT, by intervals",
        held,
        date=datetime.date.today().isoformat(),
        commit=commit(),
    )


def _interval(score: str) -> tuple[float, float]:
    """Returns the ends of "mean (low to high)"."""
    low, high = score.partition("(")[2].rstrip(")").split(" to ")
    return float(low), float(high)


def _add_lines(tables: dict[str, dict[str, list]], line: list[str], by_seed: list[dict]) -> None:
    """Adds a method's line to each of the TABLES; `line` holds task, method and steps."""
    first = by_seed[0]
    three = [
        "{mean:.1f} ({interval[0]:.1f} to {interval[1]:.1f})".format(**first["scores"][name])
        for name in ("last", "best", "mean")
    ]
    tables[SCORES]["rows"].append(
        [
            *line,
            *three,
            f"{first['data_best']:.1f}",
            f"{first['data_mean']:.1f}",
            str(len(first["returns"])),
            f"{first['minutes']:.1f}",
        ]
    )
    episodes = [sum(column) / len(column) for column in zip(*first["returns"], strict=True)]
    tables[EPISODES]["rows"].append([*line, *(f"{value:.1f}" for value in episodes)])
    if len(by_seed) == TRAINING_SEEDS:
        lasts = [f"{result['scores']['last']['mean']:.1f}" for result in by_seed]
        tables[SEEDS]["rows"].append([*line, *lasts])


def work(args: Options) -> None:
    """Measures task by task, and saves after each method."""
    if args.seeds < 2:
        raise UserError(f"--seeds: found {args.seeds}; intervals over seeds need at least 2")
    results: dict[tuple[str, str, int], list[dict]] = {}
    for task in args.tasks:
        for method in args.methods:
            if method == FIRST_TASK_ONLY and task != FIRST_TASK:
                continue
            seeds = range(TRAINING_SEEDS if task == FIRST_TASK and args.all_seeds else 1)
            results[task, method, args.steps] = [
                run_one(task, method, seed, args) for seed in seeds
            ]
            save_result(
                results,
                f"python -m scripts.benchmarks.in_context --tasks {' '.join(args.tasks)} --steps "
                f"{args.steps}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    tasks: tuple[str, ...] = option("tasks", tuple(TASKS), choices=TASKS)
    methods: tuple[str, ...] = option(
        f"methods out of {', '.join(map(repr, METHODS))} (default all)".replace("%", "%%"),
        tuple(METHODS),
        choices=METHODS,
        metavar="METHOD",
    )
    all_seeds: bool = option(f"train {FIRST_TASK} with {TRAINING_SEEDS} seeds")
    steps: int = option("optimizer steps", STEPS)
    seeds: int = option("seeds of the evaluation", EVALUATION_SEEDS)
    data: str = option("output of scripts.collect_trajectories", "trajectories/collected")
    output: str = option("folder of the runs", "runs/in_context")


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
