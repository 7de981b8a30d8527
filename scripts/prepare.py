"""Tokenizes a recipe's data before training, so that no accelerator waits.

    python -m scripts.prepare --config RECIPE.yaml [--section.field value ...]
    python -m scripts.prepare --config RECIPE.yaml --engine beam --runner dask \\
        [--section.field value ...] -- [RUNNER'S FLAGS]

The result goes to a folder under `data.prepared`, named by a hash of the data, templates, tokenizer
and rules. All runs with the same hash use it, on any mesh and any machine that can read that path
(a folder, gs:// or s3://). For a recipe with stages, all stages' data are prepared. The engine
`beam` spreads the work over the workers of a runner of Apache Beam; the result is the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from data.beam import RUNNERS, Beam
from data.engine import PROCESSES, Engine
from data.errors import UserError
from data.printable import printable
from trainer import entry


def prepare(recipe: str, flags: list[str], engine: Engine) -> None:
    """Tokenizes the data, unless done, and prints the data report.

    Args:
        recipe: path of the recipe.
        flags: fields of the recipe as command-line flags.
        engine: what runs the work.

    Raises:
        UserError: the recipe or the data are wrong.
    """
    from data.loader import Loader
    from scripts.inspect_data import describe
    from trainer.config.load import load
    from trainer.model_source import choose_model, for_templates
    from trainer.stages import choose_stage
    from trainer.text import prepare_text

    config = load(["--config", recipe, *flags])
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
        print(f"prepared in {prepared.folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = entry.CommandParser(
        prog="python -m scripts.prepare", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="RECIPE.yaml",
        help=(
            "a recipe; its fields may follow as --section.field value (python train.py --help "
            "describes them)"
        ),
    )
    parser.add_argument(
        "--engine",
        choices=("processes", "beam"),
        default="processes",
        help="what runs the work: this machine's processes, or Apache Beam (docs/beam.md)",
    )
    parser.add_argument(
        "--runner",
        choices=tuple(RUNNERS),
        help="the runner of Beam, direct by default; its own flags follow after --",
    )
    parser.add_argument("--no-download", action=entry.NoDownload)
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args, flags = parser.parse_known_args(given[:end])
    options = tuple(given[end + 1 :])
    return entry.run(lambda: prepare(args.config, flags, _engine(args, options)))


def _engine(args: argparse.Namespace, options: tuple[str, ...]) -> Engine:
    """Returns what runs the work."""
    if args.engine == "beam":
        return Beam(args.runner or "direct", options)
    if args.runner or options:
        found = f"--runner {args.runner}" if args.runner else f"flags after --: {options[0]}"
        raise UserError(f"{printable(found)}: is for --engine beam, which would work")
    return PROCESSES


if __name__ == "__main__":
    entry.leave(main())
