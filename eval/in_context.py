"""In-context reinforcement learning: plays several episodes in one context and scores each.

    python -m eval.in_context --checkpoint DIR [--episodes 8] [--seeds 5] --output DIR

The model acts in the simulator, sees its earlier episodes and their rewards, and is asked for the
best return in its data, or for --target. Its keys and values stay in a cache split over the devices
of --sequence (model/cache.py). Writes results.json and in_context.png into --output. Returns are
sums of rewards over all simulator steps of an episode.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from data import printable
from data.errors import UserError
from data.outputs import PICTURE, PICTURE_METADATA, output_files, write_text
from data.progress import ProgressBar
from data.trajectories.options import TrajectoryConfig
from data.trajectories.rows import ACTION, RETURN_TO_GO, REWARD, STATE, Scales
from data.untrusted_files import read_json
from eval.scoring import bootstrap
from trainer import entry
from trainer.options import AtLeastOne, AtLeastZero, Finite, StorePath, option, parser_of

VIDEO = b"Longstripe"  # the comment of a GIF


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    checkpoint: StorePath = option("checkpoint or run folder of a trajectory model")
    episodes: AtLeastOne = option(
        "number of consecutive episodes (default 8); a new context begins after as many as in "
        "training",
        8,
    )
    seeds: AtLeastOne = option("number of parallel environments, with different seeds", 5)
    first_seed: AtLeastZero = option("seed of the first environment", 1000)
    target: Finite | None = option("requested return (default: the best in the data)", None)
    output: str = option("folder for results.json and in_context.png")
    attention: AtLeastZero = option(
        "environments, from the first, for which to print how much attention the last episode's "
        "states pay to each episode of their context",
        0,
    )
    video: bool = option("also record the last episode of the first environment, as a GIF")
    fsdp: AtLeastOne = option("number of devices along fsdp; divides --seeds", 1)
    sequence: AtLeastOne = option("number of devices along sequence", 1)
    simulate: AtLeastZero = option("simulate this many devices on the CPU; 0 uses the machine's", 0)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = parser_of(Options)
    args = parser.parse_args(argv)
    for name in ("seeds", "attention"):
        if (count := getattr(args, name)) % args.fsdp:
            parser.error(f"--{name}: {count} is not a multiple of --fsdp {args.fsdp}")
    if args.first_seed + args.seeds > 2**32:
        parser.error(
            f"--first-seed: found {args.first_seed}; with --seeds {args.seeds}, 0 to "
            f"{2**32 - args.seeds} works"
        )
    if args.attention > args.seeds:
        parser.error(f"--attention: found {args.attention}; 0 to --seeds, {args.seeds}, works")
    return args


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a checkpoint's model, as written by `trainer.trajectories`.

    Attributes:
      task: its name; observation, action: sizes of a state and an action.
      target: the requested return; best, mean: of all episodes in the data.
    """

    task: str
    observation: int
    action: int
    options: TrajectoryConfig
    scales: Scales
    target: float
    best: float
    mean: float

    @classmethod
    def read(cls, assets: Path) -> Inputs:
        """Reads the assets of a checkpoint.

        Raises:
          UserError: it is not a trajectory model.
        """
        from trainer.trajectories import ASSET

        if not (assets / ASSET).exists():
            raise UserError(
                f"--checkpoint: {assets.parent} has no trajectory model; a checkpoint of a "
                "recipe with a section trajectories would work"
            )
        fields = read_json(assets / ASSET, assets.parent)
        sizes, scales, data = fields["sizes"], fields["scales"], fields["data"]
        return cls(
            fields["task"],
            sizes["observation"],
            sizes["action"],
            TrajectoryConfig(**fields["options"]),
            Scales(np.array(scales["mean"]), np.array(scales["std"]), scales["return_scale"]),
            fields["target_return"],
            data["best"],
            data["mean"],
        )


