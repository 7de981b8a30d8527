"""What a model's configuration must satisfy. Errors are ValueErrors of one line that name the
field."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from .adapter import FEED_FORWARD, ROUTER
from .families import FAMILIES
from .families.family import BY_FAMILY, NEUTRAL
from .number_checks import MOST, is_int, require_bool, require_int, require_number
from .rope_config import PER_CHANNEL, RopeConfig

if TYPE_CHECKING:
    from .config import TransformerConfig

MOST_LAYERS = 10_000
SLIDING = "sliding_attention"
LAYER_TYPES = (SLIDING, "full_attention")


def require_sizes(config: TransformerConfig) -> None:
    """Raises ValueError unless the sizes are whole, and a head's size is given or derivable."""
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ):
        require_int(name, getattr(config, name), at_least=1)
    if config.num_hidden_layers > MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers: found {config.num_hidden_layers}; up to {MOST_LAYERS:,} would work"
        )
    if config.head_dim is None and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"head_dim: not given, and hidden_size {config.hidden_size} is not divisible by "
            f"num_attention_heads {config.num_attention_heads}; give head_dim"
        )


def require_consistent(config: TransformerConfig) -> None:
    """Raises ValueError unless all fields but the adapter are valid and fit each other."""
    _require_heads(config)
    _require_numbers(config)
    _require_layers(config)
    _require_experts(config)
    _require_token_ids(config)
    _require_rope(config)
    _require_family(config)


def require_fitting_adapter(config: TransformerConfig) -> None:
    """Raises ValueError unless the adapter, if there is one, fits the projections."""
    if config.adapter is not None:
        names = config.adapter.projections
        if ROUTER in names and not config.num_experts:
            raise ValueError(
                f"adapter.targets: found {ROUTER!r}, a router, which models without experts "
                "lack; leave it out"
            )
        config.adapter.check_sizes({name: config.projection_sizes(name) for name in names})
        together = list(FAMILIES[config.family].fused_projections.values())
        if config.num_experts:  # one tensor in transformers
            together.append(FEED_FORWARD[:2])
        config.adapter.check_targets(config.family, together)
        dense = {"intermediate_size": config.intermediate_size} if config.mlp_only_layers else {}
        width = "moe_intermediate_size" if config.moe_intermediate_size else "intermediate_size"
        config.adapter.check_blocks(
            {
                "hidden_size": config.hidden_size,
                "head_dim": config.head_dim,
                **dense,
                width: config.expert_width,
                "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
            }
        )


def _require_heads(config: TransformerConfig) -> None:
    """Raises ValueError unless a head's size is even and key heads divide the heads."""
    require_int("head_dim", config.head_dim, at_least=2)
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim: {config.head_dim} is odd; rotary embedding turns halves, so it must be even"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        good = [
            n
            for n in range(1, config.num_attention_heads + 1)
            if config.num_attention_heads % n == 0
        ]
        raise ValueError(
            f"num_key_value_heads: {config.num_key_value_heads} does not divide "
            f"num_attention_heads {config.num_attention_heads}; these do: "
            f"{', '.join(map(str, good))}"
        )


def _require_numbers(config: TransformerConfig) -> None:
    """Raises ValueError unless the scalars have the right types and ranges."""
    require_number("rms_norm_eps", config.rms_norm_eps, above=0)
    require_number("initializer_range", config.initializer_range, above=0, or_equal=True)
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        require_number(name, getattr(config, name), above=0)
    for name in (
        "attention_multiplier",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ):
        if getattr(config, name) is not None:
            require_number(name, getattr(config, name), above=0)
    if config.sliding_window is not None:
        require_int("sliding_window", config.sliding_window, at_least=1)
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "output_bias"):
        require_bool(name, getattr(config, name))


def _require_layers(config: TransformerConfig) -> None:
    """Raises ValueError unless the per-layer lists have one valid entry for each layer."""
    for name, values in (("layer_types", LAYER_TYPES), ("no_rope_layers", (0, 1))):
        of_layers = getattr(config, name)
        if of_layers is None:
            continue
        if len(of_layers) != config.num_hidden_layers:
            raise ValueError(
                f"{name}: found {len(of_layers)} entries; num_hidden_layers "
                f"{config.num_hidden_layers} needs {config.num_hidden_layers}"
            )
        for value in of_layers:
            if value not in values:
                raise ValueError(
                    f"{name}: found {value!r}; supported are {', '.join(map(str, values))}"
                )
    if config.sliding_window is None and SLIDING in (config.layer_types or ()):
        raise ValueError(
            f"sliding_window: found null with {SLIDING!r} in layer_types; needs a number of tokens"
        )


def _require_experts(config: TransformerConfig) -> None:
    """Raises ValueError unless a mixture's numbers are whole and fit each other."""
    require_int("num_experts", config.num_experts, at_least=0)
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        require_number(name, getattr(config, name), above=0, or_equal=True)
    for name in ("norm_topk_prob", "output_router_logits"):
        require_bool(name, getattr(config, name))
    require_number("routed_scaling_factor", config.routed_scaling_factor, above=0)
    require_int(
        "shared_expert_intermediate_size", config.shared_expert_intermediate_size, at_least=0
    )
    _require_dense_layers(config)
    if not config.num_experts:
        return
    if config.moe_intermediate_size is not None:
        require_int("moe_intermediate_size", config.moe_intermediate_size, at_least=1)
    require_int("num_experts_per_tok", config.num_experts_per_tok, at_least=1)
    assert config.num_experts_per_tok is not None
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            f"num_experts_per_tok: found {config.num_experts_per_tok}; the model has "
            f"{config.num_experts} experts, so at most {config.num_experts} would work"
        )


