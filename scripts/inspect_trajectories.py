"""Shows the episodes in a folder: number per algorithm, spread of returns, skipped files.

    python -m scripts.inspect_trajectories trajectories/exorl --task walker_walk --plot returns.png

Returns are for the given task: rewards of episodes collected for another task of the domain are
recomputed from their states, which takes a fraction of a second each. Coverage is the share of a
grid's cells that an algorithm's states visit; the grid spans the two directions of greatest
variance of all states.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from data import printable
from data.errors import UserError
from data.outputs import PICTURE, PICTURE_METADATA, output_file, write_text
from data.trajectories.builder import read_with_rewards
from data.trajectories.episodes import episode_files, episode_return
from data.trajectories.tasks import TASKS, Task, get_task
from trainer import entry
from trainer.options import command, option

QUANTILES = {"min": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "max": 1.0}
BINS = 40
TABLE_WIDTH = 100  # characters
CELLS = 40  # cells of the coverage grid along each of its two directions
EVERY = 10  # steps between two states that count for the coverage
NAMED = 10  # skipped files that are printed by name


def spread(returns: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Returns the number of episodes, the quantiles of their returns, and the mean."""
    quantiles = np.quantile(returns, list(QUANTILES.values())).tolist()
    return {
        "episodes": len(returns),
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "mean": float(returns.mean()),
    }


class Contents(NamedTuple):
    """A folder's episodes.

    Attributes:
      returns: the returns of each algorithm's episodes.
      states: every EVERYth state of each algorithm.
      left_out: the reason for each skipped file.
    """

    returns: dict[str, Float[np.ndarray, " n"]]
    states: dict[str, Float[np.ndarray, "m O"]]
    left_out: list[str]


def read_contents(files: Sequence[Path], task: Task) -> Contents:
    """Reads the episodes, with the task's rewards."""
    from rich.progress import track

    returns: dict[str, list[float]] = {}
    states: dict[str, list[np.ndarray]] = {}
    left_out = []
    for file in track(files, f"reading {task.name}", console=printable.console(), transient=True):
        algorithm = file.parent.parent.name if file.parent.name == "buffer" else file.parent.name
        try:
            episode = read_with_rewards(file, task)
        except UserError as error:
            left_out.append(str(error))
            continue
        returns.setdefault(algorithm, []).append(episode_return(episode.reward))
        states.setdefault(algorithm, []).append(episode.observation[::EVERY])
    return Contents(
        {algorithm: np.array(values) for algorithm, values in returns.items()},
        {algorithm: np.concatenate(parts) for algorithm, parts in states.items()},
        left_out,
    )


def visits(states: Mapping[str, Float[np.ndarray, "m O"]]) -> dict[str, Int[np.ndarray, "C C"]]:
    """Returns how many states of each algorithm are in each cell of one grid.

    The grid spans all states along the first two principal components of the standardized states,
    without the outermost 1% along each.
    """
    every = np.concatenate(list(states.values())).astype(np.float64)
    mean, std = every.mean(0), every.std(0)
    std = np.where(std < 1e-6, 1.0, std)
    standardized = (every - mean) / std
    _, _, directions = np.linalg.svd(standardized.T @ standardized)  # even of a single state
    planes = {name: (values - mean) / std @ directions[:2].T for name, values in states.items()}
    spread = np.quantile(np.concatenate(list(planes.values())), [0.005, 0.995], axis=0).T
    edges = [np.linspace(low, max(high, low + 1e-6), CELLS + 1) for low, high in spread]
    return {
        name: np.histogram2d(plane[:, 0], plane[:, 1], bins=edges)[0].astype(int)
        for name, plane in planes.items()
    }


