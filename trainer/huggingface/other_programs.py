"""Where vLLM, llama.cpp and transformers 4 differ from transformers 5 on an export, or do not load
it; taken from their code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.untrusted_files import file_within, read_json
from model.config import TransformerConfig
from model.rope import attention_scaling
from model.rope_config import RopeConfig

from .table import hf_layout

# What vLLM's --max-lora-rank may be.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def of_model(config: TransformerConfig, folder: Path, stacked: bool) -> list[str]:
    """Returns how other programs differ in a whole model, a line each.

    Args:
      folder: the export.
      stacked: whether it has a layer's experts in one tensor, as in `hf_layout`.
    """
    lines = []
    if rope := _rope(config.rope, config.max_position_embeddings):
        lines.append(rope)
    names = [{entry.hf_name for entry in hf_layout(config, form)} for form in (stacked, False)]
    if names[0] != names[1]:
        lines.append(
            "only transformers 5 and this project read a layer's experts in one tensor; "
            "transformers 4 draws the experts at random, and llama.cpp refuses some; an export "
            "without --fuse-experts would work"
        )
    if _tokenizer_class(folder) == "TokenizersBackend":
        lines.append(
            "tokenizer_config.json: tokenizer_class TokenizersBackend, as in the source, is not "
            "known to transformers 4; PreTrainedTokenizerFast there would work in both"
        )
    return lines


def of_adapter(config: Mapping[str, Any]) -> list[str]:
    """Returns what vLLM needs for an adapter or does not load, a line each.

    Args:
      config: its adapter_config.json.
    """
    if config.get("target_parameters"):
        return ["vLLM does not load adapters of experts or routers; --merge writes a whole model"]
    rank = max(config["r"], *config["rank_pattern"].values(), 0)
    if rank == config["r"]:
        return []
    enough = next((allowed for allowed in _VLLM_RANKS if allowed >= rank), None)
    needs = f"needs --max-lora-rank {enough}" if enough else "has no such --max-lora-rank"
    return [f"a matrix A for several projections has {rank} rows, for which vLLM {needs}"]


def _rope(rope: RopeConfig, length: int) -> str | None:
    """Returns how other programs differ in the rotary embedding; None if they do not."""
    if rope.rule == "dynamic":
        return (
            "rope_type dynamic: vLLM and llama.cpp do not stretch RoPE by it, and so compute "
            f"another model for texts of more than {rope.original_max_position_embeddings} tokens"
        )
    ours, original = attention_scaling(rope), rope.original_max_position_embeddings
    if rope.rule == "yarn":
        numbers = [
            name
            for name in ("attention_factor", "mscale", "mscale_all_dim")
            if getattr(rope, name) is not None
        ]
        default = RopeConfig("yarn", factor=rope.factor, original_max_position_embeddings=original)
        theirs, programs = attention_scaling(default), "vLLM"
        why = f"without {', '.join(numbers)}, which it does not read"
    elif rope.rule == "longrope":
        assert original is not None
        quotient = max(1.0, length / original)
        theirs = math.sqrt(1 + math.log(quotient) / math.log(original))
        programs, why = "vLLM and llama.cpp", "by the quotient of the lengths in config.json"
    else:
        return None
    if math.isclose(ours, theirs, rel_tol=1e-6):
        return None
    return (
        f"rope_type {rope.rule}: for {programs} the scale of attention is {theirs:.4f}, {why}, "
        f"instead of {ours:.4f}"
    )


def _tokenizer_class(folder: Path) -> str | None:
    """The class in a folder's tokenizer_config.json; None if there is none."""
    if not file_within(folder, "tokenizer_config.json"):
        return None
    return read_json(folder / "tokenizer_config.json", folder).get("tokenizer_class")
