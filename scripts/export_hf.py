"""python -m scripts.export_hf CHECKPOINT HF_DIR: writes a Hugging Face folder that transformers loads."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from trainer import entry


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m scripts.export_hf", allow_abbrev=False, description=(
        "Writes a Hugging Face folder (safetensors, config, generation config, tokenizer, chat template) from a "
        "checkpoint, in the dtype the model came in. Needs nothing beside the checkpoint, and no accelerator."))
    result.add_argument("checkpoint", metavar="CHECKPOINT",
                        help="a checkpoint folder (RUN/checkpoints/STEP), or a run directory: its newest good one")
    result.add_argument("hf_dir", metavar="HF_DIR", type=Path, help="folder to write; must not exist or be empty")
    return result


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 2 with one line on stderr for an error; a damaged checkpoint's warning is a line too."""
    arguments = parser().parse_args(argv)
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)

    def work():
        # Here, so that --help answers at once and Ctrl-C ends in one line.
        from data.paths import new_folder
        from model.config import LlamaConfig
        from trainer.checkpoint.store import find_checkpoint, stored_parameters
        from trainer.huggingface.write import write_hf

        new_folder(arguments.hf_dir)  # before all checksums are compared
        checkpoint = find_checkpoint(arguments.checkpoint, ["model", "assets"])
        params = stored_parameters(checkpoint, verified=True)
        write_hf(params, LlamaConfig.from_hf(checkpoint / "assets"), checkpoint / "assets", arguments.hf_dir)
        print(f"{arguments.hf_dir}: from {checkpoint}")

    return entry.run(work)


if __name__ == "__main__":
    entry.leave(main())