def draw_coverage(task: Task, counts: Mapping[str, Int[np.ndarray, "C C"]], path: Path) -> None:
    """Draws each algorithm's visits, with one colour scale."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + 3.0 * len(counts), 3.4), layout="constrained")
    panels = figure.subplots(1, len(counts), sharex=True, sharey=True, squeeze=False)[0]
    most = max(int(count.max()) for count in counts.values())
    for axes, (algorithm, count) in zip(panels, counts.items(), strict=True):
        shown = np.ma.masked_equal(count.T, 0)
        image = axes.pcolormesh(shown, norm=LogNorm(1, max(most, 2)))
        axes.set_title(f"{algorithm}: {share(count):.0%} of the cells", fontsize="small")
        axes.set(xticks=[], yticks=[], xlabel="first component")
    panels[0].set_ylabel("second component")
    figure.colorbar(image, ax=panels, label=f"states of {task.domain}")
    figure.savefig(path, dpi=120, metadata=PICTURE_METADATA)


def share(count: Int[np.ndarray, "C C"]) -> float:
    """Returns the share of cells with a state."""
    return float((count > 0).mean())


def show(
    task: Task, algorithms: Mapping[str, Mapping[str, float]], left_out: Sequence[str]
) -> None:
    """Prints the table, and the skipped files."""
    table = printable.plain_table(f"returns of {task.name}")
    table.add_column("algorithm")
    for column in ("episodes", *QUANTILES, "mean"):
        table.add_column(column, justify="right")
    for algorithm, numbers in algorithms.items():
        table.add_row(
            algorithm,
            str(numbers["episodes"]),
            *(f"{numbers[name]:.1f}" for name in (*QUANTILES, "mean")),
        )
    # A narrow table would cut off long algorithm names.
    console = printable.console(highlight=False, width=max(printable.console().width, TABLE_WIDTH))
    console.print(table)
    if left_out:
        print(f"{len(left_out)} files skipped:")
        for reason in left_out[:NAMED]:
            print(f"  {reason}")
        if len(left_out) > NAMED:
            print(f"  and {len(left_out) - NAMED} more; --json lists all")


def draw(task: Task, returns: Mapping[str, Float[np.ndarray, " n"]], path: Path) -> None:
    """Draws a histogram of returns per algorithm, over a common axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 1.0 + 1.1 * len(returns)), layout="constrained")
    panels = figure.subplots(len(returns), 1, sharex=True, squeeze=False)[:, 0]
    ends = np.concatenate(list(returns.values()))
    bins = np.linspace(min(0.0, float(ends.min())), max(float(ends.max()), 1e-6), BINS + 1)
    for axes, (algorithm, values) in zip(panels, returns.items(), strict=True):
        axes.hist(values, bins=bins, color="tab:blue")
        axes.axvline(float(np.median(values)), color="black", linestyle="--", linewidth=1)
        axes.set_title(
            f"{algorithm}: {len(values)} episodes, median {np.median(values):.1f}",
            loc="left",
            fontsize="small",
        )
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"return of {task.name}")
    figure.supylabel("episodes", fontsize="medium")
    figure.savefig(path, dpi=120, metadata=PICTURE_METADATA)


def inspect(args: Options) -> dict[str, Any]:
    """Runs the command; returns the content that --json writes.

    Raises:
      UserError: the task is unknown, or no episode is usable.
    """
    task = get_task(args.task)
    outputs = [
        output_file(path, marker)
        for path, marker in (
            (args.plot, PICTURE),
            (args.coverage, PICTURE),
            (args.json, b'"algorithms"'),
        )
        if path
    ]
    files = episode_files(Path(args.path), task)
    returns, states, left_out = read_contents(files, task)
    if not returns:
        raise UserError(
            f"{args.path}: none of {len(files)} episodes is usable; the first: {left_out[0]}"
        )
    algorithms = {name: spread(values) for name, values in returns.items()}
    if len(returns) > 1:
        algorithms["all"] = spread(np.concatenate(list(returns.values())))
    show(task, algorithms, left_out)
    counts = visits(states)
    shares = {name: share(count) for name, count in counts.items()}
    print("coverage: " + ", ".join(f"{name} {part:.1%}" for name, part in shares.items()))
    result = {
        "path": str(args.path),
        "task": task.name,
        "algorithms": algorithms,
        "returns": {name: values.tolist() for name, values in returns.items()},
        "coverage": shares,
        "left_out": left_out,
    }
    if args.plot:
        draw(task, returns, Path(args.plot))
    if args.coverage:
        draw_coverage(task, counts, Path(args.coverage))
    if args.json:
        write_text(args.json, json.dumps(result, indent=2) + "\n")
    if outputs:
        print("wrote " + " and ".join(map(str, outputs)))
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    path: str = option(
        "folder with {domain}/{algorithm}/buffer/*.npz, or one such buffer", positional=True
    )
    task: str = option(f"one of {', '.join(TASKS)}")
    plot: str | None = option(
        "draw a histogram of each algorithm's returns to this file", None, metavar="FILE.png"
    )
    coverage: str | None = option(
        "draw which states each algorithm visits to this file", None, metavar="FILE.png"
    )
    json: str | None = option(
        "write the figures, every return and all skipped files to this file",
        None,
        metavar="FILE.json",
    )


main = command(Options, inspect, output="json")


if __name__ == "__main__":
    entry.leave(main())
