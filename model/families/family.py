"""A family of models: how its Hugging Face config.json maps to `model.config.TransformerConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..adapter import ATTENTION, FEED_FORWARD, ROUTER
from ..number_checks import require_int
from ..rope_config import ROPE_RULES

# Fields of config.json that name a computation, with the values that disable it. A family that
# supports one takes it; all others refuse another value by name.
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False, None),
        "attention_bias": (False, None),
        "attention_chunk_size": (None,),
        "attention_dropout": (0, None),
        "attention_multiplier": (None,),
        "attn_logit_softcapping": (None,),
        "capacity_factor": (None,),
        "clip_qkv": (None,),
        "decoder_sparse_step": (1, None),
        "drop_tokens": (False, None),
        "embd_pdrop": (0, None),
        "embedding_multiplier": (1, None),
        "expert_capacity": (None,),
        "first_k_dense_replace": (0, None),
        "final_logit_softcapping": (None,),
        "hidden_act": ("silu", "swish", None),  # two names of the same function
        "hidden_activation": ("silu", "swish", None),
        "is_causal": (True, None),
        "is_encoder_decoder": (False, None),
        "kv_lora_rank": (None,),
        "layer_types": (None,),
        "llama_4_scaling_beta": (0, None),
        "local_rope": (None,),
        "logits_scaling": (1, None),
        "mlp_bias": (False, None),
        "mlp_only_layers": ([], (), None),
        "moe_intermediate_size": (None,),
        "n_group": (1, None),
        "n_shared_experts": (0, None),
        "no_rope_layers": (None,),
        "norm_topk_prob": (False, None),
        "num_experts": (0, None),
        "num_experts_per_tok": (None,),
        "num_local_experts": (0, 1, None),
        "output_router_logits": (False, None),
        "partial_rotary_factor": (1, None),
        "per_layer_config": (None, {}),
        "pretraining_tp": (1, None),
        "pruned_heads": ({}, None),
        "qk_layernorm": (False, None),
        "query_pre_attn_scalar": (None,),
        "resid_pdrop": (0, None),
        "residual_dropout": (0, None),
        "residual_multiplier": (1, None),
        "routed_scaling_factor": (1, None),
        "router_aux_loss_coef": (0, None),
        "router_jitter_noise": (0, None),
        "router_z_loss_coef": (0, None),
        "shared_expert_intermediate_size": (0, None),
        "sliding_window": (None,),
        "swiglu_alpha": (1.702, None),
        "swiglu_limit": (7.0, None),
        "topk_group": (1, None),
        "use_bidirectional_attention": (False, None),
        "use_qk_norm": (False, None),
        "use_sliding_window": (False, None),
    }
)
# Fields of TransformerConfig that follow from the family, not from config.json; a family may take
# them.
BY_FAMILY = (
    "output_bias",
    "qk_norm",
    "norms",
    "norm_offset",
    "activation",
    "scaled_embeddings",
    "attention_sinks",
    "rope_interleaved",
    "rope_with_window_only",
    "expert_bias",
    "router_scores",
    "router_correction",
    "shared_expert_gate",
)
# Fields of NEUTRAL that every mixture of experts takes.
MIXTURE = (
    "num_experts",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_z_loss_coef",
)
# What PEFT's all-linear adapts if it counts experts and router as linear maps, which they once were
# in transformers.
WITH_EXPERTS = (*ATTENTION, *FEED_FORWARD, ROUTER)
# Transformers 5's names for a layer's experts in memory, all in one tensor: gate_proj above
# up_proj.
STACKED = MappingProxyType(
    {
        "mlp.gate.weight": "mlp.gate.weight",
        "mlp.experts.gate_proj.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.up_proj.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
    }
)
# Fields whose JSON types are checked first: whole numbers of at least 1, objects, and lists.
_COUNTS = (
    "num_hidden_layers",
    "max_position_embeddings",
    "no_rope_layer_interval",
)
# The last two are those of MLX and of older versions of compressed-tensors.
_QUANTIZATION = ("quantization_config", "quantization", "compression_config")
_OBJECTS = ("rope_parameters", "rope_scaling", *_QUANTIZATION)
_LISTS = {"layer_types": str, "no_rope_layers": int, "mlp_only_layers": int}
# A refusal's advice, if there is more to say than the neutral value.
_INSTEAD = {
    "attention_dropout": (
        "only 0 is supported (it acts in training alone: set it to 0 to evaluate, chat, or train "
        "without it)"
    ),
    "pretraining_tp": (
        "only 1 is supported (the weights are the same: set it to 1 to accept another order of "
        "summation)"
    ),
    "sliding_window": "only full attention is supported",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, by Hugging Face's names.

    Attributes:
      model_type, architecture: as in config.json.
      computes: fields of `TransformerConfig` equal in all of the family's models and absent from
        its config.json.
      defaults: values of fields that config.json may omit, if they differ from TransformerConfig's
        (transformers' defaults).
      configurable: fields of NEUTRAL or BY_FAMILY that the family's models may set; they become
        TransformerConfig's of the same name.
      ignores: fields of NEUTRAL that transformers does not read in this family, whatever their
        value.
      theta: RoPE's base if config.json omits it.
      constants: additional fields of a written config.json.
      config_names: fields of `TransformerConfig` with another name in its config.json -> that name.
      tensors: tensor names that differ from ours: a layer's parameter -> its name in the files,
        with {j} for the expert if each has separate tensors. gate_proj and up_proj of experts may
        share a tensor.
      stacked: the same for files with experts as transformers 5 holds them in memory, if different.
      rows: a layer's parameters that are vectors, and in the files matrices of one row.
      left_out: a regular expression for tensors of published files that transformers does not read:
        layers that predict tokens after the next one. They are left out, with a warning.
      interleaved: experts' tensors are input-first, and in a shared one gate_proj and up_proj
        alternate.
      all_linear: in mixtures, the projections that PEFT's all-linear adapts.
      fused: tensors in the files that stack the weights of several projections: module ->
        projections.
      stored_as: quantization methods, by config.json's names, in which published experts can be
        read.
      trained_lengths: max_position_embeddings of published models -> their trained length, if less.
      rules: the RoPE rules that its config.json can name.
      llama_cpp_rules: those that llama.cpp reads; () if it reads no number of RoPE.
      without_rope_scaling: other programs that read none of RoPE's rules.
      without_window: other programs that do not read `sliding_window`.
      without_correction: other programs that choose experts without their correction.
      presets: published sizes: fields of TransformerConfig, and `rope`, a mapping of RopeConfig's.
    """

    model_type: str
    architecture: str
    computes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    configurable: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    theta: float = 10000.0
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stacked: Mapping[str, str] = dataclasses.field(default_factory=lambda: STACKED)
    rows: tuple[str, ...] = ()
    left_out: str | None = None
    interleaved: bool = False
    all_linear: tuple[str, ...] = ATTENTION
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    stored_as: tuple[str, ...] = ()
    trained_lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    rules: tuple[str, ...] = ROPE_RULES
    llama_cpp_rules: tuple[str, ...] = ("default", "linear", "yarn")
    without_rope_scaling: tuple[str, ...] = ()
    without_window: tuple[str, ...] = ()
    without_correction: tuple[str, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def fused_projections(self) -> dict[str, tuple[str, ...]]:
        """The last parts of the names in `fused`, such as qkv_proj: (q_proj, k_proj, v_proj)."""
        return {
            module.rpartition(".")[2]: tuple(name.rpartition(".")[2] for name in names)
            for module, names in self.fused.items()
        }

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields from config.json, plus the family's fields and defaults.

        Raises:
          ValueError: a field of the wrong JSON type, or one that names a computation the family
            lacks here.
        """
        _check_types(config)
        config = self.normalise({k: v for k, v in config.items() if k not in self.ignores})
        for name, spelling in self.config_names.items():
            if spelling in config:
                config[name] = config.pop(spelling)
        for name in _QUANTIZATION:
            _check_quantization(name, config.pop(name, None), self.stored_as)
        self._drop_full_types(config)
        for name, neutral in NEUTRAL.items():
            if name in config and name not in self.configurable and config[name] not in neutral:
                instead = _INSTEAD.get(
                    name, f"only {neutral[0]!r} is supported in {self.architecture}"
                )
                raise ValueError(f"{name}: found {config[name]!r}; {instead}")
            if name not in self.configurable:
                config.pop(name, None)
        ropes = [
            config[key]
            for key in ("rope_parameters", "rope_scaling")
            if isinstance(config.get(key), dict)
        ]
        if all(rope.get("rope_theta") is None for rope in ropes):
            config["rope_theta"] = (
                self.theta if config.get("rope_theta") is None else config["rope_theta"]
            )
        return {**self.defaults, **config, **self.computes}

    def with_config_name(self, message: str) -> str:
        """Returns an error's message that begins with a field's name, with its name in the
        family's config.json."""
        name, colon, rest = message.partition(":")
        return f"{self.config_names.get(name, name)}{colon}{rest}"

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns config.json in the common form, without the family's ways of disabling
        computations."""
        return dict(config)

    def _drop_full_types(self, config: dict[str, Any]) -> None:
        """Removes `layer_types` that name full attention in each layer of a family without kinds of
        layers, unless a window contradicts them."""
        kinds = config.get("layer_types")
        if "layer_types" in self.configurable or not kinds or {*kinds} != {"full_attention"}:
            return
        is_each = len(kinds) == config.get("num_hidden_layers", len(kinds))
        if is_each and {**self.defaults, **config}.get("sliding_window") is None:
            del config["layer_types"]

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns config.json's fields from those of TransformerConfig."""
        own = {
            name: value
            for name, value in fields.items()
            if name not in self.computes and self._writes(name)
        }
        if not own.get("router_z_loss_coef"):  # not a field of transformers
            own.pop("router_z_loss_coef", None)
        own = {self.config_names.get(name, name): value for name, value in own.items()}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "use_cache": True,
            **self.constants,
            **own,
        }

    def published(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a whole config.json in the form of the family's published ones, which older
        versions of transformers need; warns if that form cannot describe the model."""
        return dict(written)

    def _writes(self, name: str) -> bool:
        if name in NEUTRAL or name in BY_FAMILY:
            return name in self.configurable
        return name not in ("adapter", "family")


def _check_types(config: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the field, unless the fields read by `normalise` have their JSON
    types."""
    for name in _COUNTS:
        if config.get(name) is not None or (name == "num_hidden_layers" and name in config):
            require_int(name, config[name], at_least=1)
    for name in _OBJECTS:
        if not isinstance(config.get(name), (dict, type(None))):
            raise ValueError(f"{name}: found {config[name]!r}; needs an object or null")
    for name, of in _LISTS.items():
        values = config.get(name)
        if values is not None and not (
            isinstance(values, (list, tuple)) and all(isinstance(value, of) for value in values)
        ):
            raise ValueError(
                f"{name}: found {values!r}; a list of {'names' if of is str else 'numbers'} or "
                "null would work"
            )


def _check_quantization(
    field: str, config: Mapping[str, Any] | None, methods: tuple[str, ...]
) -> None:
    """Raises ValueError unless weights are unquantized, in one of these methods, or in
    bitsandbytes' NF4 with double quantization."""
    if not config or config.get("quant_method") in methods:
        return
    nf4 = {
        "quant_method": "bitsandbytes",
        "load_in_8bit": False,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    for name, needed in nf4.items():
        if (config.get(name) or False) != needed:
            raise ValueError(
                f"{field}: {name}: found {config.get(name)!r}, and only {needed!r} is "
                "read, NF4 with double quantization; use the unquantized model, which "
                "adapter.quantize quantizes on reading"
            )


# `llama_cpp_rules` of families whose converter there is Llama's, and `without_window` of Llama's
# layer with a window.
AS_LLAMA = ("default", "linear", "yarn", "llama3")
AS_MISTRAL = ("llama.cpp", "SGLang", "mlx-lm")


PARTIAL = "partial_rotary_factor"


def with_partial_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with its `partial_rotary_factor` as a field of its own; transformers 5
    writes it within the rotary embedding."""
    config = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict) and config[key].get(PARTIAL) is not None:
            rope = dict(config[key])
            config[PARTIAL] = rope.pop(PARTIAL)
            config[key] = rope
    return config


def alternating(layers: int) -> list[str]:
    """Returns `layer_types` with a window in every second layer, from the first on."""
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]


class WindowedFamily(Family):
    """A family whose configs have `use_sliding_window`, and name a window even for layers without
    one."""

    def normalise(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Family.normalise`. Layers of both kinds are refused."""
        config = dict(config)
        kinds = set(config.get("layer_types") or ())
        if not config.get("use_sliding_window") and kinds <= {"full_attention"}:
            for name in ("sliding_window", "max_window_layers", "layer_types"):
                config.pop(name, None)
        return config
