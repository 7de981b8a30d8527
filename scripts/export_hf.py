"""Exports to Hugging Face's format: python -m scripts.export_hf CHECKPOINT HF_DIR [--merge]"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import entry
from trainer.options import StorePath, command, no_download, option

if TYPE_CHECKING:
    from model.config import TransformerConfig

# Fields of config.json that do not change what a model computes, repeat others, or have their own
# warning; see `_differences`.
_UNCOMPARED = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "rope_parameters",
    "original_max_position_embeddings",
    "vocab_size",
)


def _check_flags(arguments: Options, checkpoint: Path, is_adapter: bool, has_experts: bool) -> None:
    """Raises UserError for a flag that does not fit what the checkpoint holds."""
    from data.errors import UserError
    from data.printable import printable
    from trainer.huggingface.hub_models import hub_name

    is_full = arguments.merge or not is_adapter
    if not is_adapter and (arguments.merge or arguments.dequantize):
        flag = "merge" if arguments.merge else "dequantize"
        raise UserError(f"--{flag}: {checkpoint} holds a full model, without adapters")
    if not is_adapter and arguments.base and not hub_name(arguments.base):
        raise UserError(
            f"--base: {checkpoint} holds a full model, whose card only names the base: "
            f"found {printable(arguments.base)}, expected a hub name, OWNER/NAME"
        )
    if arguments.fuse_experts and not (has_experts and is_full):
        content = "a model without experts" if is_full else "only adapters"
        raise UserError(f"--fuse-experts: {checkpoint} holds {content}; leave it out")
    if arguments.verify and not is_full:
        raise UserError(
            "--verify: compares full models, found only adapters; add --merge, or leave it out"
        )


def _check_quantized(quantize: str, arguments: Options) -> None:
    """Raises UserError if adapters would be merged into weights they were not trained on."""
    from data.errors import UserError

    if arguments.dequantize and (quantize == "none" or not arguments.merge):
        raise UserError(
            "--dequantize: only applies to --merge with adapters of quantized weights, found "
            f"adapter.quantize {quantize}{'' if arguments.merge else ' without --merge'}; leave it "
            "out"
        )
    if arguments.merge and quantize != "none" and not arguments.dequantize:
        raise UserError(
            f"--merge: these adapters were trained on {quantize} weights, whose codes cannot "
            "represent the sum; add --dequantize to merge into the dequantized weights, or leave "
            "out --merge to export only the adapters"
        )


def _warn_of_base(config: TransformerConfig, base: str, out: Path) -> None:
    """Warns of what PEFT takes from the base's config.json and the run changed.

    Args:
      config: of the trained model.
      base: its path or hub name. Its weights are not read, except to verify a run's.
    """
    from data.errors import UserError, first_line
    from data.printable import printable
    from trainer.huggingface.folder import wrapper
    from trainer.huggingface.peft import TRAINED_CONFIG
    from trainer.model_source import open_model
    from trainer.source_kinds import HuggingFaceSource

    try:
        opened = open_model(base, weights=False)
        source = opened.config
        whole = wrapper(opened.folder) if isinstance(opened, HuggingFaceSource) else None
    except (ValueError, OSError, UserError) as error:
        warnings.warn(
            f"{printable(base)}: the base's configuration was not compared with the run's "
            f"({first_line(error)}); PEFT uses the base's, this project {TRAINED_CONFIG}",
            stacklevel=2,
        )
        return
    if whole:
        warnings.warn(
            f"{out}: PEFT loads the base as {whole}, whose text part has other names, and would "
            "leave this adapter's numbers out; --merge writes a whole model",
            stacklevel=2,
        )
    if changed := _differences(config, source):
        warnings.warn(
            f"{out}: trained with another {', '.join(changed)} than the base, and PEFT uses the "
            "base's, so that it may compute another model; --merge writes a whole model, and this "
            f"project reads {TRAINED_CONFIG}",
            stacklevel=2,
        )
    if config.vocab_size > source.vocab_size:
        warnings.warn(
            f"{out}: has {config.vocab_size - source.vocab_size} more tokens than the base: before "
            f"PEFT loads it, the base needs resize_token_embeddings({config.vocab_size})"
            f"{'' if _has_rows(config) else '; the run did not train their rows, which are lost'}",
            stacklevel=2,
        )


def _differences(config: TransformerConfig, base: TransformerConfig) -> list[str]:
    """Returns the fields of config.json that make the base compute something else."""
    from model.config import ROUTER_LOSSES

    ours, theirs = config.to_hf(), base.to_hf()
    skipped = {*_UNCOMPARED, *ROUTER_LOSSES}
    if config.rope.rule != "dynamic":  # the only one that computes from the length
        skipped.add("max_position_embeddings")
    return [name for name in ours if ours[name] != theirs.get(name) and name not in skipped]


def _has_rows(config: TransformerConfig) -> bool:
    """Whether the adapter holds the vocabulary rows that a run added."""
    return config.adapter is not None and config.adapter.trains("embed_tokens.weight")


def _check_rows(config: TransformerConfig, base: TransformerConfig) -> None:
    """Raises UserError if a run of an earlier version added vocabulary rows without training
    them."""
    from data.errors import UserError

    if config.vocab_size > base.vocab_size and not _has_rows(config):
        raise UserError(
            f"--merge: the run added {config.vocab_size - base.vocab_size} tokens and did not "
            "train their rows, which are in no file; a run with embed_tokens in adapter.train "
            "(and lm_head, unless tied) saves them"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Writes a Hugging Face folder from a checkpoint, in the original model's dtype.

    The folder has safetensors, config, generation config, tokenizer and chat template; for a run
    with adapters, weights and config are in PEFT's format. Needs no accelerator.
    """

    checkpoint: StorePath = option(
        "a checkpoint (RUN/checkpoints/STEP), or a run folder for its newest undamaged checkpoint",
        positional=True,
        metavar="CHECKPOINT",
    )
    hf_dir: Path = option(
        "folder to write; must be empty or not exist", positional=True, metavar="HF_DIR"
    )
    merge: bool = option(
        "merge the adapters into the base's weights and write the full model; without it, only "
        "the adapters are written, for peft"
    )
    average: bool = option(
        "write the moving average of the weights (optimizer.average_decay) instead of the last "
        "step's weights"
    )
    dequantize: bool = option(
        "with --merge, for adapters of quantized weights: merge into the dequantized weights"
    )
    base: str | None = option(
        "the base model, if it is not at the recorded path: a hub name, which the export then "
        "names, or, for adapters, a folder",
        None,
        metavar="MODEL",
    )
    fuse_experts: bool = option(
        "for a mixture: write all experts of a layer in one tensor instead of as published; of "
        "other programs, only transformers 5 reads this"
    )
    verify: bool = option(
        "also compare transformers' logits with ours (needs torch, and memory for two models); "
        "configuration and tokenizer are always opened with transformers"
    )
    no_download: bool = no_download()


