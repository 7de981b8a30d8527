"""adapter_config.json with arbitrary content is read, or refused naming the field."""

import dataclasses
import json
import time

import pytest

from model.adapter import FEED_FORWARD, PROJECTIONS, AdapterConfig
from model.config import TransformerConfig
from trainer.huggingface.adapter_config import CONFIG, read_config, write_config
from trainer.huggingface.peft_modules import AdaptedModules

GOOD = AdapterConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), dropout=0.1)
BASE = TransformerConfig(adapter=GOOD)


def test_a_written_configuration_is_read_back(tmp_path):
    write_config(BASE, "a base", tmp_path)
    assert read_config(tmp_path) == (GOOD, "a base")


def change(folder, **fields):
    """Writes GOOD with some fields replaced."""
    write_config(BASE, "a base", folder)
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(content | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": "4"}, "r: '4' is not a whole number"),
        ({"r": True}, "r: True"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"target_modules": [1]}, r"target_modules: found \[1\]"),
        ({"target_modules": {"a": 1}}, "target_modules: found"),
        ({"target_modules": None}, "adapter.targets: found 'none'"),
        ({"modules_to_save": [None]}, "modules_to_save: found"),
        ({"peft_type": "IA3"}, "peft_type: found 'IA3'; only 'LORA' is read"),
        ({"lora_parameters": {"rank": 8}}, "lora_parameters: an adapter of mlx-lm, whose format"),
        ({"base_model_name_or_path": {"a": 1}}, "base_model_name_or_path: found {'a': 1}"),
        ({"revision": 7}, "revision: found 7; needs text or null"),
        ({"lora_dropout": "high"}, "lora_dropout: 'high'"),
        ({"lora_dropout": 1}, "adapter.dropout: found 1.0, needs at least 0 and less than 1"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path, fields, words):
    change(tmp_path, **fields)
    with pytest.raises(ValueError, match=rf"^{tmp_path / CONFIG}: {words}"):
        read_config(tmp_path)


# Fields of PEFT's releases from 0.5 to 0.21 that change what an adapter or its base computes.
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("init_lora_weights", kind)
            for kind in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new", 1)
        ),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1}),
        ("arrow_config", {"top_k": 2}),
        ("corda_config", {"corda_method": "kpm"}),
        ("lora_ga_config", {"scale": "unit"}),
        ("velora_config", {"scale": 1}),
        ("monteclora_config", {"num_samples": 1}),
        ("loftq_config", {"loftq_bits": 4}),
        ("megatron_config", {"a": 1}),
        ("layer_replication", [[0, 1]]),
        ("lora_bias", True),
        ("target_parameters", ["experts"]),
        ("trainable_token_indices", [1]),
        ("bias", "all"),
        ("task_type", "SEQ_CLS"),
        ("a_field_of_next_year", True),
        ("use_next_years_lora", 0.5),
    ],
)
def test_a_field_that_changes_the_computation_is_named(tmp_path, field, value):
    change(tmp_path, **{field: value})
    with pytest.raises(
        ValueError, match=rf"^{tmp_path / CONFIG}: {field}: found {value!r:.10}".replace("[", r"\[")
    ):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bias": "lora_only"}, "makes a whole model of it$"),
        ({"trainable_token_indices": [1]}, "makes a whole model of it$"),
        # Merging into a tied head changes the embedding too, by peft 0.21.
        ({"target_modules": ["q_proj", "lm_head"]}, "of it, unless the base's head is its emb"),
        ({"target_modules": r".*\.(q_proj|embed_tokens)"}, "of it, unless the base's head is"),
    ],
)
def test_an_adapter_that_peft_can_merge_is_refused_with_that_way_out(tmp_path, fields, words):
    change(tmp_path, **fields)
    with pytest.raises(ValueError, match=rf"; peft's merge_and_unload .*{words}"):
        read_config(tmp_path)


def test_no_way_out_is_named_where_peft_cannot_merge(tmp_path):
    """A bias of the adapter, where the base has none."""
    change(tmp_path, lora_bias=True)
    with pytest.raises(ValueError, match=r"lora_bias: found True; only None is read$"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj", "c_attn", "query_key_value"]},
        {"target_modules": ["q_proj", "v_proj", "qkv_proj", "w1", "gate"]},
        {"rank_pattern": {"q_proj": 4, r".*\.v_proj": 4}, "alpha_pattern": {"q_proj": 8}},
        {"rank_pattern": {"k_proj": 2, "zzz": 3}, "alpha_pattern": {"o_proj": 99}},
        {"layers_to_transform": [1, 0, 2], "layers_pattern": ["layers"]},
        {"layers_to_transform": 0},
        {"fan_in_fan_out": True},
    ],
)
def test_settings_that_change_nothing_are_read(tmp_path, fields):
    change(tmp_path, **fields)
    base = dataclasses.replace(BASE, adapter=None, num_hidden_layers=2)
    assert read_config(tmp_path, base)[0] == GOOD


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank_pattern": {"v_proj": "2"}}, "rank_pattern.v_proj: '2' is not a whole number"),
        ({"rank_pattern": {"v_proj": 0}}, "rank_pattern.v_proj: 0"),
        ({"alpha_pattern": {"v_proj": None}}, "alpha_pattern.v_proj: None"),
        ({"alpha_pattern": "x"}, "alpha_pattern: found 'x'; needs an object or null"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern: found .* is not a regular expression"),
        ({"layers_to_transform": "all"}, "layers_to_transform: found 'all'; needs numbers"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "h"}, "layers_pattern: found 'h'"),
        ({"target_modules": ["c_attn", "w1"]}, r"target_modules: found \['c_attn', 'w1'\], none"),
    ],
)
def test_settings_that_are_not_read_are_named(tmp_path, fields, words):
    change(tmp_path, **fields)
    base = dataclasses.replace(BASE, adapter=None, num_hidden_layers=2)
    with pytest.raises(ValueError, match=rf"^{tmp_path / CONFIG}: {words}"):
        read_config(tmp_path, base)


