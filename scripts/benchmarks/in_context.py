"""Trains and evaluates in-context reinforcement learning: behaviour cloning of the best tenth, Decision Transformer, and
Agentic Transformer with 2, 8 and on the first task 4 episodes in a context, on episodes of scripts.collect_trajectories.

    python -m scripts.benchmarks.in_context --tasks cartpole_swingup walker_stand --data trajectories/collected

All see the same episodes, have the same parameters and take the same number of steps of 16 episodes each. Agentic Transformers
take the first 200 of their 500 steps with one episode in a context: with many from the start, they hardly learn in that time
(docs/notes/in_context.md). Whatever was finished is not done again: the same command goes on, in the middle of a training too.
Writes docs/results/in_context.json, a row for each task that is complete or in part, and docs/in_context.png.
"""
from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data.trajectories.tasks import TASKS, get_task
from scripts.benchmarks.results import ROOT, measured, row, save

EPISODES_IN_A_STEP = 16
STEPS, ALONE = 500, 200  # optimizer steps; the first of them, with one episode in a context
METHODS: dict[str, dict[str, float | int | str]] = {
    "BC-10%": {"in_context": 1, "conditioning": "none", "best": 0.1},
    "DT": {"in_context": 1},
    "AT, N = 2": {"in_context": 2},
    "AT, N = 4": {"in_context": 4},
    "AT, N = 8": {"in_context": 8},
}
FIRST_TASK_ONLY = "AT, N = 4"
BASELINES, LONGEST = ("BC-10%", "DT"), "AT, N = 8"
# Ring Attention, Table 5: BC-10%, DT, AT with 32 and with 128 trajectories, on ExoRL's data and with 350M parameters.
PAPER = {
    "walker_stand": (52.91, 34.54, 95.45, 98.23), "walker_run": (34.81, 49.82, 105.88, 110.45),
    "walker_walk": (13.53, 34.94, 78.56, 78.95), "cheetah_run": (34.66, 67.53, 178.75, 181.34),
    "jaco_reach_top_left": (23.95, 18.64, 87.56, 89.51), "cartpole_swingup": (56.82, 67.56, 120.56, 123.45),
}
DEPENDS_ON = ("data/trajectories/*.py", "model/agentic.py", "model/cache.py", "trainer/trajectories.py", "eval/in_context.py",
              "configs/trajectories/*.yaml")


