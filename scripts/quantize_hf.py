"""Writes a model in bitsandbytes' NF4: python -m scripts.quantize_hf MODEL HF_DIR"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trainer import entry
from trainer.options import command, no_download, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Writes a Hugging Face folder whose layers' projections are in NF4 with double quantization.

    transformers loads it with bitsandbytes, and adapter training (adapter.quantize nf4) uses the
    codes as they are, without quantizing first. Matrices that are in NF4 already are kept, and the
    others quantized, in folders that have both (llm_int8_skip_modules, such as Unsloth's dynamic
    ones). Needs no accelerator, and memory for only one matrix.
    """

    model: str = option(
        "a Hugging Face folder, org/name[@revision] on the hub, or a checkpoint or run of a full "
        "model",
        positional=True,
        metavar="MODEL",
    )
    hf_dir: Path = option(
        "folder to write; must be empty or not exist", positional=True, metavar="HF_DIR"
    )
    no_download: bool = no_download()


def work(arguments: Options) -> None:
    """See Options."""
    # Imported here, so that --help is fast and Ctrl-C ends with one line.
    import contextlib

    from data.errors import UserError
    from data.folders import scratch_folder
    from data.outputs import new_folder
    from model.adapter import AdapterConfig
    from trainer.huggingface.assets import copy_assets
    from trainer.huggingface.read import projections_in_nf4
    from trainer.huggingface.write import write_hf
    from trainer.model_source import open_model
    from trainer.source_kinds import HuggingFaceSource, StoredSource

    out = new_folder(arguments.hf_dir)  # before the slow verification of all checksums
    source = open_model(arguments.model)
    if not isinstance(source, StoredSource):
        raise UserError(
            f"{arguments.model}: is an adapter, not a full model; merge it with python -m "
            "scripts.export_hf --merge, and quantize the result"
        )
    if source.config.num_experts:
        raise UserError(
            f"{arguments.model}: is a mixture of experts, which transformers 5 cannot load in NF4; "
            "use adapter.quantize, which quantizes matrices as they are read"
        )
    # Raises if a size is not a multiple of the block size.
    dataclasses.replace(source.config, adapter=AdapterConfig(rank=1, quantize="nf4"))
    with contextlib.ExitStack() as stack:
        stored = source.stored(stack)
        assets, kept = source.folder / "assets", ""
        if isinstance(source, HuggingFaceSource):
            coded, others = projections_in_nf4(source.folder, source.stored_config)
            if not others:
                raise UserError(f"{arguments.model}: is already in NF4")
            if coded:
                kept = f" ({len(coded)} matrices in NF4 are kept, {len(others)} are quantized)"
            assets = stack.enter_context(scratch_folder())
            copy_assets(source.folder, assets)
        write_hf(stored, source.config, assets, out, nf4=True)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(f"{arguments.hf_dir}: {size / 1e9:,.2f} GB of weights, from {arguments.model}{kept}")


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