def test_everything_that_peft_writes_for_plain_lora_is_read(tmp_path):
    peft = pytest.importorskip("peft")
    for init in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        extra = {"eva_config": peft.EvaConfig()} if init == "eva" else {}
        peft.LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=0.1,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
            base_model_name_or_path="org/base",
            revision="v1",
            init_lora_weights=init,
            **extra,
        ).save_pretrained(tmp_path)
        assert read_config(tmp_path) == (GOOD, "org/base@v1")


@pytest.mark.parametrize(
    ("pattern", "targets"),
    [
        (r".*\.(q_proj|v_proj)", ("q_proj", "v_proj")),
        (r".*(q|v)_proj", ("q_proj", "v_proj")),
        (r"^(?!.*lm_head).*self_attn.*proj$", ("q_proj", "k_proj", "v_proj", "o_proj")),
        (r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj", ("gate_proj", "up_proj", "down_proj")),
        (r"model\.layers\.(2[0-9]|3[01])\.self_attn\.q_proj", ("q_proj",)),
        ("all-linear", ("all-linear",)),
        ("q_proj", ("q_proj",)),
    ],
)
def test_regular_expressions_match_as_in_peft(tmp_path, pattern, targets):
    change(tmp_path, target_modules=pattern)
    assert read_config(tmp_path)[0].targets == targets
    tuners = pytest.importorskip("peft").tuners.tuners_utils
    for name in (
        () if pattern in ("all-linear", "q_proj") else PROJECTIONS
    ):  # which PEFT handles elsewhere
        module = f"model.layers.20.{'mlp' if name in FEED_FORWARD else 'self_attn'}.{name}"
        config = pytest.importorskip("peft").LoraConfig(target_modules=pattern)
        assert bool(tuners.check_target_module_exists(config, module)) == (name in targets)


@pytest.mark.parametrize(
    ("excluded", "targets"),
    [
        (["lm_head"], ("q_proj", "v_proj")),
        ("lm_head", ("q_proj", "v_proj")),
        (r".*vision.*", ("q_proj", "v_proj")),
        (["k_proj"], ("q_proj", "v_proj")),
        (["v_proj"], ("q_proj",)),
        (["layers.3.self_attn.q_proj"], ("q_proj", "v_proj")),
        (r".*layers\.3\..*", ("q_proj", "v_proj")),
        (r".*q_proj", ("v_proj",)),
    ],
)
def test_modules_are_excluded_as_in_peft(tmp_path, excluded, targets):
    peft = pytest.importorskip("peft")
    change(tmp_path, exclude_modules=excluded)
    assert read_config(tmp_path)[0] == dataclasses.replace(GOOD, targets=targets)
    modules = AdaptedModules(json.loads((tmp_path / CONFIG).read_text()))
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], exclude_modules=excluded)
    exists = peft.tuners.tuners_utils.check_target_module_exists
    for name in (f"model.layers.{i}.self_attn.{name}" for i in (2, 3) for name in GOOD.targets):
        assert modules.has(name) == (exists(config, name) is True)


def test_what_excludes_everything_or_nothing_is_named(tmp_path):
    for excluded, words in ((["q_proj", "v_proj"], "none of which"), ("(", "not a regular expres")):
        change(tmp_path, exclude_modules=excluded)
        with pytest.raises(ValueError, match=f"_modules: found .*{words}"):
            read_config(tmp_path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["q_proj", "lm_head"], "found 'lm_head', needs some of q_proj"),
        (r".*(q_proj|lm_head)", "which matches lm_head; adapt"),
        ("(q_proj", r"which is not a regular expression"),
        ("nothing.*", "which matches no projection"),
        (r"(?:[a-z]|[a-z_.]|[a-z0-9_.])+(?:[!?]|\d\d)", "which takes too long to match"),
    ],
)
def test_unsupported_targets_are_named_within_a_second(tmp_path, value, words):
    change(tmp_path, target_modules=value)
    start = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"^{tmp_path / CONFIG}: (target_modules|adapter.targets): .*{words}"
    ):
        read_config(tmp_path)
    assert time.monotonic() - start < 30, (
        "without the limit of one second the match would never end"
    )


@pytest.mark.parametrize("text", ["[]", "1", "", "{", "\xff", "[" * 100_000])
def test_a_file_that_is_not_an_object_is_named(tmp_path, text):
    (tmp_path / CONFIG).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"^{tmp_path / CONFIG}: "):
        read_config(tmp_path)