def _require_dense_layers(config: TransformerConfig) -> None:
    """Raises ValueError unless the layers without experts are some of a mixture's layers."""
    layers, dense = config.num_hidden_layers, config.mlp_only_layers
    for number in dense:
        if not is_int(number) or not 0 <= number < layers:
            raise ValueError(
                f"mlp_only_layers: found {number!r}; num_hidden_layers {layers} needs numbers from "
                f"0 to {layers - 1}"
            )
    if dense and (not config.num_experts or len({*dense}) == layers):
        raise ValueError(
            f"mlp_only_layers: found {len({*dense})} of {layers} layers, and num_experts "
            f"{config.num_experts}; a mixture needs experts, in at least one layer"
        )


def _require_token_ids(config: TransformerConfig) -> None:
    """Raises ValueError unless the special tokens are ids."""
    eos = config.eos_token_id if isinstance(config.eos_token_id, tuple) else (config.eos_token_id,)
    for name, values in (
        ("bos_token_id", (config.bos_token_id,)),
        ("eos_token_id", eos),
        ("pad_token_id", (config.pad_token_id,)),
    ):
        for value in values:
            # -1 is what some published configs say for "none"; a `pad_token_id` of -1 is the last
            # row of the embedding, as in torch.
            if value is not None and not (is_int(value) and -1 <= value <= MOST):
                raise ValueError(f"{name}: {value!r} is not a token id")


def _require_rope(config: TransformerConfig) -> None:
    """Raises ValueError unless both rotary embeddings fit a head."""
    require_number("partial_rotary_factor", config.partial_rotary_factor, above=0)
    if config.partial_rotary_factor > 1 or config.rotary_dim % 2 or not config.rotary_dim:
        raise ValueError(
            f"partial_rotary_factor: {config.partial_rotary_factor} of head_dim {config.head_dim} "
            f"makes {config.rotary_dim} channels; needs an even number of at most head_dim"
        )
    _require_fitting_rope(config, "rope", "rope_scaling")
    beta = config.llama_4_scaling_beta
    require_number("llama_4_scaling_beta", beta, above=0, or_equal=True)
    if beta and config.rope.original_max_position_embeddings is None:
        raise ValueError(
            f"llama_4_scaling_beta: found {beta} with rope_type {config.rope.rule!r}, which has no "
            "original_max_position_embeddings to scale queries by; rope_type 'yarn' has it"
        )
    if config.local_rope is not None:
        _require_fitting_rope(config, "local_rope", "local_rope")


def _require_fitting_rope(config: TransformerConfig, name: str, numbers_of: str) -> None:
    """Raises ValueError unless the rotary embedding in the field `name` fits a head.

    Args:
      numbers_of: what messages call the object that holds its numbers.
    """
    rope = getattr(config, name)
    if not isinstance(rope, RopeConfig):
        raise ValueError(f"{name}: {rope!r} is not a RopeConfig")
    for numbers_name in PER_CHANNEL:
        numbers = getattr(rope, numbers_name)
        if numbers is not None and len(numbers) != config.rotary_dim // 2:
            raise ValueError(
                f"{numbers_of}.{numbers_name}: found {len(numbers)} numbers; {config.rotary_dim} "
                f"rotated channels need {config.rotary_dim // 2}"
            )
    if rope.rule == "dynamic" and config.head_dim < 4:
        raise ValueError(
            f"head_dim: {config.head_dim} is too small for rope_type 'dynamic'; 4 or more would "
            "work"
        )


def _require_family(config: TransformerConfig) -> None:
    """Raises ValueError for values that a config.json of this family cannot express, since an
    export would then describe a different model."""
    if config.family not in FAMILIES:
        raise ValueError(f"family: found {config.family!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[config.family]
    plain = {name: getattr(type(config), name) for name in BY_FAMILY} | {
        "output_bias": config.attention_bias
    }
    for name, value in {**plain, **family.computes}.items():
        if name not in family.configurable and getattr(config, name) != value:
            raise ValueError(
                f"{name}: found {getattr(config, name)!r}; models of the family {config.family} "
                f"have {value!r}"
            )
    for rope in filter(None, (config.rope, config.local_rope)):
        if rope.rule not in family.rules:
            raise ValueError(
                f"rope_scaling.rope_type: found {rope.rule!r}; a config.json of the family "
                f"{config.family} can name {' and '.join(family.rules)}; a larger rope_theta "
                "stretches its positions too"
            )
    for name in (f.name for f in dataclasses.fields(config) if f.name in NEUTRAL):
        if (
            name not in (*family.configurable, *family.computes)
            and getattr(config, name) not in NEUTRAL[name]
        ):
            raise ValueError(
                f"{name}: found {getattr(config, name)!r}; models of the family {config.family} "
                f"have {NEUTRAL[name][0]!r}"
            )
