"""The rotary embedding against transformers, at short and long positions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from model.config import TransformerConfig
from model.dropout import TokenInfo
from model.modules import Tokens
from model.parameter_declarations import bind
from model.rope import (
    FLOAT32_LENGTH,
    angles,
    apply_rope,
    attention_scaling,
    inverse_frequencies,
    query_factors,
)
from model.rope_config import RopeConfig
from tests.errors import within

from .build import llama, tiny

POSITIONS = np.array(
    [[0, 1, 2, 1000, 8191, 8192, 32767, 65536, 131071], [0, 0, 1, 1, 2, 2, 0, 1, 8192]], np.int32
)


BASE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
RULES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear by its old name": {"type": "linear", "factor": 3.0, "rope_theta": 5e5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    "yarn over 1M": {
        "rope_type": "yarn",
        "factor": 10.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, given temperature": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 0.9,
    },
    "yarn, two scales": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn, factor from lengths": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 1024,
    },
    "yarn, untruncated by null": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "truncate": None,
    },
    "yarn, no original length": {"rope_type": "yarn", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    },
}


def theirs(config: TransformerConfig) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(transformers.LlamaConfig(**config.to_hf()))


@pytest.mark.parametrize(
    "name", ["llama-7b", "llama-3.1-8b", "llama-3.2-1b", "smollm2-135m", "tiny"]
)
def test_embedding_matches_transformers(name):
    config = TransformerConfig.preset(name)
    reference = theirs(config)
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_equal(frequencies, reference.inv_freq.numpy())
    x = (
        np.random.default_rng(0)
        .standard_normal((*POSITIONS.shape, 3, config.head_dim))
        .astype(np.float32)
    )
    cos, sin = reference(torch.tensor(x), torch.tensor(POSITIONS))
    expected, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x), jnp.asarray(POSITIONS), frequencies), expected, atol=1e-6
    )


@pytest.mark.parametrize(
    ("rule", "spelling"), [*((rule, "rope_scaling") for rule in RULES), ("yarn", "rope_parameters")]
)
def test_every_rule_matches_transformers(rule, spelling):
    """Frequencies, temperature and rotated vectors, from a config that transformers reads as well;
    then written and read back."""
    fields = {**BASE, spelling: dict(RULES[rule])}
    reference = LlamaRotaryEmbedding(
        transformers.LlamaConfig(**{**BASE, spelling: dict(RULES[rule])})
    )
    config = TransformerConfig.from_hf_dict(fields)
    again = TransformerConfig.from_hf_dict(json.loads(json.dumps(config.to_hf())))
    assert again == config
    rewritten = theirs(again)
    for length in (1, 4096, 4097, 8192, 131072):
        x = np.random.default_rng(0).standard_normal((1, 3, 2, config.head_dim)).astype(np.float32)
        positions = np.array([[0, length // 2, length - 1]], np.int32)
        cos, sin = reference(
            torch.tensor(x), torch.tensor(positions)
        )  # recomputes the dynamic frequencies for this length
        frequencies = inverse_frequencies(config.rope, config.head_dim, length)
        scaling = attention_scaling(config.rope)
        assert frequencies.dtype == np.float32
        # Bitwise equal, except that torch's float32 power is not always correctly rounded.
        tolerance = 6e-7 if rule in ("dynamic", "yarn over 1M") else 0
        np.testing.assert_allclose(frequencies, reference.inv_freq.numpy(), rtol=tolerance, atol=0)
        assert scaling == reference.attention_scaling
        exact = float64_frequencies(config.rope, config.head_dim, length)
        np.testing.assert_allclose(frequencies, exact, rtol=2e-6)
        rewritten(torch.tensor(x), torch.tensor(positions))
        np.testing.assert_array_equal(rewritten.inv_freq.numpy(), reference.inv_freq.numpy())
        expected, _ = apply_rotary_pos_emb(
            torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2
        )
        got = apply_rope(jnp.asarray(x), jnp.asarray(positions), frequencies, scaling)
        np.testing.assert_allclose(got, expected, atol=1e-6 + tolerance * length * 4)


def test_an_original_length_outside_the_rule_takes_precedence_as_in_transformers():
    fields = {
        **BASE,
        "original_max_position_embeddings": 1024,
        "rope_parameters": dict(RULES["yarn"]),
    }
    config = TransformerConfig.from_hf_dict(fields)
    reference = LlamaRotaryEmbedding(
        transformers.LlamaConfig(**{**fields, "rope_parameters": dict(RULES["yarn"])})
    )
    np.testing.assert_array_equal(
        inverse_frequencies(config.rope, config.head_dim), reference.inv_freq.numpy()
    )
    assert config.rope.original_max_position_embeddings == 1024


def float64_frequencies(rope: RopeConfig, head_dim: int, length: int) -> np.ndarray:
    """The rules of the papers in float64, written independently: ours may differ only by
    rounding."""
    channel = np.arange(head_dim // 2)
    theta, original = rope.theta, rope.original_max_position_embeddings
    if rope.rule == "dynamic" and length > original:
        theta *= (1 + rope.factor * (length / original - 1)) ** (head_dim / (head_dim - 2))
    plain = theta ** (-2 * channel / head_dim)
    if rope.rule == "linear":
        return plain / rope.factor
    if rope.rule == "llama3":
        turns = original * plain / (2 * np.pi)
        keep = np.clip(
            (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1
        )
        return plain * (keep + (1 - keep) / rope.factor)
    if rope.rule == "yarn":
        first, last = (
            head_dim / 2 * np.log(original / (2 * np.pi * turns)) / np.log(theta)
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        slow = np.clip((channel - first) / (last - first), 0, 1)
        return plain * (1 - slow + slow / rope.factor)
    return plain


@pytest.mark.parametrize("rule", RULES)
def test_a_greater_trained_length_does_not_change_rope(rule):
    """For ours and for transformers, which reads what we write; `dynamic` scales from that length,
    so there the length stays."""
    config = TransformerConfig.from_hf_dict({**BASE, "rope_scaling": dict(RULES[rule])})
    longer = config.with_length(2**20)
    assert (
        longer.max_position_embeddings == (4096 if rule == "dynamic" else 2**20)
        and longer.rope == config.rope
    )
    assert config.with_length(4096) == config.with_length(100) == config
    x = torch.zeros(1, 1, 2, config.head_dim)
    before, after = theirs(config), theirs(longer)
    for reference in (before, after):
        reference(x, torch.tensor([[131071]]))
    np.testing.assert_array_equal(after.inv_freq.numpy(), before.inv_freq.numpy())
    assert after.attention_scaling == before.attention_scaling


@pytest.mark.parametrize(
    ("name", "changes", "written"),
    [
        ("llama-7b", {"rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            "llama-7b",
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 16.0},
                "max_position_embeddings": 32768,
            },
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 16.0,
                    "original_max_position_embeddings": 2048,
                },
                "max_position_embeddings": 32768,
            },
        ),
        (
            "llama-3.1-8b",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 64.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            {"rope_scaling": {**RULES["llama3"], "factor": 64.0}},
        ),
        ("llama-3.1-8b", {"rope_scaling": None}, {"rope_scaling": None}),
    ],
    ids=str,
)
def test_changed_positions_match_transformers(name, changes, written):
    """A rule without an original length scales from the model's, for any new length."""
    config = TransformerConfig.preset(name)
    changed = config.with_positions(**changes)
    hf = {key: value for key, value in config.to_hf().items() if key != "rope_parameters"} | written
    reference = LlamaRotaryEmbedding(transformers.LlamaConfig(**hf))
    np.testing.assert_allclose(
        inverse_frequencies(changed.rope, changed.head_dim), reference.inv_freq.numpy(), rtol=6e-7
    )
    assert attention_scaling(changed.rope) == reference.attention_scaling
    assert changed.max_position_embeddings == changes.get(
        "max_position_embeddings", config.max_position_embeddings
    )
    assert (changed.hidden_size, changed.num_key_value_heads) == (
        config.hidden_size,
        config.num_key_value_heads,
    )


