"""python -m scripts.import_hf HF_DIR CHECKPOINT: makes a checkpoint of a Hugging Face LLaMA."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from trainer import entry


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m scripts.import_hf", allow_abbrev=False, description=(
        "Makes a checkpoint (model and assets, no optimizer) of a Hugging Face LLaMA. Training and evaluation read "
        "Hugging Face folders directly, too; a checkpoint is verified by checksums and read faster in parallel."))
    result.add_argument("hf_dir", metavar="HF_DIR",
                        help="folder with config.json and safetensors, or org/name[@revision] in the local cache")
    result.add_argument("checkpoint", metavar="CHECKPOINT", type=Path,
                        help="folder to make; must not exist or be empty")
    return result


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 2, and one line on stderr, for an error."""
    arguments = parser().parse_args(argv)

    def work():
        # Here, so that --help answers at once and Ctrl-C ends in one line.
        import jax

        from data.paths import new_folder, no_pattern
        from model.config import LlamaConfig
        from trainer.checkpoint.store import save_checkpoint
        from trainer.huggingface.read import copy_assets, read_hf, resolve_model_path

        new_folder(no_pattern(arguments.checkpoint, "CHECKPOINT"))  # before all weights are read
        source = resolve_model_path(arguments.hf_dir)
        config = LlamaConfig.from_hf(source)
        one = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        with tempfile.TemporaryDirectory() as scratch:
            copy_assets(source, scratch)
            params = read_hf(source, config, one)
            save_checkpoint(arguments.checkpoint, model=params, assets=scratch)
        count = sum(value.size for value in params.values())
        print(f"{arguments.checkpoint}: {count:,} parameters of {source}")

    return entry.run(work)


if __name__ == "__main__":
    entry.leave(main())
