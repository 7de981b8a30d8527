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
      own_type: a `model_type` of `text_config` that means `text_type`; defaults: of its fields,
        where they differ.
    """

    text_type: str
    is_tied: bool | None
    own_type: str | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# By `architectures`. PaliGemma's texts are not causal, and Mllama's layers differ.
VISION_LANGUAGE_MODELS: Mapping[str, VisionLanguageModel] = {
    "Gemma3ForConditionalGeneration": VisionLanguageModel("gemma3_text", True),
    "Mistral3ForConditionalGeneration": VisionLanguageModel("mistral", True),
    "LlavaForConditionalGeneration": VisionLanguageModel("llama", None),
    "Qwen3VLForConditionalGeneration": VisionLanguageModel(
        "qwen3", False, "qwen3_vl_text", {"max_position_embeddings": 128000, "rope_theta": 5e5}
    ),
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
    if model_type is None or model_type == model.own_type:
        model_type, text = model.text_type, _with_one_position(text, model.defaults)
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


def _with_one_position(text: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a text model's config.json with these defaults, and without the sections of channels
    that three positions rotate: a text's are equal."""
    fields = dict(text)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(key), dict):
            rope = fields[key].items()
            fields[key] = {name: value for name, value in rope if not name.startswith("mrope_")}
            if fields[key].get("rope_theta") is not None:
                defaults = {name: x for name, x in defaults.items() if name != "rope_theta"}
    return {**defaults, **fields}


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
