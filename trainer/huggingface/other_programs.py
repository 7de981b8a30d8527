"""Where vLLM, llama.cpp, SGLang, mlx-lm and transformers 4 differ from transformers 5 on an export,
or do not load it; taken from their code, and for llama.cpp from its logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.untrusted_files import file_within, read_json
from model.config import TransformerConfig
from model.families import FAMILIES
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
    lines = [*_rope(config), *_window(config), *_correction(config)]
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
    """Returns what other programs need for an adapter, compute otherwise or do not load, a line
    each.

    Args:
      config: its adapter_config.json.
    """
    lines = []
    if config.get("use_rslora"):
        lines.append(
            "llama.cpp and SGLang do not read use_rslora, and scale the adapter by alpha / rank; "
            "--merge writes a whole model"
        )
    if saved := config.get("modules_to_save"):
        lines.append(
            f"vLLM does not load modules_to_save ({', '.join(saved)}), and llama.cpp and SGLang "
            "leave out some or all of them; --merge writes a whole model"
        )
    if config.get("target_parameters"):
        return [
            *lines,
            "vLLM does not load adapters of experts or routers, nor does peft with transformers 4 "
            "those of experts, except gpt-oss's; --merge writes a whole model",
        ]
    rank = max(config["r"], *config["rank_pattern"].values(), 0)
    if rank == config["r"]:
        return lines
    enough = next((allowed for allowed in _VLLM_RANKS if allowed >= rank), None)
    needs = f"needs --max-lora-rank {enough}" if enough else "has no such --max-lora-rank"
    return [
        *lines,
        f"a matrix A for several projections has {rank} rows, for which vLLM {needs}; llama.cpp "
        "and SGLang do not read its alpha (alpha_pattern): for them --merge writes a whole model",
    ]


def _rope(config: TransformerConfig) -> list[str]:
    """Returns how other programs differ in the rotary embedding."""
    rope, family, lines = config.rope, FAMILIES[config.family], []
    rules = (*family.llama_cpp_rules, "dynamic")  # that one is named below
    if not family.llama_cpp_rules and rope != RopeConfig(theta=family.theta):
        lines.append(
            f"llama.cpp reads neither rope_theta nor rope_scaling of {family.architecture}, and so "
            "computes another model"
        )
    without = () if rope.rule == "default" else family.without_rope_scaling
    if family.llama_cpp_rules and rope.rule not in rules:
        without = ("llama.cpp", *without)
    if without:
        lines.append(
            f"rope_type {rope.rule}: not read in {family.architecture} by {', '.join(without)}, "
            "where it is another model"
        )
    if rope.rule == "dynamic":
        lines.append(
            "rope_type dynamic: vLLM and llama.cpp do not stretch RoPE by it, and so compute "
            f"another model for texts of more than {rope.original_max_position_embeddings} tokens"
        )
    elif rope.rule == "longrope":
        programs = "vLLM and llama.cpp" if rope.rule in rules else "vLLM"
        lines += _longrope(rope, config.max_position_embeddings, programs)
    elif rope.rule == "yarn" and rope.rule in rules:
        lines += _yarn(config)
    return lines


def _yarn(config: TransformerConfig) -> list[str]:
    """Returns which of YaRN's numbers other programs do not read. vLLM 0.33 reads them all."""
    rope, without = config.rope, FAMILIES[config.family].without_rope_scaling
    without_factor = dataclasses.replace(rope, attention_factor=None)
    # llama.cpp reads this number in models whose queries grow with their position.
    all_dim = rope.mscale_all_dim if config.llama_4_scaling_beta else None
    by_llama_cpp = dataclasses.replace(
        without_factor, mscale=1.0 if all_dim else None, mscale_all_dim=all_dim
    )
    read = {"llama.cpp": by_llama_cpp, "SGLang": without_factor, "mlx-lm": without_factor}
    ours, lines = attention_scaling(rope), []
    scales = {name: attention_scaling(its) for name, its in read.items() if name not in without}
    theirs = [
        f"{scale:.4f} in {program}"
        for program, scale in scales.items()
        if not math.isclose(ours, scale, rel_tol=1e-6)
    ]
    if theirs:
        names = ("attention_factor", "mscale", "mscale_all_dim")
        numbers = ", ".join(name for name in names if getattr(rope, name) is not None)
        lines.append(
            f"rope_type yarn: the scale of attention is {', '.join(theirs)}, instead of "
            f"{ours:.4f}, since not all of {numbers} are read there"
        )
    if not rope.truncate:
        programs = [program for program in scales if program != "SGLang"]
        lines.append(
            f"rope_type yarn: truncate: false is not read by {', '.join(programs)}, whose "
            "frequencies differ slightly"
        )
    return lines


def _longrope(rope: RopeConfig, length: int, programs: str) -> list[str]:
    """Returns how the scale of longrope differs in `programs`."""
    ours, original = attention_scaling(rope), rope.original_max_position_embeddings
    assert original is not None
    theirs = math.sqrt(1 + math.log(max(1.0, length / original)) / math.log(original))
    if math.isclose(ours, theirs, rel_tol=1e-6):
        return []
    return [
        f"rope_type longrope: the scale of attention is {theirs:.4f} in {programs}, by the "
        f"quotient of the lengths in config.json, instead of {ours:.4f}"
    ]


def _window(config: TransformerConfig) -> list[str]:
    """Returns which programs do not read the sliding window."""
    window, family = config.sliding_window, FAMILIES[config.family]
    if not family.without_window or window is None or window >= config.max_position_embeddings:
        return []
    return [
        f"{family.architecture}: sliding_window is not read by {', '.join(family.without_window)}, "
        f"where tokens attend to more than {window}"
    ]


def _correction(config: TransformerConfig) -> list[str]:
    """Returns which programs do not read the correction of the experts' scores."""
    family = FAMILIES[config.family]
    if not family.without_correction:
        return []
    return [
        f"{family.architecture}: e_score_correction_bias is not read by "
        f"{', '.join(family.without_correction)}, where other experts are chosen"
    ]


def _tokenizer_class(folder: Path) -> str | None:
    """The class in a folder's tokenizer_config.json; None if there is none."""
    if not file_within(folder, "tokenizer_config.json"):
        return None
    return read_json(folder / "tokenizer_config.json", folder).get("tokenizer_class")
