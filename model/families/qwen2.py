"""Qwen2 and Qwen2.5 (dense): biases of q, k and v, but not of the output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..number_checks import require_int
from .family import WindowedFamily


class QwenFamily(WindowedFamily):
    """A family whose layers have a window from `max_window_layers` on, unless `layer_types` says
    otherwise."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`. A window that no layer has is disabled."""
        config = dict(config)
        if config.get("use_sliding_window") and not self._windowed(config):
            config["use_sliding_window"] = False
        return super().normalise(config)

    @staticmethod
    def _windowed(config: Mapping[str, Any]) -> bool:
        """Whether a layer has a window, with transformers' defaults of the fields."""
        if config.get("layer_types") is not None:
            return "sliding_attention" in config["layer_types"]
        first = config.get("max_window_layers", 28)
        require_int("max_window_layers", first, at_least=0)
        has_size = config.get("sliding_window", 4096) is not None
        return has_size and first < config.get("num_hidden_layers", 32)


QWEN2 = QwenFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    computes={"attention_bias": True, "output_bias": False},
    ignores=("attention_bias",),
    defaults={
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    constants={"use_sliding_window": False},
    presets={
        "qwen2.5-0.5b": {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "rope": {"theta": 1e6},
        },
        "qwen2.5-7b": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "vocab_size": 152064,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "rope": {"theta": 1e6},
        },
    },
)
