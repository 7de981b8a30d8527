"""Exports to Hugging Face's format: python -m scripts.export_hf CHECKPOINT HF_DIR [--merge]"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import entry


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = entry.CommandParser(
        prog="python -m scripts.export_hf",
        allow_abbrev=False,
        description=(
            "Writes a Hugging Face folder (safetensors, config, generation config, tokenizer, chat "
            "template) from a checkpoint, in the dtype of the original model; for a run with "
            "adapters, a folder that peft loads. Needs no accelerator."
        ),
    )
    parser.add_argument(
        "checkpoint",
        type=entry.store_path,
        metavar="CHECKPOINT",
        help=(
            "a checkpoint folder (RUN/checkpoints/STEP), or a run folder, for its newest "
            "undamaged one"
        ),
    )
    parser.add_argument(
        "hf_dir",
        metavar="HF_DIR",
        type=Path,
        help="folder to write; must be empty or not exist",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help=(
            "add the adapters to the base's weights and write a whole model; otherwise only the "
            "adapters are written, for peft"
        ),
    )
    parser.add_argument(
        "--average",
        action="store_true",
        help=(
            "write the weights' moving average of optimizer.average_decay instead of the last "
            "step's weights"
        ),
    )
    parser.add_argument(
        "--dequantize",
        action="store_true",
        help="with --merge, for adapters of quantized weights: add them to the dequantized weights",
    )
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help=(
            "the adapters' base: a hub name, which the export then names, or a folder, if it is "
            "not at the recorded path"
        ),
    )
    parser.add_argument(
        "--fuse-experts",
        action="store_true",
        help=(
            "for a mixture: write all experts of a layer in one tensor, as transformers 5 holds "
            "them in memory; otherwise as published"
        ),
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help=(
            "also compare transformers' logits with ours (needs torch and the model twice in "
            "memory); transformers always opens the configuration and the tokenizer"
        ),
    )
    parser.add_argument("--no-download", action=entry.NoDownload)
    return parser


def _check_quantized(quantize: str, arguments: argparse.Namespace) -> None:
    """Raises UserError for a merge into weights other than those of the adapters' training."""
    from data.errors import UserError

    if arguments.dequantize and (quantize == "none" or not arguments.merge):
        raise UserError(
            "--dequantize: goes with --merge and adapters of quantized weights, found "
            f"adapter.quantize {quantize}{'' if arguments.merge else ' without --merge'}; leave it "
            "out"
        )
    if arguments.merge and quantize != "none" and not arguments.dequantize:
        raise UserError(
            f"--merge: these adapters were trained on {quantize} weights, whose codes cannot hold "
            "a sum; add --dequantize for a model of the dequantized weights, or leave out "
            "--merge for the adapters alone"
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status, with one-line errors and warnings."""
    arguments = make_parser().parse_args(argv)
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)

    def work() -> None:
        # Imported here, so that --help is fast and Ctrl-C ends with one line.
        import contextlib
        import dataclasses

        from data.errors import UserError
        from data.paths import new_folder
        from model.config import TransformerConfig
        from trainer.checkpoint.store import find_checkpoint, stored_average, stored_parameters
        from trainer.huggingface import peft
        from trainer.huggingface.assets import trained_quantization
        from trainer.huggingface.card import write_card
        from trainer.huggingface.folder import hub_name
        from trainer.huggingface.merge import dequantized, merged
        from trainer.huggingface.verify import check_config, check_tokenizer, compare_logits
        from trainer.huggingface.write import write_hf
        from trainer.model_source import open_adapter

        out = new_folder(arguments.hf_dir)  # before the slow comparison of all checksums
        checkpoint = find_checkpoint(arguments.checkpoint, ["model", "assets"])
        params, config = (
            stored_parameters(checkpoint, verified=True),
            TransformerConfig.from_hf(checkpoint / "assets"),
        )
        if arguments.average:
            params = {**params, **stored_average(checkpoint)}
        is_adapter = (checkpoint / "assets" / peft.CONFIG).is_file()
        library = "peft" if is_adapter and not arguments.merge else "transformers"
        if not is_adapter and (arguments.merge or arguments.base or arguments.dequantize):
            flag = "merge" if arguments.merge else "base" if arguments.base else "dequantize"
            raise UserError(f"--{flag}: {checkpoint} holds a whole model, without adapters")
        if arguments.fuse_experts and not (config.num_experts and library == "transformers"):
            found = "a model without experts" if library == "transformers" else "adapters alone"
            raise UserError(f"--fuse-experts: {checkpoint} holds {found}; leave it out")
        if arguments.verify and is_adapter and not arguments.merge:
            raise UserError(
                "--verify: compares whole models, found adapters alone; add --merge, or leave it "
                "out"
            )
        base = None

        def finish(folder: Path) -> None:
            write_card(checkpoint, config, folder, library=library, base=base)

        def write(params: Mapping[str, Any], assets: Path) -> None:
            stacked = arguments.fuse_experts
            write_hf(params, config, assets, out, finish=finish, stacked=stacked)

        if not is_adapter:
            write(params, checkpoint / "assets")
        else:
            adapter, named = peft.read_config(checkpoint / "assets")
            base = arguments.base or hub_name(named)
            adapter = dataclasses.replace(
                adapter, quantize=trained_quantization(checkpoint / "assets")
            )
            config = dataclasses.replace(config, adapter=adapter)
            _check_quantized(adapter.quantize, arguments)
            if not arguments.merge:
                if base is None:
                    warnings.warn(
                        f"the base is a local folder ({named}), which {peft.CONFIG} does not "
                        "name; --base OWNER/NAME names it on the hub",
                        stacklevel=2,
                    )
                peft.write_adapter(params, config, base, out, finish)
            else:
                with contextlib.ExitStack() as stack:
                    source = open_adapter(str(checkpoint), arguments.base)
                    stored = source.base.stored(stack)
                    base_weights = dequantized(stored, config) if arguments.dequantize else stored
                    write(merged(base_weights, params, config), checkpoint / "assets")
        print("opening the folder with transformers", file=sys.stderr, flush=True)
        if library == "transformers":
            check_config(out, config)
        check_tokenizer(out)
        if arguments.verify:
            difference = compare_logits(out)
            print(f"logits differ from transformers' by at most {difference:.1e} of the largest")
        averaged = ", averaged weights" if arguments.average else ""
        print(
            f"{arguments.hf_dir}: from {checkpoint}{averaged}; its README.md is a model card; "
            "fill in the licence"
        )

    return entry.run(work)


if __name__ == "__main__":
    entry.leave(main())
