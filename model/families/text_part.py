"""The config.json of a text model, also of one inside a vision-language model or saved without its
head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Fields of the whole model that hold for its text model too, unless that has its own.
_SHARED = ("bos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")


@dataclasses.dataclass(frozen=True)
class VisionLanguageModel:
    """A vision-language model that computes the same as its text model if there is only text.

    Attributes:
      text_type: `model_type` of a `text_config` that names none.
      is_tied: whether the head is the embedding if config.json does not say so; None if
        `text_config` may say so too.
    """

    text_type: str
    is_tied: bool | None


# By `architectures`. PaliGemma's texts are not causal, and Mllama's layers differ.
VISION_LANGUAGE_MODELS: Mapping[str, VisionLanguageModel] = {
    "Gemma3ForConditionalGeneration": VisionLanguageModel("gemma3_text", True),
    "Mistral3ForConditionalGeneration": VisionLanguageModel("mistral", True),
    "LlavaForConditionalGeneration": VisionLanguageModel("llama", None),
}


def vision_language_architecture(config: Mapping[str, Any]) -> str | None:
    """Returns the architecture of a config.json that is in VISION_LANGUAGE_MODELS; None for other
    models."""
    named = config.get("architectures")
    names = named if isinstance(named, list) else []
    texts = (name for name in names if isinstance(name, str))
    return next((name for name in texts if name in VISION_LANGUAGE_MODELS), None)


def text_fields(config: Mapping[str, Any], architectures: Mapping[str, str]) -> dict[str, Any]:
    """Returns the config.json of a model's text part with its head, as `...ForCausalLM` has it; for
    other models the same fields.

    Args:
      architectures: `model_type` -> architecture of the supported text models.

    Raises:
      ValueError: `text_config` is missing, or of an unsupported model.
    """
    name = vision_language_architecture(config)
    if name is None:
        return _with_head(config, architectures)
    text, model = config.get("text_config"), VISION_LANGUAGE_MODELS[name]
    if not isinstance(text, dict):
        raise ValueError(f"text_config: found {text!r:.80}; {name} needs an object")
    model_type = text.get("model_type")
    if model_type is None:
        model_type = model.text_type
    if not isinstance(model_type, str) or model_type not in architectures:
        raise ValueError(
            f"text_config.model_type: found {model_type!r}; the text part of {name} is read if it "
            f"is one of {', '.join(architectures)}"
        )
    shared = {field: config[field] for field in _SHARED if config.get(field) is not None}
    fields = {**text, **{field: shared[field] for field in shared if text.get(field) is None}}
    if config.get("eos_token_id") is not None:  # also ends of turns, which the text model lacks
        fields["eos_token_id"] = config["eos_token_id"]
    tied = config.get("tie_word_embeddings")
    if model.is_tied is not None:
        fields["tie_word_embeddings"] = model.is_tied if tied is None else tied
    elif tied:
        fields["tie_word_embeddings"] = True
    return {**fields, "architectures": [architectures[model_type]], "model_type": model_type}


def _with_head(config: Mapping[str, Any], architectures: Mapping[str, str]) -> dict[str, Any]:
    """Returns config.json with the architecture that has a head, where it names the one without,
    such as LlamaModel: transformers adds the head."""
    whole = {
        architecture.replace(
            "ForCausalLM", "TextModel" if model_type.endswith("_text") else "Model"
        ): architecture
        for model_type, architecture in architectures.items()
    }
    named = config.get("architectures")
    if isinstance(named, list) and len(named) == 1 and str(named[0]) in whole:
        return {**config, "architectures": [whole[named[0]]]}
    return dict(config)
