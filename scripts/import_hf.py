"""Imports a Hugging Face LLaMA as a checkpoint: python -m scripts.import_hf HF_DIR CHECKPOINT"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from trainer import entry


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = entry.CommandParser(
        prog="python -m scripts.import_hf",
        allow_abbrev=False,
        description=(
            "Makes a checkpoint (model and assets, no optimizer state) from a Hugging Face LLaMA. "
            "Training and evaluation also read Hugging Face folders directly; a checkpoint has "
            "checksums and loads faster, in parallel."
        ),
    )
    parser.add_argument(
        "hf_dir",
        metavar="HF_DIR",
        help="folder with config.json and safetensors, or org/name[@revision] on the hub",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="folder to make; must be empty or not exist",
    )
    parser.add_argument("--no-download", action=entry.NoDownload)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)

    def work() -> None:
        # Imported here, so that --help is fast and Ctrl-C ends with one line.
        import jax

        from data.folders import scratch_folder
        from data.paths import checkpoint_path, new_folder
        from model.config import TransformerConfig
        from model.declarations import own_shapes
        from trainer.checkpoint.store import save_checkpoint
        from trainer.huggingface.assets import copy_assets, write_config
        from trainer.huggingface.folder import folder_config, resolve_model_path
        from trainer.huggingface.read import read_hf

        # Before the slow reading of all weights.
        new_folder(checkpoint_path(arguments.checkpoint, "CHECKPOINT"))
        source = resolve_model_path(arguments.hf_dir)
        config = folder_config(source)
        cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        with scratch_folder() as scratch:
            copy_assets(source, scratch)
            if config != TransformerConfig.from_hf(scratch):  # a separate head
                write_config(config, scratch)
            params = read_hf(source, config, cpu)
            save_checkpoint(
                arguments.checkpoint, model=params, assets=scratch, shapes=own_shapes(config)
            )
        count = sum(value.size for value in params.values())
        print(f"{arguments.checkpoint}: {count:,} parameters from {source}")

    return entry.run(work)


if __name__ == "__main__":
    entry.leave(main())