def work(arguments: Options) -> None:
    """See Options."""
    # Imported here, so that --help is fast and Ctrl-C ends with one line.
    from data.outputs import new_folder
    from trainer.checkpoint.manifest import reading
    from trainer.checkpoint.readers import find_checkpoint
    from trainer.huggingface.card import is_trained

    out = new_folder(arguments.hf_dir)  # before the slow verification of all checksums
    checkpoint = find_checkpoint(arguments.checkpoint, ["model", "assets"])
    with reading(checkpoint):
        config, base = _write(arguments, checkpoint, out)
    _warn_of_unnamed(checkpoint, base)
    _warn_of_programs(out, config, arguments.fuse_experts)
    _verify(out, config, arguments.verify, is_trained(checkpoint))
    averaged = ", averaged weights" if arguments.average else ""
    print(
        f"{arguments.hf_dir}: from {checkpoint}{averaged}; its README.md is a model card; "
        "fill in the licence"
    )


def _write(
    arguments: Options, checkpoint: Path, out: Path
) -> tuple[TransformerConfig | None, str | None]:
    """Writes the folder `out`.

    Returns:
      The configuration of a whole model, None for adapters; and the base's path or name, if known.
    """
    from model.config import TransformerConfig
    from trainer.checkpoint.manifest import require_present
    from trainer.checkpoint.readers import stored_average, stored_parameters
    from trainer.huggingface import adapter_config, peft
    from trainer.huggingface.card import write_card
    from trainer.huggingface.hub_models import hub_name
    from trainer.huggingface.write import write_hf

    params = stored_parameters(checkpoint, verified=True)
    assets = checkpoint / "assets"
    config = TransformerConfig.from_hf(assets)
    if arguments.average:
        params = {**params, **stored_average(checkpoint)}
    is_adapter = (assets / adapter_config.CONFIG).is_file()
    library = "peft" if is_adapter and not arguments.merge else "transformers"
    _check_flags(arguments, checkpoint, is_adapter, bool(config.num_experts))
    base = arguments.base
    if is_adapter:
        config, named = _with_adapter(config, assets)
        assert config.adapter is not None
        _check_quantized(config.adapter.quantize, arguments)
        base = base or hub_name(named)

    def finish(folder: Path) -> None:
        write_card(checkpoint, config, folder, library=library, base=base)
        require_present(checkpoint)  # files that had vanished were left out

    if library == "peft":
        peft.write_adapter(params, config, base, out, finish, assets)
        _warn_of_base(config, arguments.base or named, out)
        return None, base or named
    with contextlib.ExitStack() as stack:
        whole = _merged(params, config, checkpoint, arguments, stack) if is_adapter else params
        write_hf(whole, config, assets, out, finish=finish, stacked=arguments.fuse_experts)
    return config, base


