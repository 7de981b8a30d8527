"""ERNIE 4.5 (mixtures of experts): ERNIE 4.5's layer, experts chosen by corrected softmaxes in some
layers, mostly all but the first ones, and shared experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..number_checks import require_int
from .family import MIXTURE, STACKED, WITH_EXPERTS
from .solar_open import SHARED, SharedExpertsFamily

_CORRECTION = "mlp.gate.e_score_correction_bias"
_FIRST, _LAST, _INTERVAL = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
_THETA = 5e5
_SIZES = {
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "router_aux_loss_coef": 0.001,
}


def _dense_layers(layers: int, first: int, last: int, interval: int) -> list[int]:
    """The layers without experts, which each `interval`-th layer from `first` to `last` has."""
    return [i for i in range(layers) if (i + 1) % interval or not first <= i <= last]


class Ernie4_5MoeFamily(SharedExpertsFamily):
    """A family whose configs name the first and the last layer with experts, and their interval."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`.

        Raises:
          ValueError: `moe_norm_min` has another value than the published one.
        """
        config = super().normalise(config)
        layers = config.get("num_hidden_layers", self.defaults["num_hidden_layers"])
        names = ((_FIRST, 1, 0), (_LAST, -1, -1), (_INTERVAL, 1, 1))
        given = []
        for name, default, least in names:
            given.append(config.pop(name, default))
            require_int(name, given[-1], at_least=least)
        first, last, interval = given
        least = config.pop("moe_norm_min", 1e-12)
        if least != 1e-12:
            raise ValueError(f"moe_norm_min: found {least!r}; only 1e-12 is supported")
        end = layers - 1 if last == -1 else last
        return {**config, _FIRST: _dense_layers(layers, first, end, interval)}

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write`."""
        written, layers = super().write(fields), fields["num_hidden_layers"]
        return {**written, **_placement(layers, written[_FIRST])}


def _placement(layers: int, dense: Iterable[int]) -> dict[str, int]:
    """The fields of config.json that make these layers the ones without experts.

    Raises:
      ValueError: none do.
    """
    dense = sorted({*dense})
    experts = [i for i in range(layers) if i not in dense]
    first, last = experts[0], experts[-1]
    for interval in range(1, layers + 1):
        if _dense_layers(layers, first, last, interval) == dense:
            return {_FIRST: first, _LAST: last, _INTERVAL: interval}
    raise ValueError(
        f"mlp_only_layers: found {dense}; in Ernie4_5_MoeForCausalLM the other layers have a "
        "constant interval"
    )


_NAMED = {**SHARED, _CORRECTION: "mlp.moe_statics.e_score_correction_bias"}

ERNIE4_5_MOE = Ernie4_5MoeFamily(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    without_rope_scaling=("mlx-lm",),
    without_correction=("SGLang", "mlx-lm"),
    computes={"rope_interleaved": True, "router_correction": True, "norm_topk_prob": True},
    defaults=_SIZES,
    configurable=(
        "mlp_only_layers",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        # Transformers' balance loss counts the experts that uncorrected scores would choose.
        *(name for name in MIXTURE if name != "output_router_logits"),
    ),
    theta=_THETA,
    all_linear=WITH_EXPERTS,
    constants={"use_bias": False, "moe_norm_min": 1e-12},
    config_names={
        "attention_bias": "use_bias",
        "mlp_only_layers": _FIRST,
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
    },
    shared_name="moe_num_shared_experts",
    shared_count=2,
    tensors=_NAMED,
    stacked={**STACKED, **SHARED, _CORRECTION: "mlp.gate.moe_statics.e_score_correction_bias"},
    rows=(_CORRECTION,),
    left_out=r".*mtp.*",
    presets={
        "ernie-4.5-21b-a3b": {
            **_SIZES,
            "shared_expert_intermediate_size": 3072,
            "mlp_only_layers": (0,),
            "rope": {"theta": _THETA},
        },
        "ernie-4.5-300b-a47b": {
            **_SIZES,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 54,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 3584,
            "mlp_only_layers": (0, 1, 2),
            "rope": {"theta": _THETA},
        },
    },
)