class Agent:
    """Chooses actions for B environments at once, and remembers their results.

    Attributes:
      decisions: per episode; a context holds `inputs.options.in_context` episodes.
    """

    def __init__(self, model: Any, params: dict, inputs: Inputs, rows: int, decisions: int) -> None:
        from model.agentic import AgenticTransformer
        from model.cache import CachedModel

        self.params, self.inputs, self.rows = params, inputs, rows
        self.width = model.sizes.width
        conditioned = inputs.options.conditioning == "return"
        # Appended before each decision: the last one's result, then the next one's inputs.
        self.kinds = (ACTION, REWARD, RETURN_TO_GO, STATE) if conditioned else (ACTION, STATE)
        capacity = inputs.options.in_context * decisions * len(self.kinds) + len(self.kinds)
        # A decision's tokens are few.
        self.cached = CachedModel(
            model, AgenticTransformer.local_actions, rows, capacity, dense=len(self.kinds)
        )
        self.begin_context()

    def begin_context(self) -> None:
        """Forgets everything."""
        self.cache = self.cached.empty()
        self.length = 0
        self.seen: list[tuple[Float32[np.ndarray, "B n W"], list[int]]] = []  # tokens and kinds
        self.last: dict[int, Float[np.ndarray, "B n"]] = {}

    def act(
        self, observation: Float32[np.ndarray, "B O"], to_go: Float[np.ndarray, " B"]
    ) -> Float32[np.ndarray, "B A"]:
        """Returns the next actions, in -1 .. 1.

        Args:
          to_go: the remaining requested return.
        """
        numbers = {
            **self.last,
            STATE: self.inputs.scales.state(observation),
            RETURN_TO_GO: to_go[:, None] / self.inputs.scales.return_scale,
        }
        values = np.zeros((self.rows, len(self.kinds), self.width), np.float32)
        is_kept = np.zeros(len(self.kinds), np.int32)
        for i, kind in enumerate(self.kinds):
            if kind in numbers:
                values[:, i, : numbers[kind].shape[1]] = numbers[kind]
                is_kept[i] = 1
        kept = np.flatnonzero(is_kept)
        self.seen.append((values[:, kept], [self.kinds[i] for i in kept]))
        index = self.length - 1 + np.cumsum(is_kept)
        self.length += int(is_kept.sum())

        def of_rows(x):
            return np.broadcast_to(np.asarray(x, np.int32), (self.rows, len(self.kinds)))

        batch = {
            "values": values,
            "kinds": of_rows(self.kinds),
            "index": of_rows(np.maximum(index, 0)),
            "segment_ids": of_rows(is_kept),
        }
        self.cache, actions = self.cached.extend(self.params, self.cache, batch)
        return np.asarray(actions)[:, -1]

    def remember(
        self, action: Float[np.ndarray, "B A"], reward: Float[np.ndarray, " B"], reached: np.ndarray
    ) -> None:
        """Keeps the results of the last actions for the next call of `act`.

        Args:
          reached: bool [B], whether an episode has ended with at least the target return.
        """
        self.last = {
            ACTION: action * self.inputs.options.see_actions,
            REWARD: np.stack([reward, reached], 1),
        }


def play(
    agent: Agent, environments: list[Any], target: float, decisions: int, on_step: Any = None
) -> Float[np.ndarray, " B"]:
    """Plays one episode in each environment and returns their returns.

    Args:
      on_step: called after every decision, before the environments step.
    """
    from data.trajectories.tasks import flatten_observation

    repeat = agent.inputs.options.action_repeat
    observation = np.stack(
        [flatten_observation(environment.reset().observation) for environment in environments]
    )
    returns = np.zeros(len(environments))
    for decision in range(decisions):
        action = np.clip(agent.act(observation, target - returns), -1, 1)
        rewards = np.zeros(len(environments))
        for i, environment in enumerate(environments):
            for _ in range(repeat):
                time_step = environment.step(action[i])
                rewards[i] += time_step.reward or 0.0
                if time_step.last():
                    break
            observation[i] = flatten_observation(time_step.observation)
        returns += rewards
        agent.remember(action, rewards, (returns >= target) & (decision == decisions - 1))
        if on_step is not None:
            on_step()
    return returns


def attention_by_episode(
    agent: Agent, rows: int, decisions: int
) -> Float[np.ndarray, "layers episodes"]:
    """Returns the share of attention that the states of the context's last episode pay to each
    episode, float32: the mean over heads and the first `rows` environments. Each layer's shares sum
    to 1.

    Args:
      agent: after its last complete episode.
      rows: a multiple of the mesh's data x fsdp.
      decisions: per episode.
    """
    from model.attention_mass import attention_mass

    kinds = np.array([kind for _, kinds in agent.seen for kind in kinds], np.int32)
    values = np.concatenate([values[:rows] for values, _ in agent.seen], 1)
    index = np.arange(len(kinds), dtype=np.int32)
    episode = index // (decisions * len(agent.kinds))
    model = agent.cached.model
    padding = -len(kinds) % model.mesh.shape["sequence"]

    def padded_rows(x: np.ndarray, fill: int) -> np.ndarray:
        return np.tile(np.pad(x, (0, padding), constant_values=fill), (rows, 1))

    batch = {
        "values": np.pad(values, ((0, 0), (0, padding), (0, 0))),
        "kinds": padded_rows(kinds, STATE),
        "index": np.tile(np.arange(len(kinds) + padding, dtype=np.int32), (rows, 1)),
        "positions": padded_rows(index, 0),
        "segment_ids": padded_rows(np.ones_like(kinds), 0),
    }
    group = padded_rows(episode, -1)
    query_mask = padded_rows((kinds == STATE) & (episode == episode[-1]), 0)
    shares = attention_mass(model, agent.params, batch, group, int(episode[-1]) + 1, query_mask)
    return np.asarray(shares)


