"""Options for adapters in evaluations: several on one base, in turn, and its quantization."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from model.adapter import Quantization
from trainer.arguments import Joined, NoDownload, store_path


def add_options(parser: argparse.ArgumentParser, several: bool) -> None:
    """Adds --quantize, and --adapter, with several folders if the command supports that."""
    also = (
        "; several are evaluated in turn, each into its own folder in --output" if several else ""
    )
    parser.add_argument(
        "--adapter",
        type=store_path,
        metavar="FOLDER",
        nargs="+" if several else None,
        action=Joined if several else "store",
        help="an adapter of the model: a PEFT folder, or a run with adapters" + also,
    )
    parser.add_argument("--no-download", action=NoDownload)
    parser.add_argument(
        "--quantize",
        choices=get_args(Quantization),
        help="quantization of the base weights (default: as in "
        "training for a run; none for a PEFT folder)",
    )


def each_adapter(evaluate: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> None:
    """Evaluates with each adapter on the command line; equal folder names get a number."""
    given, names = args.adapter or [None], list[str]()
    for adapter in given:
        name = Path(adapter or "").name
        numbered = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        names.append(next(candidate for candidate in numbered if candidate not in names))
        output = args.output if len(given) == 1 else str(Path(args.output) / names[-1])
        evaluate(argparse.Namespace(**{**vars(args), "adapter": adapter, "output": output}))
