"""A model's sizes, rotary embedding and family: presets, and conversion from and to Hugging Face's
config.json."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from .adapter import FEED_FORWARD, ROUTER, AdapterConfig
from .config_checks import SLIDING, require_consistent, require_fitting_adapter, require_sizes
from .families import FAMILIES, Family, causal_fields, family_of, find_preset
from .rope_config import RopeConfig

# The fields that may change for the same weights; the names are Hugging Face's.
POSITIONS = ("rope_theta", "rope_scaling", "max_position_embeddings")
ROUTER_LOSSES = ("output_router_logits", "router_aux_loss_coef", "router_z_loss_coef")
ADJUSTABLE = (*POSITIONS, *ROUTER_LOSSES)
# The prefix of the layers' stacked parameters in the flat dictionary.
LAYERS = "layers."


class LayerKind(NamedTuple):
    """What distinguishes layers of one kind: the rotary embedding and the sliding window; None if
    they have none."""

    rope: RopeConfig | None
    window: int | None


class LayerStack(NamedTuple):
    """Consecutive layers with the same parameters, which are stacked.

    Attributes:
      prefix: of their parameters' names: LAYERS, and in a model with several stacks the numbers of
        the first and the last layer.
      first: the number of the first layer.
      config: a model of these layers alone.
    """

    prefix: str
    first: int
    config: TransformerConfig

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.config.num_hidden_layers


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes and variations of a LLaMA-like model. Field names are Hugging Face's, except
    `rope`, which Hugging Face spells in two ways.

    `num_key_value_heads` and `head_dim` may be left out (None): they become `num_attention_heads`
    and `hidden_size // num_attention_heads`. `eos_token_id` is an int or, with several, a tuple.
    Hashable, so it may be a static argument of jax.jit. Raises a one-line ValueError that names the
    field.

    Attributes:
      sliding_window: queries see only keys fewer than this many tokens away; None for all. With
        `layer_types` it applies to layers of type "sliding_attention"; those of type
        "full_attention" have no window.
      partial_rotary_factor: the fraction of a head's channels that RoPE rotates, the first ones.
      no_rope_layers: 1 for a layer with RoPE, 0 for one without; None for RoPE in all layers.
      embedding_multiplier: multiplies the embeddings.
      residual_multiplier: multiplies each branch before it is added to the residual stream.
      attention_multiplier: multiplies the scores; None for head_dim ** -0.5.
      query_pre_attn_scalar: multiplies the scores by query_pre_attn_scalar ** -0.5; None for
        `attention_multiplier`.
      llama_4_scaling_beta: multiplies queries at position p by 1 + beta * log(1 + floor(p / o)),
        where o is `rope`'s original length; 0 for no scaling.
      logits_scaling: divides the logits.
      attn_logit_softcapping, final_logit_softcapping: scores and logits x become
        cap * tanh(x / cap); None for no cap.
      local_rope: the rotary embedding of layers of type "sliding_attention"; None for `rope`.
      family: a name in `model.families.FAMILIES`.
      output_bias: whether the output projection has a bias; None for `attention_bias`, which
        decides for q, k and v.
      qk_norm: the RMS norm of queries and keys before RoPE: "none", per "head", or over "all" heads
        together.
      norms: whether norms come "before" attention and feed-forward, "after" them, or "both".
      norm_offset: added to the weights of norms.
      activation: of the feed-forward's gate: "silu"; "gelu_tanh", GELU's tanh approximation; or
        "clamped", the gate of gpt-oss's experts.
      scaled_embeddings: whether embeddings are multiplied by the square root of hidden_size.
      rope_interleaved: whether the channels that RoPE rotates together are neighbours, 2c and
        2c + 1, instead of one from each half.
      rope_with_window_only: whether, in a model with a `sliding_window`, layers without one have no
        RoPE.
      attention_sinks: whether each head has a learned score that joins the softmax's denominator.
      num_experts: feed-forwards per layer, of which a router sends each token to
        num_experts_per_tok; 0 for one feed-forward and no router.
      mlp_only_layers: the numbers of the layers of a mixture that have one feed-forward, of
        intermediate_size, and no router.
      moe_intermediate_size: the experts' width; None for intermediate_size.
      expert_bias: whether the experts' projections and the router have biases.
      router_scores: how a router scores its logits: "softmax" over the experts, or an elementwise
        "sigmoid".
      router_correction: whether a per-expert constant is added to the scores to choose experts, but
        not to their weights.
      norm_topk_prob: whether the weights of a token's experts are normalized to sum to 1;
        routed_scaling_factor multiplies them.
      shared_expert_intermediate_size: the width of an expert that every token goes to; 0 for none.
      shared_expert_gate: whether a sigmoid of the token multiplies its output.
      output_router_logits: whether the routers' balance loss times router_aux_loss_coef is trained
        too; router_z_loss_coef, which no config.json has, is the coefficient of their z-loss.
      adapter: the adapters of the projections, if there are any; all other weights are frozen.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # None until __post_init__ fills them in.
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None
    partial_rotary_factor: float = 1.0
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    query_pre_attn_scalar: float | None = None
    llama_4_scaling_beta: float = 0.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    family: str = "llama"
    output_bias: bool = None  # type: ignore[assignment]
    qk_norm: str = "none"
    norms: str = "before"
    norm_offset: float = 0.0
    activation: str = "silu"
    scaled_embeddings: bool = False
    rope_interleaved: bool = False
    rope_with_window_only: bool = False
    attention_sinks: bool = False
    num_experts: int = 0
    num_experts_per_tok: int | None = None
    mlp_only_layers: tuple[int, ...] = ()
    moe_intermediate_size: int | None = None
    expert_bias: bool = False
    router_scores: str = "softmax"
    router_correction: bool = False
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0
    adapter: AdapterConfig | None = None

    def __post_init__(self) -> None:
        for name in ("eos_token_id", "layer_types", "no_rope_layers", "mlp_only_layers"):
            if isinstance(getattr(self, name), list):  # lists are not hashable
                self._set(name, tuple(getattr(self, name)))
        if self.output_bias is None:
            self._set("output_bias", self.attention_bias)
        if self.num_key_value_heads is None:
            self._set("num_key_value_heads", self.num_attention_heads)
        require_sizes(self)
        if self.head_dim is None:
            self._set("head_dim", self.hidden_size // self.num_attention_heads)
        require_consistent(self)
        for name in ("rope", "local_rope"):
            rope: RopeConfig | None = getattr(self, name)
            if rope is not None and rope.rule == "dynamic":  # grows from the model's own length
                length = self.max_position_embeddings
                changed = dataclasses.replace(rope, original_max_position_embeddings=length)
                self._set(name, changed)
        if self.adapter is not None and self.num_experts:
            # Expand all-linear to the projections that PEFT targets.
            all_linear = FAMILIES[self.family].all_linear
            self._set("adapter", self.adapter.of_mixture(all_linear))
        require_fitting_adapter(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def adapter_of(self, projection: str) -> AdapterConfig | None:
        """Returns the adapter of a projection, such as q_proj, if it has one."""
        return (
            self.adapter
            if self.adapter is not None and projection in self.adapter.projections
            else None
        )

    def with_adapter(self, adapter: AdapterConfig) -> TransformerConfig:
        """Returns this model with adapters on its projections; the model itself for rank 0."""
        return dataclasses.replace(self, adapter=adapter) if adapter.rank else self

    def projection_sizes(self, name: str) -> tuple[int, int]:
        """Returns the input and output sizes of a projection, such as q_proj; for experts, those of
        one expert."""
        if name == ROUTER:
            return self.hidden_size, self.num_experts
        heads = (
            self.num_attention_heads if name in ("q_proj", "o_proj") else self.num_key_value_heads
        )
        width = self.expert_width if name in FEED_FORWARD else heads * self.head_dim
        return (
            (width, self.hidden_size)
            if name in ("o_proj", "down_proj")
            else (self.hidden_size, width)
        )

    @functools.cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """The runs of consecutive layers with the same parameters, in order: one, unless some
        layers of a mixture have no experts."""
        if not self.mlp_only_layers:
            return (LayerStack(LAYERS, 0, self),)
        numbers = range(self.num_hidden_layers)
        runs = itertools.groupby(numbers, lambda i: i in self.mlp_only_layers)
        return tuple(self._stack(list(run), is_dense) for is_dense, run in runs)

    def _stack(self, numbers: list[int], is_dense: bool) -> LayerStack:
        """One of several stacks, the layers of these numbers."""
        first, last = numbers[0], numbers[-1]
        changes: dict[str, Any] = {"num_hidden_layers": len(numbers), "mlp_only_layers": ()}
        for name in ("layer_types", "no_rope_layers"):
            if (of_layers := getattr(self, name)) is not None:
                changes[name] = of_layers[first : last + 1]
        if is_dense:
            changes |= {
                "num_experts": 0,
                "num_experts_per_tok": None,
                "moe_intermediate_size": None,
                "shared_expert_intermediate_size": 0,
                # In a mixture, PEFT's gate_proj, up_proj and down_proj are the experts'.
                "adapter": self.adapter and self.adapter.of_attention(),
            }
        config = dataclasses.replace(self, **changes)
        return LayerStack(f"{LAYERS}{first}-{last}.", first, config)

    @property
    def expert_layers(self) -> int:
        """The number of layers with experts."""
        return sum(stack.layers for stack in self.stacks if stack.config.num_experts)

    @property
    def expert_width(self) -> int:
        """The width of a feed-forward; in a mixture of experts, of one expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def active_width(self) -> int:
        """The total width of the feed-forwards that a token goes to."""
        routed = (self.num_experts_per_tok or 1) * self.expert_width
        return routed + self.shared_expert_intermediate_size

    @property
    def feed_forward_widths(self) -> tuple[int, ...]:
        """The widths of all kinds of feed-forwards in the model."""
        widths = [stack.config.expert_width for stack in self.stacks]
        return tuple(dict.fromkeys(filter(None, (*widths, self.shared_expert_intermediate_size))))

    @property
    def router_aux_loss(self) -> float:
        """The coefficient of the routers' balance loss; 0 if it is not trained."""
        return self.router_aux_loss_coef if self.output_router_logits else 0.0

    @property
    def has_router_losses(self) -> bool:
        """Whether a router loss is trained in addition to the token loss."""
        return bool(self.num_experts and (self.router_aux_loss or self.router_z_loss_coef))

    @functools.cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """One period of the layers' kinds: layer i has kind i modulo their number. A window that
        all layers share belongs to the mask (`common_window`) and is not included."""
        local = LayerKind(self.local_rope or self.rope, self.sliding_window)
        has_rope = not (self.rope_with_window_only and self.sliding_window and self.layer_types)
        full = LayerKind(self.rope if has_rope else None, None)
        kinds = [
            local if self.layer_types and self.layer_types[i] == SLIDING else full
            for i in range(self.num_hidden_layers)
        ]
        for i, roped in enumerate(self.no_rope_layers or ()):
            kinds[i] = kinds[i] if roped else kinds[i]._replace(rope=None)
        period = next(
            p
            for p in range(1, len(kinds) + 1)
            if all(kind == kinds[i % p] for i, kind in enumerate(kinds))
        )
        return tuple(kinds[:period])

    @property
    def common_window(self) -> int | None:
        """The sliding window that all layers share; None if there is none, or if it depends on the
        layer's type."""
        return None if self.layer_types else self.sliding_window

    @property
    def scale(self) -> float:
        """The factor by which attention scores are multiplied."""
        if self.query_pre_attn_scalar is not None:
            return self.query_pre_attn_scalar**-0.5
        return (
            1.0 / math.sqrt(self.head_dim)
            if self.attention_multiplier is None
            else self.attention_multiplier
        )

    @property
    def rotary_dim(self) -> int:
        """The number of a head's channels that RoPE rotates."""
        return int(cast(int, self.head_dim) * self.partial_rotary_factor)

    @property
    def embedding_scale(self) -> float:
        """The factor by which embeddings are multiplied."""
        return self.embedding_multiplier * (
            math.sqrt(self.hidden_size) if self.scaled_embeddings else 1.0
        )

    @classmethod
    def from_hf(cls, folder: str | Path) -> TransformerConfig:
        """Reads `folder`/config.json. Raises ValueError if it is missing, not JSON, or describes an
        unsupported model."""
        path = Path(folder) / "config.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"{folder}: no config.json here; a Hugging Face model folder has one"
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error.reason}); download it again") from None
        try:
            return cls.from_hf_dict(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error}); download it again") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_hf_dict(cls, config: dict[str, Any]) -> TransformerConfig:
        """Reads a Hugging Face config; absent fields take the defaults of transformers' config
        class for the family. Of a vision-language model, reads the text model; see `text_fields`.

        Accepts both spellings of the rotary embedding: `rope_theta` with `rope_scaling`, and
        `rope_parameters` (transformers 5). Raises ValueError for anything that would make the model
        differ from what is implemented.
        """
        if not isinstance(config, dict):
            raise ValueError(
                f"a Hugging Face config is a JSON object, found {type(config).__name__}"
            )
        config = causal_fields(config)
        family = family_of(config)
        try:
            return cls._of_family(family, family.read(config))
        except ValueError as error:
            raise ValueError(family.with_config_name(str(error))) from None

    @classmethod
    def _of_family(cls, family: Family, config: dict[str, Any]) -> TransformerConfig:
        """Returns the model of the fields from `family.read`; raises like from_hf_dict."""
        names = {f.name for f in dataclasses.fields(cls)} - {
            "rope",
            "local_rope",
            "family",
            "adapter",
        }
        nullable = {f.name for f in dataclasses.fields(cls) if "None" in str(f.type)}
        nullable |= {"head_dim", "num_key_value_heads"}
        values = {name: config[name] for name in names if name in config}
        for name in values:
            if values[name] is None and name not in nullable:
                raise ValueError(f"{name}: found null; needs a value")
        length = values.get("max_position_embeddings", cls.max_position_embeddings)
        local = config.get("local_rope_parameters")
        local_rope = (
            None if local is None else RopeConfig.from_hf({"rope_parameters": local}, length)
        )
        return cls(
            **values,
            rope=RopeConfig.from_hf(config, length),
            local_rope=local_rope,
            family=family.model_type,
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns a Hugging Face config as a JSON-ready dict, without the dtype, which the code
        that writes the weights adds.

        The rotary embedding is written in both spellings, so that transformers 4 and 5 and other
        libraries read the same model.
        """
        values: dict[str, Any] = {
            f.name: list(value) if isinstance(value := getattr(self, f.name), tuple) else value
            for f in dataclasses.fields(self)
            if f.name not in ("rope", "local_rope")
        }
        values["rope_parameters"] = self.rope.to_hf()
        if self.local_rope is not None:
            values["local_rope_parameters"] = self.local_rope.to_hf()
        scaling = {
            name: value for name, value in values["rope_parameters"].items() if name != "rope_theta"
        }
        return FAMILIES[self.family].write(
            {
                **values,
                "rope_theta": self.rope.theta,
                "rope_scaling": None if self.rope.rule == "default" else scaling,
            }
        )

    def with_positions(self, **changes: Any) -> TransformerConfig:
        """Returns this model with changed POSITIONS, in Hugging Face's form: `rope_scaling` is a
        dict or None.

        They change `rope`; `local_rope` stays as it is, and so do a family's own numbers in
        `rope_scaling`. If that lacks the original length, it is this model's. Raises like
        from_hf_dict.
        """
        if not changes:
            return self
        own, rotary = self.to_hf(), self.rope.to_hf()
        fields = {**own, **changes}
        scaling, original = fields["rope_scaling"], "original_max_position_embeddings"
        numbers = own["rope_scaling"] or {}
        kept = {name: value for name, value in numbers.items() if name not in rotary}
        if scaling is None or scaling == {}:  # not None: some families would choose a rule
            fields["rope_scaling"] = {"rope_type": "default", **kept}
        elif isinstance(scaling, dict):
            length = self.rope.original_max_position_embeddings or self.max_position_embeddings
            rule = {"rope_type": scaling["type"]} if "type" in scaling else {}
            fields["rope_scaling"] = {original: length, **kept, **rule, **scaling}
            fields["rope_scaling"].pop("type", None)
        # Both would take precedence over rope_scaling.
        fields |= {"rope_parameters": None, original: None}
        if "local_rope" in FAMILIES[self.family].configurable:
            local = self.local_rope or self.rope
            fields["rope_parameters"] = {SLIDING: local.to_hf()}
        changed = self.from_hf_dict(fields)
        # config.json has no adapter, and names a local embedding even for a model without.
        return dataclasses.replace(changed, adapter=self.adapter, local_rope=self.local_rope)

    def with_length(self, length: int) -> TransformerConfig:
        """Returns the model with `max_position_embeddings` raised to at least `length`; RoPE angles
        do not change.

        With the rule `dynamic` the model stays as it is: there max_position_embeddings is the
        length from which the base grows.
        """
        if self.rope.rule == "dynamic" or length <= self.max_position_embeddings:
            return self
        return dataclasses.replace(self, max_position_embeddings=length)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TransformerConfig:
        """Returns the preset called `name`, with `changes` to its fields.

        `num_key_value_heads` and `head_dim` are derived if neither sets them. Raises ValueError,
        listing the known names, for an unknown one.
        """
        family, fields = find_preset(name)
        ropes = {
            name: RopeConfig(**fields[name]) for name in ("rope", "local_rope") if name in fields
        }
        return cls(**{"family": family.model_type, **family.computes, **fields, **ropes, **changes})