def _with_adapter(config: TransformerConfig, assets: Path) -> tuple[TransformerConfig, str]:
    """Returns a checkpoint's configuration with its adapter, and the base's path or name."""
    from trainer.huggingface import adapter_config
    from trainer.huggingface.assets import trained_quantization

    adapter, named = adapter_config.read_config(assets)
    adapter = dataclasses.replace(adapter, quantize=trained_quantization(assets))
    return dataclasses.replace(config, adapter=adapter), named


def _merged(
    params: Mapping[str, Any],
    config: TransformerConfig,
    checkpoint: Path,
    arguments: Options,
    stack: contextlib.ExitStack,
) -> Mapping[str, Any]:
    """Returns the whole model's parameters; `stack` closes the base's files."""
    from trainer.huggingface.merge import dequantized, merged
    from trainer.model_source import open_adapter

    source = open_adapter(str(checkpoint), arguments.base)
    _check_rows(config, source.base.stored_config)
    base = source.base.stored(stack)
    return merged(dequantized(base, config) if arguments.dequantize else base, params, config)


def _warn_of_unnamed(checkpoint: Path, base: str | None) -> None:
    """Warns of a base that the model card cannot name."""
    from data.printable import printable
    from trainer.huggingface.card import base_without_hub_name, is_trained

    if not base and not is_trained(checkpoint):
        warnings.warn(
            f"{checkpoint}: imported and not trained, and does not record from which model; pass "
            "its hub name with --base OWNER/NAME",
            stacklevel=2,
        )
    if unnamed := base_without_hub_name(checkpoint, base):
        warnings.warn(
            f"the base has no hub name ({printable(unnamed)}), so the model card names none; pass "
            "one with --base OWNER/NAME",
            stacklevel=2,
        )


def _warn_of_programs(out: Path, config: TransformerConfig | None, stacked: bool) -> None:
    """Warns of what other programs compute otherwise in the folder `out`, or do not load.

    Args:
      config: of a whole model; None for adapters.
      stacked: whether a layer's experts are in one tensor.
    """
    from data.untrusted_files import read_json
    from trainer.huggingface import adapter_config, other_programs

    lines = (
        other_programs.of_adapter(read_json(out / adapter_config.CONFIG, out))
        if config is None
        else other_programs.of_model(config, out, stacked)
    )
    for line in lines:
        warnings.warn(f"{out}: {line}", stacklevel=2)


def _verify(out: Path, config: TransformerConfig | None, compare: bool, trained: bool) -> None:
    """Opens the finished export with transformers.

    Raises:
      UserError: they differ; or a disk or a network failed, after which another start, which would
        refuse the folder, must not seem to help.
    """
    from data.errors import UserError, first_line, is_transient

    reason = ""
    try:
        _open(out, config, compare, trained)
    except (OSError, UserError) as error:
        if not is_transient(error):
            raise
        reason = first_line(error)
    if reason:  # not raised above, where the error would be this one's context
        raise UserError(
            f"{out}: is complete, but was not compared with transformers ({reason}); it can be "
            "used, or removed and exported again"
        )


def _open(out: Path, config: TransformerConfig | None, compare: bool, trained: bool) -> None:
    """Opens the export with transformers.

    Args:
      config: of a whole model; None for adapters.
      compare: whether to compare the logits.
      trained: whether a training run saved the checkpoint.
    """
    from trainer.huggingface.verify import check_config, check_tokenizer, compare_logits

    print("opening the folder with transformers", file=sys.stderr, flush=True)
    if config is not None:
        check_config(out, config)
    check_tokenizer(out, trained)
    if compare:
        difference = compare_logits(out)
        print(f"logits differ from transformers' by at most {difference:.1e} of the largest logit")


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
