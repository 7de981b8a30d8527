"""GLM-4.5 and 4.6: Solar Open's experts after some leading layers without, RoPE on a part of each
head, and in the larger models an RMS norm per query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..number_checks import require_bool, require_int
from .family import PARTIAL, STACKED, WITH_EXPERTS, with_partial_rotary
from .solar_open import SHARED, SharedExpertsFamily

_DENSE = "first_k_dense_replace"
_SIZES = {
    "vocab_size": 151552,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "bos_token_id": None,
    PARTIAL: 0.5,
}
_AIR = {
    **_SIZES,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_experts": 128,
    "moe_intermediate_size": 1408,
}
_PUBLISHED = {
    "head_dim": 128,
    "attention_bias": True,
    "pad_token_id": 151329,
    "eos_token_id": (151329, 151336, 151338),
    "rope": {"theta": 1e6},
}
_LARGE = {
    **_SIZES,
    **_PUBLISHED,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "num_experts": 160,
    "moe_intermediate_size": 1536,
    "shared_expert_intermediate_size": 1536,
    "routed_scaling_factor": 2.5,
    "qk_norm": "head",
    "mlp_only_layers": (0, 1, 2),
}


class Glm4MoeFamily(SharedExpertsFamily):
    """A family whose configs count the leading layers without experts."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`."""
        config = super().normalise(with_partial_rotary(config))
        dense, norm = config.pop(_DENSE, 1), config.pop("use_qk_norm", False)
        require_int(_DENSE, dense, at_least=0)
        require_bool("use_qk_norm", norm)
        layers = config.get("num_hidden_layers", self.defaults["num_hidden_layers"])
        return {
            **config,
            "qk_norm": "head" if norm else "none",
            _DENSE: list(range(min(dense, layers))),
        }

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write`."""
        written = super().write(fields)
        dense = written[_DENSE]
        if dense != list(range(len(dense))):
            raise ValueError(f"mlp_only_layers: found {dense}; {self.architecture} has them first")
        norm = written.pop("qk_norm") == "head"
        return {**written, "use_qk_norm": norm, _DENSE: len(dense)}


GLM4_MOE = Glm4MoeFamily(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    without_rope_scaling=("mlx-lm",),
    computes={"router_scores": "sigmoid", "router_correction": True, "output_bias": False},
    defaults={**_AIR, "eos_token_id": None},
    configurable=(
        "attention_bias",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "qk_norm",
        "routed_scaling_factor",
        "shared_expert_intermediate_size",
        PARTIAL,
    ),
    all_linear=WITH_EXPERTS,
    constants={"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    config_names={"num_experts": "n_routed_experts", "mlp_only_layers": _DENSE},
    tensors=SHARED,
    stacked={**STACKED, **SHARED},
    left_out=r"model\.layers\.(46|92)\..*",
    presets={
        "glm-4.5-air": {
            **_AIR,
            **_PUBLISHED,
            "shared_expert_intermediate_size": 1408,
            "mlp_only_layers": (0,),
        },
        "glm-4.5": _LARGE,
        "glm-4.6": {**_LARGE, "max_position_embeddings": 202752},
    },
)
