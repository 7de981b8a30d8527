"""gpt-oss: windows in every second layer, attention sinks, experts with biases and a clamped
gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import MIXTURE, Family, alternating

# If config.json names none.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SIZES = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "bos_token_id": None,
}
_TENSORS = {
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.experts.gate_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_proj.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.up_proj.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
    "mlp.experts.down_proj.bias": "mlp.experts.down_proj_bias",
}


class GptOss(Family):
    """A family whose layers alternate, beginning with a window, unless the config says
    otherwise."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`."""
        config = dict(config)
        if config.get("layer_types") is None:
            config["layer_types"] = alternating(config.get("num_hidden_layers", 36))
        if config.get("rope_parameters") is None and not config.get("rope_scaling"):
            config["rope_scaling"] = _YARN
        return config


def _sizes(layers: int, experts: int) -> dict[str, Any]:
    yarn = {name: value for name, value in _YARN.items() if name != "rope_type"}
    return {
        **_SIZES,
        "num_hidden_layers": layers,
        "layer_types": tuple(alternating(layers)),
        "num_experts": experts,
        "router_aux_loss_coef": 0.9,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "rope": {"theta": 150000.0, "rule": "yarn", **yarn},
    }


GPT_OSS = GptOss(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    computes={
        "attention_sinks": True,
        "expert_bias": True,
        "activation": "clamped",
        "norm_topk_prob": True,
    },
    defaults={
        **_SIZES,
        "num_hidden_layers": 36,
        "num_experts": 128,
        "router_aux_loss_coef": 0.001,
        "eos_token_id": None,
    },
    configurable=("attention_bias", "sliding_window", "layer_types", *MIXTURE),
    theta=150000.0,
    constants={"swiglu_limit": 7.0},
    config_names={"num_experts": "num_local_experts"},
    tensors=_TENSORS,
    stacked=_TENSORS,
    interleaved=True,
    stored_as=("mxfp4",),
    presets={"gpt-oss-20b": _sizes(24, 32), "gpt-oss-120b": _sizes(36, 128)},
)