def test_dynamic_uses_one_table_for_a_whole_row():
    config = TransformerConfig.from_hf_dict({**BASE, "rope_scaling": RULES["dynamic"]})
    table = {
        length: inverse_frequencies(config.rope, config.head_dim, length)
        for length in (1, 4096, 8192, 16384)
    }
    np.testing.assert_array_equal(table[1], table[4096])
    assert (
        table[4096][0] == table[16384][0] == 1
    )  # the fastest channel is unchanged, slower ones are slowed more
    assert (table[8192][1:] < table[4096][1:]).all() and (table[16384][1:] < table[8192][1:]).all()


# Relative to the exact product of position and frequency: the phase, at most half a turn, is rounded
# to float32, multiplied by a rounded unit and rounded again; then the sum is rounded. The remainder's
# three roundings are of at most 2^-33 turns per position.
HALF_ULP = 2.0**-24
LONGEST = 1 << 27
ANGLE_ERROR = 4 * np.pi * HALF_ULP + 3 * HALF_ULP * LONGEST * 2 * np.pi * 2.0**-33


@pytest.mark.parametrize("rule", ["default", "dynamic", "yarn"])
def test_far_positions_are_exact(rule):
    """Against float64, up to 2^27 tokens: beyond 2^24 float32 cannot represent odd positions."""
    config = TransformerConfig.from_hf_dict(
        BASE | ({} if rule == "default" else {"rope_scaling": dict(RULES[rule])})
    )
    frequencies = inverse_frequencies(config.rope, config.head_dim, LONGEST)
    scaling = attention_scaling(config.rope)
    rng = np.random.default_rng(0)
    near = [2**n + step for n in range(17, 27) for step in (-1, 0, 1)]
    positions = np.array(
        [[*range(9), *near, *rng.integers(0, LONGEST, 160), LONGEST - 1]], np.int32
    )
    exact = positions.astype(np.float64)[..., None] * frequencies.astype(np.float64)
    computed = np.asarray(jax.jit(lambda p: angles(p, frequencies, LONGEST))(positions), np.float64)
    error = np.abs((computed - exact + np.pi) % (2 * np.pi) - np.pi).max()
    within(error, ANGLE_ERROR, "angles in radians", rule)
    x = rng.standard_normal((*positions.shape, 1, config.head_dim)).astype(np.float32)
    rotated = np.exp(1j * exact)[:, :, None] * scaling * (x[..., :64] + 1j * x[..., 64:])
    got = jax.jit(lambda x, p: apply_rope(x, p, frequencies, scaling, LONGEST))(x, positions)
    # Cosine, sine, temperature, two products and their sum: each rounded once, for a vector as long
    # as the longest of x.
    tolerance = (ANGLE_ERROR + 6 * HALF_ULP) * np.abs(rotated).max()
    np.testing.assert_allclose(
        got, np.concatenate([rotated.real, rotated.imag], -1), rtol=0, atol=tolerance
    )


