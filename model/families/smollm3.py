"""SmolLM3: Llama's layer, without RoPE in every fourth; custom models may have a sliding window in
some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import AS_LLAMA, WindowedFamily

_LAYERS = 36
_SIZES = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 128004,
}


class SmolLM3Family(WindowedFamily):
    """A family whose configs name the layers without RoPE, or their interval, and the layers with a
    window."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`. Published configs have `pretraining_tp`, which transformers'
        SmolLM3 does not read.

        Raises:
          ValueError: layers have a window that `use_sliding_window` disables: some of transformers'
            attention implementations then apply it, and others do not.
        """
        config = super().normalise(config)
        has_window = (
            config.pop("use_sliding_window", False) and config.get("sliding_window") is not None
        )
        if not has_window and "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError(
                "layer_types: found 'sliding_attention' without use_sliding_window true and a "
                "sliding_window; these two, or 'full_attention' in every layer, would work"
            )
        interval = config.pop("no_rope_layer_interval", None) or 4
        layers = config.get("num_hidden_layers", _LAYERS)
        config.pop("pretraining_tp", None)
        if config.get("no_rope_layers") is None:
            config["no_rope_layers"] = [int((i + 1) % interval != 0) for i in range(layers)]
        if not has_window:
            config["sliding_window"] = config["layer_types"] = None
        elif config.get("layer_types") is None:
            config["layer_types"] = [
                "full_attention" if roped else "sliding_attention"
                for roped in config["no_rope_layers"]
            ]
        return config

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.write`."""
        return {
            **super().write(fields),
            "use_sliding_window": fields.get("sliding_window") is not None,
        }


SMOLLM3 = SmolLM3Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    llama_cpp_rules=AS_LLAMA,
    without_window=("llama.cpp",),
    defaults={
        **_SIZES,
        "max_position_embeddings": 32768,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    configurable=("attention_bias", "mlp_bias", "no_rope_layers", "sliding_window", "layer_types"),
    theta=2e6,
    presets={
        "smollm3-3b": {
            **_SIZES,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "bos_token_id": None,
            "eos_token_id": 128012,
            "no_rope_layers": (1, 1, 1, 0) * (_LAYERS // 4),
            "rope": {"theta": 5e6},
        },
    },
)
