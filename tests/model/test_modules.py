"""The modules' declarations: every parameter of a layer belongs to a stage, and padding follows
from the logical axes."""

import itertools
import pathlib
import re

import pytest

from model.families import FAMILIES
from model.padding import fits, logical_axes, vocabulary_axes
from model.parameter_declarations import LAYERS, declare, declare_layer, read_by
from model.stages import KEYS_VALUES, OUTPUT, QUERIES

from .build import tiny

EVERYTHING = tiny(attention_bias=True, mlp_bias=True)
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/parameters.md"


def test_every_parameter_of_a_layer_is_read_by_a_stage():
    parameters = declare_layer(EVERYTHING)
    before, after = (
        read_by(EVERYTHING, stages, parameters) for stages in ((QUERIES, KEYS_VALUES), (OUTPUT,))
    )
    assert {**before, **after} == parameters and not before.keys() & after.keys()
    assert sorted(read_by(EVERYTHING, (KEYS_VALUES,), parameters)) == [
        "input_layernorm.weight",
        "self_attn.k_proj.bias",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.bias",
        "self_attn.v_proj.weight",
    ]


def test_parameters_and_moments_have_the_declared_logical_axes():
    for name, parameter in declare(EVERYTHING).items():
        assert logical_axes(name) == logical_axes(f"0.mu.{name}") == parameter.axes
    assert logical_axes("0.count") == ()
    assert vocabulary_axes() == {"embed_tokens.weight": 0, "lm_head.weight": 1}


@pytest.mark.parametrize(
    ("name", "shape", "other", "own", "expected"),
    [
        ("norm.weight", (60,), (64,), None, True),
        ("norm.weight", (60,), (64,), (64,), False),
        ("norm.weight", (60,), (60 + 1024,), None, False),
        ("norm.weight", (5120,), (6144,), (5120,), True),
        ("norm.weight", (5120,), (6144,), (5121,), False),
        ("embed_tokens.weight", (129, 8), (129 + 1024, 8), (129, 8), False),
        (LAYERS + "self_attn.q_proj.weight", (2, 64, 9, 8), (2, 64, 12, 8), None, True),
        (LAYERS + "self_attn.q_proj.weight", (2, 64, 9, 8), (2, 64, 9, 16), None, False),
        (LAYERS + "mlp.up_proj.bias", (2, 96), (2, 128), None, False),
        ("0.count", (), (), None, True),
    ],
)
def test_shapes_may_differ_only_by_padding(name, shape, other, own, expected):
    assert fits(name, shape, other, own) == expected


def test_the_page_lists_every_declared_parameter():
    """Each name with its shape and logical axes; a row may stand for several parameters, such as
    {k,v}_proj."""
    sizes = {"N": 2, "V": 128, "E": 64, "F": 96, "Hq": 8, "Hkv": 2, "D": 8, "X": 4, "S": 40}
    sizes["1"] = 1
    listed, row = {}, re.compile(r"^\| `(\S+)` \|.* `\[(.+)\]` \| (.+) \|$", re.MULTILINE)
    for names, shape, axes in row.findall(PAGE.read_text(encoding="utf-8")):
        parts = [part.split(",") for part in re.split(r"[{}]", names)]
        for name in map("".join, itertools.product(*parts)):
            is_query = "q_proj" in name
            letters = shape.replace(" H,", " Hq," if is_query else " Hkv,").split(", ")
            logical = axes.replace("heads or kv_heads", "heads" if is_query else "kv_heads").split(
                ", "
            )
            listed[name] = tuple(sizes[letter] for letter in letters), tuple(logical)
    assert listed == {
        name: (parameter.shape, parameter.axes)
        for config in (EVERYTHING, *mixtures())
        for name, parameter in declare(config).items()
    }


def mixtures():
    """Yields configs that together have all the arrays of mixtures."""
    for family, shared in (("gpt_oss", 0), ("qwen2_moe", 40), ("solar_open", 40)):
        yield tiny(
            family=family,
            num_experts=4,
            num_experts_per_tok=2,
            shared_expert_intermediate_size=shared,
            attention_bias=True,
            **FAMILIES[family].computes,
        )