def test_angles_equal_transformers_up_to_a_length():
    """Bitwise, whether or not the length is known; one token more, and they are exact."""
    frequencies = inverse_frequencies(RopeConfig(), 128)
    theirs = POSITIONS.astype(np.float32)[..., None] * frequencies
    for length in (None, 1, FLOAT32_LENGTH):
        np.testing.assert_array_equal(angles(jnp.asarray(POSITIONS), frequencies, length), theirs)
    assert (
        np.abs(
            np.cos(angles(jnp.asarray(POSITIONS), frequencies, FLOAT32_LENGTH + 1)) - np.cos(theirs)
        ).max()
        > 1e-4
    )


def test_scores_depend_only_on_distance_even_far_away():
    """Queries and keys as projected by a layer: the same scores at the start of a row and 100
    million tokens later."""
    model = llama(tiny(head_dim=32))
    weights = {name: w[0] for name, w in model.weights.of_layers(model.init(0)).items()}
    x = (
        np.random.default_rng(1)
        .standard_normal((1, 12, model.config.hidden_size))
        .astype(np.float32)
    )
    positions_near = np.array([[0, 1, 2, 3, 5, 8, 13, 100, 1000, 10001, 100003, 131071]], np.int32)

    @jax.jit
    def scores(positions):
        attention = bind(model.config, weights).self_attn
        tokens = Tokens(TokenInfo(positions), model.config.rope, LONGEST, model.parallel)
        q, (k, _) = attention.queries(x, tokens), attention.keys_values(x, tokens)
        return jnp.einsum("bqgrd,bkgd->bgrqk", q.reshape(1, 12, 2, 4, 32), k)

    near = scores(positions_near)
    np.testing.assert_allclose(
        scores(positions_near + 100_000_001), near, atol=1e-5 * np.abs(near).max()
    )


def test_bfloat16_is_rounded_once():
    config = TransformerConfig.preset("tiny")
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    x = jnp.asarray(
        np.random.default_rng(1).standard_normal((*POSITIONS.shape, 2, config.head_dim)),
        jnp.bfloat16,
    )
    exact = apply_rope(x.astype(jnp.float32), jnp.asarray(POSITIONS), frequencies)
    rotated = apply_rope(x, jnp.asarray(POSITIONS), frequencies)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        rotated.astype(jnp.float32), exact.astype(jnp.bfloat16).astype(jnp.float32)
    )


def test_query_factors_equal_transformers():
    theirs = get_llama_4_attn_scale(torch.tensor(POSITIONS), 0.1, 8192)[:, 0, :, 0].numpy()
    ours = query_factors(jnp.asarray(POSITIONS), 0.1, 8192)
    np.testing.assert_allclose(ours, theirs, rtol=2e-7)
    assert len(np.unique(theirs)) == 5
