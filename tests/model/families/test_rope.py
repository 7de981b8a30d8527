"""The families' rotary embeddings: read as by transformers, and unchanged unless a recipe changes
them."""

import copy
import dataclasses
import importlib
import math
import re
import warnings

import numpy as np
import pytest
import transformers

from model.config import TransformerConfig
from model.families import FAMILIES
from model.lengths import extended_positions, supported_length
from model.rope import attention_scaling, inverse_frequencies
from model.rope_config import RopeConfig
from trainer.huggingface.assets import described

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
# RopeConfig's numbers of each rule.
RULES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "factor": 3.0,
        "short_factor": (1.0,) * 8,
        "long_factor": (2.0,) * 8,
        "original_max_position_embeddings": 16,
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, **RULES["yarn"]}


def of(family, **fields):
    """Returns the config.json of a small model of a family."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    kinds = kinds if "local_rope" in FAMILIES[family].configurable else {}
    return {"model_type": family, **SIZES, **kinds, **fields}


def transformers_rope(fields, layers="full_attention"):
    """Returns transformers' frequencies and temperature, of layers of one kind if there are two."""
    fields = copy.deepcopy(fields)  # which transformers changes
    config = transformers.AutoConfig.for_model(**fields)
    name = fields["model_type"].removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (kind,) = (
        value
        for key, value in vars(modeling).items()
        if key.endswith("RotaryEmbedding") and "Scaled" not in key
    )
    rope = kind(config)
    prefix = f"{layers}_" if hasattr(rope, f"{layers}_inv_freq") else ""
    scaling = getattr(rope, f"{prefix}attention_scaling")
    return getattr(rope, f"{prefix}inv_freq").numpy(), scaling


def check(config, fields):
    """Compares a model's rotary embeddings with those of transformers for a config.json."""
    ropes = {"full_attention": config.rope, "sliding_attention": config.local_rope or config.rope}
    for layers, rope in ropes.items():
        frequencies, scaling = transformers_rope(fields, layers)
        ours = inverse_frequencies(rope, config.rotary_dim)
        np.testing.assert_allclose(ours, frequencies, rtol=6e-7)
        assert attention_scaling(rope) == scaling


@pytest.mark.parametrize(
    ("family", "rule"),
    [(name, rule) for name, family in FAMILIES.items() for rule in family.rules],
)
def test_positions_that_do_not_change_are_the_models(family, rule):
    """Also if one of the changes names the value that the model has."""
    config = TransformerConfig.from_hf_dict(of(family))
    scaled = {} if rule == "yarn" else {"llama_4_scaling_beta": 0.0}
    pairs = config.rotary_dim // 2
    numbers = {
        name: number[:pairs] if isinstance(number, tuple) else number
        for name, number in RULES[rule].items()
    }
    config = dataclasses.replace(config, rope=RopeConfig(rule, 5e5, **numbers), **scaled)
    written = config.to_hf()
    assert TransformerConfig.from_hf_dict(written) == config
    assert config.with_positions() == config
    for name in ("max_position_embeddings", "rope_theta", "rope_scaling"):
        assert config.with_positions(**{name: written[name]}) == config


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": {}},
        {"rope_parameters": {}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {}, "rope_scaling": YARN},
    ],
)
def test_gpt_oss_has_yarn_unless_it_names_another_rule(rope):
    fields = of("gpt_oss", **rope)
    config = TransformerConfig.from_hf_dict(fields)
    check(config, fields)
    longer = config.with_positions(max_position_embeddings=128)
    assert longer == dataclasses.replace(config, max_position_embeddings=128)
    check(longer, longer.to_hf())


