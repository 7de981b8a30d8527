"""Imports a Hugging Face model as a checkpoint: python -m scripts.import_hf HF_DIR CHECKPOINT"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trainer import entry
from trainer.options import command, no_download, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Makes a checkpoint (model and assets, no optimizer state) from a Hugging Face model.

    Training and evaluation also read Hugging Face folders directly; a checkpoint has checksums and
    loads faster, in parallel.
    """

    hf_dir: str = option(
        "folder with config.json and safetensors, or org/name[@revision] on the hub",
        positional=True,
        metavar="HF_DIR",
    )
    checkpoint: Path = option(
        "folder to create; must be empty or not exist", positional=True, metavar="CHECKPOINT"
    )
    no_download: bool = no_download()


def work(arguments: Options) -> None:
    """See Options."""
    # Imported here, so that --help is fast and Ctrl-C ends with one line.
    import jax

    from data.folders import scratch_folder
    from data.outputs import checkpoint_path, new_folder
    from model.config import TransformerConfig
    from model.parameter_declarations import unpadded_shapes
    from trainer.checkpoint.store import save_checkpoint
    from trainer.huggingface.assets import copy_assets, write_config
    from trainer.huggingface.folder import folder_config
    from trainer.huggingface.hub_models import resolve_model_path
    from trainer.huggingface.read import check_weights, read_hf

    # Refuses an unusable folder before the slow read of all weights.
    out = checkpoint_path(new_folder(arguments.checkpoint), "CHECKPOINT")
    source = resolve_model_path(arguments.hf_dir)
    config = folder_config(source)
    check_weights(source, config)
    cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    with scratch_folder() as scratch:
        copy_assets(source, scratch)
        if config != TransformerConfig.from_hf(scratch):  # a separate head
            write_config(config, scratch)
        params = read_hf(source, config, cpu)
        save_checkpoint(out, model=params, assets=scratch, shapes=unpadded_shapes(config))
    count = sum(value.size for value in params.values())
    print(f"{arguments.checkpoint}: {count:,} parameters from {source}")


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