def summary(returns: Float[np.ndarray, "seeds episodes"]) -> dict[str, dict[str, Any]]:
    """Returns mean and interval over the seeds of the last, best and mean episode; a single seed
    has no interval.

    The best of n alone would hide whether later episodes are better than earlier ones.
    """
    scores = {"last": returns[:, -1], "best": returns.max(1), "mean": returns.mean(1)}
    return {
        name: {
            "mean": float(values.mean()),
            "interval": bootstrap(values) if len(values) > 1 else None,
            "by_seed": values.tolist(),
        }
        for name, values in scores.items()
    }


def _open_agent(args: argparse.Namespace, assets: Path, inputs: Inputs, decisions: int) -> Agent:
    """Returns an agent with a checkpoint's model, on the mesh of the command line."""
    from model.agentic import TrajectorySizes
    from trainer.build import build_agentic
    from trainer.checkpoint.readers import restore_model
    from trainer.config.schema import AttentionConfig, MeshConfig, ModelConfig, RunConfig
    from trainer.huggingface.assets import trained_mask
    from trainer.mesh import make_mesh
    from trainer.trajectories import stored_shape

    mask = trained_mask(assets)
    run = RunConfig(
        model=ModelConfig(compute_dtype="float32"),
        attention=AttentionConfig(window=mask.window, global_tokens=mask.global_tokens),
    )
    mesh = make_mesh(MeshConfig(fsdp=args.fsdp, sequence=args.sequence))
    sizes = TrajectorySizes(inputs.observation, inputs.action, inputs.options.components)
    model = build_agentic(run, stored_shape(assets), mesh, sizes, ())
    shapes = {name: parameter.shape for name, parameter in model.parameters.items()}
    params = restore_model(assets.parent, model.shardings, dtype="float32", shapes=shapes)
    return Agent(model, params, inputs, args.seeds, decisions)