def run_one(task: str, method: str, args: argparse.Namespace) -> dict:
    """Trains and evaluates one method on one task, unless that is done; returns what eval.in_context wrote."""
    options = METHODS[method]
    name = "".join(letter if letter.isalnum() else "_" for letter in method.lower())
    folder = Path(args.output) / task / name
    results = folder / "in_context" / "results.json"
    if not results.exists():
        in_context = int(options["in_context"])
        tokens = (4 if options.get("conditioning") is None else 2) * get_task(task).episode_steps // 5
        train = ["train.py", "--config", f"configs/trajectories/{task}.yaml", "--run_dir", str(folder),
                 "--trajectories.path", args.data, "--data.prepared", str(Path(args.output) / "prepared"),
                 "--data.context_length", str(in_context * tokens), "--train.batch_size", str(EPISODES_IN_A_STEP // in_context),
                 "--train.steps", str(STEPS), "--stages", json.dumps(stages(in_context, tokens)),
                 *(text for field, value in options.items() for text in (f"--trajectories.{field}", str(value)))]
        if in_context > 1:
            take_first_stage(folder)
        start = time.time()
        for command in (train, ["-m", "eval.in_context", "--checkpoint", str(folder), "--output", str(results.parent)]):
            print("$ python " + " ".join(command), flush=True)
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        (folder / "seconds.json").write_text(json.dumps(time.time() - start))
    return json.loads(results.read_text(encoding="utf-8"))


def stages(in_context: int, tokens: int) -> list[dict[str, int]]:
    """Returns the stages of a training: one episode in a context, then `in_context`; none where that is one.

    Args:
      tokens: of an episode.
    """
    if in_context == 1:
        return []
    return [{"context_length": tokens, "steps": ALONE, "batch_size": EPISODES_IN_A_STEP, "in_context": 1},
            {"context_length": tokens * in_context, "steps": STEPS - ALONE, "batch_size": EPISODES_IN_A_STEP // in_context,
             "in_context": in_context}]


def take_first_stage(folder: Path) -> None:
    """Copies the finished first stage of another method of the same task, which is the same run for all."""
    target = folder / "stages" / "1"
    finished = [run / "stages" / "1" for run in sorted(folder.parent.iterdir())
                if (run / "in_context" / "results.json").exists() and (run / "stages" / "1").exists()]
    if finished and not target.exists():
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(finished[0], partial)
        partial.rename(target)


def save_result(found: dict[str, dict[str, dict]], command: str) -> None:
    """Writes the result of the tasks that are there; half a table is saved as half a table."""
    rows, lines = {}, []
    for task, methods in found.items():
        scores = {method: result["scores"]["last"] for method, result in methods.items()}
        text = "; ".join(f"{method.replace('AT, N =', 'AT')} {score['mean']:.0f}" for method, score in scores.items())
        held = None
        if set(scores) >= {*BASELINES, LONGEST}:
            held = all(scores[LONGEST]["interval"][0] > scores[method]["interval"][1] for method in BASELINES)
        data = next(iter(methods.values()))
        rows[task] = row(f"{task}, last of 8 episodes", text, "N = 8 above both baselines", held)
        for method, result in methods.items():
            three = ["{mean:.1f} ({interval[0]:.1f} to {interval[1]:.1f})".format(**result["scores"][name])
                     for name in ("last", "best", "mean")]
            lines.append([task, method, *three, f"{data['data_best']:.1f}", f"{data['data_mean']:.1f}"])
    paper = [[task, *(f"{value:.2f}" for value in values)] for task, values in PAPER.items()]
    columns = ["task", "method", "last", "best of 8", "mean of 8", "best in data", "mean of data"]
    tables = {"returns, mean of 5 seeds, and 95% bootstrap intervals": {"columns": columns, "rows": lines},
              "Ring Attention, Table 5: other data, other sizes, not comparable as numbers": {
                  "columns": ["task", "BC-10%", "DT", "AT, 32 trajectories", "AT, 128 trajectories"], "rows": paper}}
    save("in_context", measured("In-context reinforcement learning on episodes collected with dm_control", rows, command,
                                DEPENDS_ON, tables=tables, note="docs/notes/in_context.md"))


def plot(found: dict[str, dict[str, dict]], path: Path) -> None:
    """Draws the return against the number of the episode, a panel for each task."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, panels = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.6), layout="constrained", squeeze=False)
    for axes, (task, methods) in zip(panels[0], found.items(), strict=True):
        for method, result in methods.items():
            returns = np.array(result["returns"])
            axes.plot(np.arange(1, returns.shape[1] + 1), returns.mean(0), marker="o", markersize=3, label=method)
        axes.axhline(result["data_best"], color="0.4", linestyle="--", label="best in the data")
        axes.axhline(result["data_mean"], color="0.4", linestyle=":", label="mean of the data")
        axes.set(title=task, xlabel="episode", ylabel="return")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the tasks one after the other, and saves after each method."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.in_context", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD",
                        help=f"out of {', '.join(map(repr, METHODS))} (default all)")
    parser.add_argument("--data", default="trajectories/collected", help="output of scripts.collect_trajectories")
    parser.add_argument("--output", default="runs/in_context", help="folder of the runs (default runs/in_context)")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, dict]] = {}
    for task in args.tasks:
        for method in args.methods:
            if method == FIRST_TASK_ONLY and task != args.tasks[0]:
                continue
            result = run_one(task, method, args)
            found.setdefault(task, {})[method] = result
            save_result(found, f"python -m scripts.benchmarks.in_context --tasks {' '.join(found)}")
    plot(found, ROOT / "docs" / "in_context.png")


if __name__ == "__main__":
    main()