def test_a_models_rule_can_be_turned_off():
    """YaRN's, which gpt-oss has if its config.json names no rule."""
    config = TransformerConfig.from_hf_dict(of("gpt_oss"))
    assert config.rope.rule == "yarn"
    for scaling in (None, {}, {"rope_type": "default"}):
        changed = config.with_positions(rope_scaling=scaling)
        assert changed.rope == RopeConfig("default", 150000.0)
        check(changed, changed.to_hf())


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_an_original_length_in_an_override_is_read(family):
    """Also beside that of Phi-3's config.json."""
    config = TransformerConfig.from_hf_dict(of(family, max_position_embeddings=512))
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope["original_max_position_embeddings"] = 128
    changed = config.with_positions(rope_scaling=longrope)
    assert (changed.rope.original_max_position_embeddings, changed.rope.factor) == (128, 4.0)
    check(
        changed,
        of(family, max_position_embeddings=512, rope_scaling=longrope)
        | ({"original_max_position_embeddings": 128} if family == "phi3" else {}),
    )
    check(changed, changed.to_hf())


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"default", "longrope"}))
def test_rules_that_transformers_refuses_in_phi3_are_refused(rule):
    scaling = {"rope_type": rule, **RULES[rule]}
    with pytest.raises(Exception, match=r"must be one of|short_factor"):
        transformers.AutoConfig.for_model(**of("phi3", rope_scaling=dict(scaling))).validate_rope()
    words = rf"^rope_scaling\.rope_type: found '{rule}'; .* phi3 can name default and longrope;"
    with pytest.raises(ValueError, match=words):
        TransformerConfig.from_hf_dict(of("phi3", rope_scaling=scaling))
    with pytest.raises(ValueError, match=words):
        TransformerConfig.from_hf_dict(of("phi3")).with_positions(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            r"rope_scaling\.type: found 'linear'",
        ),
        ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 8.0}}, None),
        ({"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}}, None),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 32}, None),
        (
            {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}},
            r"rope_parameters\.full_attention\.truncate: found False",
        ),
        ({"rope_scaling": {**YARN, "truncate": None}}, r"rope_scaling\.truncate: found None"),
        ({"rope_scaling": {**YARN, "truncate": True}}, None),
    ],
)
def test_gemma_3s_rope_is_read_as_in_transformers_or_refused(rope, refused):
    """What is refused there computes as if it were not given."""
    fields = of("gemma3_text", **rope)
    if refused is None:
        check(TransformerConfig.from_hf_dict(fields), fields)
        return
    with pytest.raises(ValueError, match=f"^{refused}"):
        TransformerConfig.from_hf_dict(fields)
    ((place, given),) = rope.items()
    given = given.get("full_attention", given)
    ignored = {name: value for name, value in given.items() if name != "truncate"}
    plain = {} if "type" in given else {place: ignored}
    if place == "rope_parameters":
        plain = {place: {"full_attention": ignored}}
    for ours, theirs in zip(
        transformers_rope(of("gemma3_text", **plain)), transformers_rope(fields), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


FLAT = {"rope_type": "default", "rope_theta": 5e5}
SLIDING = {"sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({}, None),
        ({"rope_theta": 5e5, "rope_scaling": YARN | {"rope_theta": 5e5}}, None),
        ({"rope_parameters": {"full_attention": YARN, **SLIDING}}, None),
        ({"rope_parameters": {"full_attention": {}, **SLIDING}, "rope_theta": 1e6}, None),
        ({"rope_parameters": {"full_attention": FLAT, **SLIDING}, "rope_scaling": YARN}, None),
        ({"rope_parameters": FLAT}, None),
        ({"rope_parameters": FLAT, "rope_theta": 5e5}, None),
        ({"rope_parameters": FLAT | {"rope_theta": 1e6}}, "rope_parameters: found 'rope_type'"),
        ({"rope_parameters": YARN}, "rope_parameters: found 'rope_type'"),
        ({"rope_theta": 1e6}, "rope_theta: found 1000000.0, which transformers 4 uses in all"),
        (
            {"rope_theta": 1e6, "rope_parameters": {"sliding_attention": 5}},
            "rope_parameters.sliding_attention: found 5; needs an object or null",
        ),
        ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate: found False"),
    ],
)
def test_olmo_3s_ropes_are_read_as_in_transformers_or_refused(rope, refused):
    """What is refused means another model in another version of transformers."""
    fields = of("olmo3", **rope)
    if refused is not None:
        with pytest.raises(ValueError, match=f"^{refused}"):
            TransformerConfig.from_hf_dict(fields)
        return
    config = TransformerConfig.from_hf_dict(fields)
    for written in (
        fields,
        config.to_hf(),
        FAMILIES["olmo3"].published(described(config, fields)[0]),
    ):
        check(config, written)
    longer = config.with_positions(rope_theta=1e6, rope_scaling=YARN)
    assert longer.local_rope == config.local_rope
    check(longer, longer.to_hf())