def warn_beyond_trained(options: TrajectoryConfig, episodes: int, decisions: int) -> None:
    """Warns if contexts of these whole episodes are longer than training's, of cut ones."""
    trained = options.in_context * (options.decisions or decisions)
    played = min(episodes, options.in_context) * decisions
    if played > trained:
        each = options.tokens_per_decision
        print(
            f"warning: contexts have up to {played * each:,} tokens here, and {trained * each:,} "
            f"in training (trajectories.decisions {options.decisions}): how the model acts beyond "
            "was not trained",
            file=sys.stderr,
            flush=True,
        )


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Plays all episodes and returns the content of results.json."""
    markers = {"results.json": b'"returns"', "in_context.png": PICTURE, "episode.gif": VIDEO}
    output_files(args.output, markers)
    from data.trajectories.tasks import get_task, make_environment
    from trainer.checkpoint.readers import assets_dir
    from trainer.mesh import simulate

    if args.simulate:
        simulate(args.simulate)
    entry.keep_compiled()
    assets = assets_dir(args.checkpoint)
    inputs = Inputs.read(assets)
    if args.target is not None and inputs.options.conditioning == "none":
        raise UserError(
            f"--target: found {args.target:g}, and this model takes no return (trajectories."
            "conditioning none); without it, the episodes would be the same"
        )
    task = get_task(inputs.task)
    decisions = task.episode_steps // inputs.options.action_repeat
    target = inputs.target if args.target is None else args.target
    warn_beyond_trained(inputs.options, args.episodes, decisions)
    agent = _open_agent(args, assets, inputs, decisions)
    environments = [make_environment(task, args.first_seed + i) for i in range(args.seeds)]
    returns = np.zeros((args.seeds, args.episodes))
    with ProgressBar(f"playing {task.name}", args.episodes * decisions, "decisions") as bar:
        for episode in range(args.episodes):
            if episode % inputs.options.in_context == 0:
                agent.begin_context()
            returns[:, episode] = play(agent, environments, target, decisions, bar.advance)
    results = {
        "checkpoint": str(args.checkpoint),
        "task": inputs.task,
        "in_context": inputs.options.in_context,
        "conditioning": inputs.options.conditioning,
        "action_repeat": inputs.options.action_repeat,
        "target": target,
        "first_seed": args.first_seed,
        "data_best": inputs.best,
        "data_mean": inputs.mean,
        "returns": returns.tolist(),
        "scores": summary(returns),
    }
    if args.attention:
        results["attention"] = attention_by_episode(agent, args.attention, decisions).tolist()
    write(results, Path(args.output))
    if args.video:
        record(agent, environments, target, decisions, Path(args.output))
    return results


def write(results: dict[str, Any], folder: Path) -> None:
    """Writes results.json and the plot, and prints a table."""
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    plot(results, folder / "in_context.png")
    returns = np.array(results["returns"])
    seeds, episodes = returns.shape
    table = printable.plain_table(
        f"{results['task']}: returns over {seeds} seeds, {episodes} episodes each"
    )
    for name in ("episode", "return", "95% interval"):
        table.add_column(name, justify="right")
    for name, score in results["scores"].items():
        interval = "{:.1f} to {:.1f}".format(*score["interval"]) if score["interval"] else "none"
        table.add_row(name, f"{score['mean']:.1f}", interval)
    table.add_row("best in the data", f"{results['data_best']:.1f}", "")
    table.add_row("mean of the data", f"{results['data_mean']:.1f}", "")
    printable.console().print(table)
    if "attention" in results:
        print_attention(np.array(results["attention"]))
    print(f"wrote {folder}/results.json and in_context.png")


def print_attention(shares: Float[np.ndarray, "layers episodes"]) -> None:
    """Prints the attention that a context's last episode pays to each episode."""
    table = printable.plain_table("attention of the context's last episode, by episode, %")
    for name in ("episode", *(f"layer {number + 1}" for number in range(len(shares))), "mean"):
        table.add_column(name, justify="right")
    for number, of_layers in enumerate(shares.T, 1):
        numbers = (*of_layers, of_layers.mean())
        table.add_row(str(number), *(f"{100 * share:.1f}" for share in numbers))
    printable.console().print(table)


def plot(results: dict[str, Any], path: Path) -> None:
    """Plots the return by episode, with the data's best and mean."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    returns = np.array(results["returns"])
    episodes = np.arange(1, returns.shape[1] + 1)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(episodes, returns.T, color="0.8", linewidth=0.8)
    label = "the only seed"
    if len(returns) > 1:
        label = f"mean of {len(returns)} seeds, 95% interval"
        intervals = np.array([bootstrap(of_episode) for of_episode in returns.T])
        axes.fill_between(episodes, intervals[:, 0], intervals[:, 1], alpha=0.25)
    axes.plot(episodes, returns.mean(0), marker="o", label=label)
    axes.axhline(results["data_best"], color="tab:green", linestyle="--", label="best in the data")
    axes.axhline(results["data_mean"], color="tab:red", linestyle=":", label="mean of the data")
    axes.set(
        xlabel="episode",
        ylabel="return",
        title=f"{results['task']}, {results['in_context']} episodes in a context",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # all numbers of 32 would overlap
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, metadata=PICTURE_METADATA)


def record(
    agent: Agent, environments: list[Any], target: float, decisions: int, folder: Path
) -> None:
    """Plays one more episode and records the first environment in episode.gif, if possible."""
    frames: list[np.ndarray] = []
    try:
        environments[0].physics.render(height=8, width=8, camera_id=0)
    except Exception as error:  # whatever a missing driver raises
        print(
            f"no video: the simulator cannot render here ({str(error).splitlines()[0][:80]}); "
            "MUJOCO_GL=egl or osmesa would work if its library is installed"
        )
        return
    if agent.length + decisions * len(agent.kinds) > agent.cached.capacity:
        agent.begin_context()
    play(
        agent,
        environments,
        target,
        decisions,
        lambda: frames.append(environments[0].physics.render(height=240, width=320, camera_id=0)),
    )
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(
        folder / "episode.gif",
        save_all=True,
        append_images=images[1:],
        duration=40,
        loop=0,
        comment=VIDEO,
    )
    print(f"wrote {folder}/episode.gif")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = parse(argv)
    return entry.run(lambda: evaluate(args), args.output)


if __name__ == "__main__":
    entry.leave(main())
