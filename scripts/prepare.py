"""Prepares a run's data ahead of training, so that accelerators do not wait for it.

    python -m scripts.prepare --config RECIPE.yaml [--section.field value ...]
    python -m scripts.prepare --model.path MODEL --data.path DATA [--section.field value ...]
    python -m scripts.prepare --config RECIPE.yaml --engine beam --runner dask \\
        [--section.field value ...] -- [RUNNER'S FLAGS]

The result is written to a folder under `data.prepared`, named by a hash of the data, templates,
tokenizer and rules. All runs with the same hash use it, on any mesh and any machine that can read
that path (a folder, gs:// or s3://). For a recipe with stages, the data of all stages are prepared.
The engine `beam` distributes the work over the workers of an Apache Beam runner; the result is the
same.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.beam import RUNNERS, Beam
from data.engine import PROCESSES, Engine
from data.errors import UserError
from data.paths import is_remote
from data.printable import printable
from trainer import entry
from trainer.options import FIELDS, no_download, option, other_words, parse

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig


def prepare(options: Options, runner_flags: tuple[str, ...]) -> None:
    """Prepares the data, unless done, and prints the data report.

    Raises:
        UserError: the recipe, its data or the engine are invalid.
    """
    from data.loader import Loader
    from scripts.inspect_data import describe
    from trainer.config.load import load
    from trainer.model_source import choose_model, for_templates
    from trainer.stages import choose_stage
    from trainer.text import prepare_text

    config = load([*options.words])
    if config.trajectories.path and options.engine == "beam":  # whether it is installed or not
        raise UserError("--engine: found beam, which prepares no episodes; processes would work")
    engine = _engine(options, runner_flags)
    if config.trajectories.path:
        _prepare_episodes(config)
        return
    source, tokenizer = for_templates(choose_model(config.model, weights=False), config.data)
    for number in range(1, max(len(config.stages), 1) + 1):
        data = choose_stage(config, number)
        prepared = prepare_text(data, source.config, tokenizer, engine=engine)
        print(prepared.report.summary())
        for documents in (prepared.train, prepared.held_out):
            if len(documents):
                print(
                    describe(
                        documents, Loader(documents, data.data.context_length, 1, data.data.seed)
                    )
                )
        print(f"prepared in {_shown(prepared.folder, data.data.prepared)}")


def _shown(folder: Path, prepared: str) -> str:
    """Returns the path of a prepared folder; in a store not that of its copy here."""
    return f"{prepared.rstrip('/')}/{folder.name}" if is_remote(prepared) else str(folder)


def _prepare_episodes(config: RunConfig) -> None:
    """Stores a run's episodes, unless done, and prints their report.

    Raises:
        UserError: they cannot be used.
    """
    from data.trajectories.builder import prepare_trajectories

    options = config.trajectories
    assert options.path is not None
    prepared = prepare_trajectories(
        options.path, options.task, config.data.prepared, progress=config.logging.console
    )
    print(prepared.report)
    print(f"prepared in {_shown(prepared.folder, config.data.prepared)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    engine: str = option(
        "what does the work: processes on this machine, or Apache Beam (docs/beam.md)",
        "processes",
        choices=("processes", "beam"),
    )
    runner: str | None = option(
        "Beam's runner (default: direct); its flags follow after --",
        None,
        choices=tuple(RUNNERS),
    )
    no_download: bool = no_download()
    words: tuple[str, ...] = other_words(
        "[--config RECIPE.yaml] [--section.field value ...]", FIELDS
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args, runner_flags = parse(Options, words[:end]), tuple(words[end + 1 :])
    return entry.run(lambda: prepare(args, runner_flags))


def _engine(args: Options, runner_flags: tuple[str, ...]) -> Engine:
    """Returns the engine, with the runner's flags."""
    if args.engine == "beam":
        return Beam(args.runner or "direct", runner_flags)
    if args.runner or runner_flags:
        unused = f"--runner {args.runner}" if args.runner else f"flags after --: {runner_flags[0]}"
        raise UserError(f"{printable(unused)}: only applies to --engine beam")
    return PROCESSES


if __name__ == "__main__":
    entry.leave(main())