def test_olmo_3s_export_warns_if_only_transformers_5_reads_both_ropes():
    family, config = FAMILIES["olmo3"], TransformerConfig.preset("olmo3-7b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert family.published(config.to_hf()) == config.to_hf()
    with pytest.warns(UserWarning, match=r"^config\.json: only transformers 5 computes the same"):
        family.published(config.with_positions(rope_theta=1e6).to_hf())


def test_a_temperature_that_follows_from_yarns_factor_grows_with_it():
    config = TransformerConfig.preset("olmo3-7b")
    longer = config.with_positions(**extended_positions(config, 4 * 65536))
    assert longer.rope.factor == 32 and longer.max_position_embeddings == 4 * 65536
    assert attention_scaling(longer.rope) == 0.1 * math.log(32) + 1
    given = dataclasses.replace(config, rope=dataclasses.replace(config.rope, attention_factor=0.9))
    assert extended_positions(given, 4 * 65536)["rope_scaling"]["attention_factor"] == 0.9


def test_rope_that_only_layers_with_a_window_have_is_not_stretched():
    config = TransformerConfig.preset("exaone-4.0-32b")
    longer = config.with_positions(**extended_positions(config, 1 << 20))
    assert longer == dataclasses.replace(config, max_position_embeddings=1 << 20)
    without = TransformerConfig.preset("exaone-4.0-1.2b")
    assert extended_positions(without, 1 << 20)["rope_scaling"]["factor"] == 16 * 16


def test_the_rule_llama3_does_not_say_how_long_the_model_was_trained():
    """Llama 3.2 1B: 32 x 8,192 is twice the length that its config.json and its card state."""
    assert supported_length(TransformerConfig.preset("llama-3.2-1b")) == 1 << 17


BETA = {"llama_4_scaling_beta": 0.5}


@pytest.mark.parametrize(
    ("rope", "beta"),
    [
        ({}, 0.1),
        ({"rope_parameters": {**YARN, **BETA}}, 0.5),
        ({"rope_scaling": {**YARN, **BETA}}, 0.5),
        ({"rope_scaling": {}, "rope_parameters": {**YARN, "type": "yarn", **BETA}}, 0.5),
        ({"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0, **BETA}}, 0.5),
        ({"rope_parameters": {**FLAT, "llama_4_scaling_beta": 0}}, 0),
        ({"rope_parameters": YARN}, "rope_parameters.llama_4_scaling_beta: missing"),
        ({"rope_parameters": {}}, "rope_parameters.llama_4_scaling_beta: missing"),
        (
            {"rope_parameters": {**YARN, "llama_4_scaling_beta": 1}, "rope_scaling": YARN | BETA},
            "rope_scaling and rope_parameters contradict each other: llama_4_scaling_beta 0.5 and",
        ),
        ({"rope_parameters": {**FLAT, **BETA}}, "llama_4_scaling_beta: found 0.5 with rope_type"),
        ({"rope_theta": 2e6}, "rope_theta: 2000000.0 and rope_parameters.rope_theta 1000000.0"),
    ],
)
def test_ministral_3s_scaling_of_queries_is_read_or_refused(rope, beta):
    fields = of("ministral3", **rope)
    if isinstance(beta, str):
        with pytest.raises(ValueError, match=f"^{re.escape(beta)}"):
            TransformerConfig.from_hf_dict(fields)
        return
    config = TransformerConfig.from_hf_dict(fields)
    assert config.llama_4_scaling_beta == beta
    for written in (fields, config.to_hf()):
        check(config, written)
        theirs = transformers.AutoConfig.for_model(**copy.deepcopy(written)).rope_parameters
        assert theirs["llama_4_scaling_beta"] == beta
    # Transformers' computation needs the original length, whatever the rule.
    assert theirs["original_max_position_embeddings"] is not None


def test_ministral_3s_queries_are_scaled_alike_when_positions_are_stretched():
    config = TransformerConfig.preset("ministral-3-3b")
    longer = config.with_positions(**extended_positions(config, 1 << 20))
    assert longer == dataclasses.replace(
        config,
        rope=dataclasses.replace(config.rope, factor=64.0),
        max_position_embeddings=1 << 20,
    )
    with pytest.raises(ValueError, match=r"^llama_4_scaling_beta: found 0\.1 with rope_type"):
        config.with_positions(rope_scaling=None)
    source = config.to_hf()
    del source["rope_scaling"]
    written, left_out = described(longer, source)
    assert TransformerConfig.from_hf_dict(written) == longer and left_out == []


def test_an_override_of_gemma_3_may_have_the_older_key():
    """A recipe means what it says; the export has the key that transformers reads."""
    config = TransformerConfig.from_hf_dict(of("gemma3_text"))
    changed = config.with_positions(rope_scaling={"type": "linear", "factor": 8.0})
    assert changed.rope == RopeConfig("linear", 1e6, 8.0)
    check(changed, changed.to_hf())
