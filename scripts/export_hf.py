"""Exports a checkpoint as a Hugging Face folder: python -m scripts.export_hf CHECKPOINT HF_DIR"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from trainer import entry


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = entry.CommandParser(prog="python -m scripts.export_hf", allow_abbrev=False, description=(
        "Writes a Hugging Face folder (safetensors, config, generation config, tokenizer, chat template) from a "
        "checkpoint, in the dtype that the model was read in. Needs only the checkpoint, and no accelerator."))
    parser.add_argument("checkpoint", metavar="CHECKPOINT",
                        help="a checkpoint folder (RUN/checkpoints/STEP), or a run folder, for its newest undamaged one")
    parser.add_argument("hf_dir", metavar="HF_DIR", type=Path, help="folder to write, which must be empty or not exist")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status; errors and warnings of damaged checkpoints are one line each on stderr."""
    arguments = make_parser().parse_args(argv)
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)

    def work() -> None:
        # Imported here, so that --help answers at once and Ctrl-C ends with one line.
        from data.paths import new_folder
        from model.config import LlamaConfig
        from trainer.checkpoint.store import find_checkpoint, stored_parameters
        from trainer.huggingface.write import write_hf

        new_folder(arguments.hf_dir)  # before comparing all checksums, which takes long
        checkpoint = find_checkpoint(arguments.checkpoint, ["model", "assets"])
        params = stored_parameters(checkpoint, verified=True)
        write_hf(params, LlamaConfig.from_hf(checkpoint / "assets"), checkpoint / "assets", arguments.hf_dir)
        print(f"{arguments.hf_dir}: from {checkpoint}")

    return entry.run(work)


if __name__ == "__main__":
    entry.leave(main())
