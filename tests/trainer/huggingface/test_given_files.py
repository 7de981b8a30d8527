"""Contents of a Hugging Face folder other than the shapes of its weights: heads, frequency tables,
NaN, links, unused fields."""

import json
import shutil
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from data.errors import UserError
from data.tokenizer import TOOL_TEMPLATE, Tokenizer
from model.config import TransformerConfig
from scripts import export_hf, import_hf
from scripts.push_to_hub import export_files
from tests.model.build import llama
from trainer.huggingface.assets import copy_assets, described, write_config
from trainer.huggingface.folder import folder_config
from trainer.huggingface.table import HoldsNaN, check_numbers
from trainer.huggingface.write import write_hf
from trainer.model_source import open_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(hf_model, tmp_path):
    """A copy of a very small model for the test to modify."""
    return shutil.copytree(hf_model, tmp_path / "model")


def change_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def round_trip(folder, tmp_path):
    assert import_hf.main([str(folder), str(tmp_path / "checkpoint")]) == 0
    assert export_hf.main([str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(3, 19)[None]).logits.numpy()


def test_a_separate_head_is_kept_although_the_config_ties_it(folder, tmp_path):
    change_json(folder / "config.json", tie_word_embeddings=True)

    def untie(weights):
        torch.manual_seed(1)
        weights[HEAD] = torch.randn_like(weights[EMBEDDING])

    change_weights(folder, untie)
    with pytest.warns(UserWarning, match=f"{HEAD} differs from {EMBEDDING}: both are kept"):
        folder_config(folder)
    out = round_trip(folder, tmp_path)
    assert torch.equal(
        load_file(out / "model.safetensors")[HEAD], load_file(folder / "model.safetensors")[HEAD]
    )
    np.testing.assert_array_equal(logits(out), logits(folder))
    with pytest.warns(UserWarning, match="differs"):
        source = open_model(str(folder))
    assert not source.config.tie_word_embeddings
    assert "lm_head.weight" in source.read(llama(source.config))


def test_an_equal_copy_of_the_embedding_is_left_out(folder, tmp_path):
    change_json(folder / "config.json", tie_word_embeddings=True)
    change_weights(folder, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder_config(folder).tie_word_embeddings
    out = round_trip(folder, tmp_path)
    assert HEAD not in load_file(out / "model.safetensors")
    np.testing.assert_array_equal(logits(out), logits(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedding_of_a_tied_model_is_read_from_its_head(folder, tmp_path, dtype):
    """The head may have another dtype than the other tensors, which its embedding then keeps."""
    change_json(folder / "config.json", tie_word_embeddings=True)
    change_weights(folder, lambda weights: weights.update({HEAD: weights.pop(EMBEDDING).to(dtype)}))
    out = round_trip(folder, tmp_path)
    written, source = (load_file(path / "model.safetensors") for path in (out, folder))
    assert HEAD not in written and written[EMBEDDING].dtype == dtype
    assert torch.equal(written[EMBEDDING], source[HEAD])
    np.testing.assert_array_equal(logits(out), logits(folder))


def test_a_model_that_is_not_tied_needs_its_embedding(folder):
    change_weights(folder, lambda weights: weights.pop(EMBEDDING))
    source = open_model(str(folder))
    with pytest.raises(ValueError, match=f"tensor {EMBEDDING} is missing"):
        source.read(llama(source.config))


def test_tensors_without_numbers_may_be_there(folder):
    """Transformers writes them for shared experts of width 0."""
    extra = {"model.layers.0.mlp.shared_experts.up_proj.weight": torch.zeros(0, 32)}
    change_weights(folder, lambda weights: weights.update(extra))
    source = open_model(str(folder))
    source.read(llama(source.config))


@pytest.mark.parametrize(
    ("theta", "dtype", "named"),
    [
        (None, torch.float32, False),
        (None, torch.float16, False),
        (None, torch.bfloat16, False),
        (12345.0, torch.float32, True),
    ],
)
def test_a_stored_frequency_table_is_compared(folder, theta, dtype, named):
    config = folder_config(folder)
    # The formula of transformers.
    size = config.head_dim
    table = 1.0 / ((theta or config.rope.theta) ** (torch.arange(0, size, 2).float() / size))
    change_weights(
        folder,
        lambda weights: weights.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": table.to(dtype)}
        ),
    )
    source = open_model(str(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source.read(llama(source.config))
    assert (
        any(
            "rotary_emb.inv_freq holds frequencies that differ" in str(warning.message)
            for warning in caught
        )
        == named
    )


def test_a_value_head_is_left_out_with_a_warning(folder, tmp_path):
    """As TRL saves models with one; transformers leaves it out too."""
    size = folder_config(folder).hidden_size
    before = load_file(folder / "model.safetensors")
    head = {"v_head.summary.weight": torch.ones(1, size), "v_head.summary.bias": torch.ones(1)}
    change_weights(folder, lambda weights: weights.update(head))
    expected = logits(folder)
    source = open_model(str(folder))
    with pytest.warns(
        UserWarning, match=r"left out v_head\.summary\.bias, v_head\.summary\.weight"
    ):
        source.read(llama(source.config))
    out = round_trip(folder, tmp_path)
    assert load_file(out / "model.safetensors").keys() == before.keys()
    np.testing.assert_array_equal(logits(out), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_is_found_wherever_it_is(dtype):
    special = np.array([0, -0.0, np.inf, -np.inf, 1e-40, 65504, -1], np.float32).astype(dtype)
    with pytest.warns(RuntimeWarning, match="tensor x holds infinity, which is kept"):
        check_numbers("x", special)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_numbers("x", special[np.isfinite(special)])
    check_numbers("x", np.zeros((0, 3), dtype))
    for index in range(12):
        for nan in (np.nan, -np.nan):
            tensor = np.ones((3, 4), dtype)
            tensor.flat[index] = nan
            for view in (tensor, tensor.T, tensor[:, ::-1]):
                with pytest.raises(HoldsNaN, match=r"tensor x holds NaN \(1 of the 12 numbers"):
                    check_numbers("x", view)


def test_nan_in_an_imported_model_is_named_by_tensor(folder, tmp_path, capsys):
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(weights):
        weights[name][1, 2] = float("nan")

    change_weights(folder, spoil)
    source = open_model(str(folder))
    with pytest.raises(ValueError, match=rf"^{folder}: tensor {name} holds NaN \(1 of"):
        source.read(llama(source.config))
    assert import_hf.main([str(folder), str(tmp_path / "checkpoint")]) != 0
    assert f"tensor {name} holds NaN" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint").exists()


def test_nan_and_overflow_are_named_at_export(hf_model, tmp_path):
    source = open_model(str(hf_model))
    params = {name: np.array(value) for name, value in source.read(llama(source.config)).items()}
    copy_assets(hf_model, tmp_path / "assets")
    name = "layers.mlp.up_proj.weight"
    params[name][1, 0, 0] = 1e6
    (tmp_path / "assets/source_dtype.json").write_text('{"dtype": "float16", "tensors": {}}')
    tensor = r"tensor model\.layers\.1\.mlp\.up_proj\.weight"
    with pytest.raises(ValueError, match=rf"{tensor} has numbers up to 1e\+06, which float16"):
        write_hf(params, source.config, tmp_path / "assets", tmp_path / "out")
    params[name][1, 0, 0] = np.nan
    with pytest.raises(ValueError, match=rf"{tensor} holds NaN"):
        write_hf(params, source.config, tmp_path / "assets", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["merges.txt", "vocab.json"])
def test_a_link_out_of_the_folder_is_refused_by_name(folder, tmp_path, capsys, name):
    """Files that this folder lacks; tests/test_given_files.py has its other files."""
    secret = tmp_path / "secret"
    secret.write_text("TOP SECRET")
    (folder / name).symlink_to(secret)
    assert import_hf.main([str(folder), str(tmp_path / "checkpoint")]) != 0
    assert f"{folder / name}: leads to {secret}, outside of its folder" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint").exists()


def test_a_link_out_of_a_tokenizers_folder_is_refused(folder, tmp_path):
    (tmp_path / "secret").write_text("TOP SECRET")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"chat_template\.jinja: leads to"):
        Tokenizer.load(folder)


def test_a_separate_template_for_tools_survives(folder, tmp_path):
    tools, rag = folder / TOOL_TEMPLATE, "additional_chat_templates/rag.jinja"
    tools.parent.mkdir()
    tools.write_text("{{ tools }}")
    (folder / rag).write_text("{{ documents }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    out = round_trip(folder, tmp_path)
    assert {TOOL_TEMPLATE, rag} <= {*export_files(out)[0]}
    (folder / rag).unlink()
    for name in (TOOL_TEMPLATE, "chat_template.jinja"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    source = open_model(str(folder))
    source.write_assets(tmp_path / "assets", source.tokenizer(), "{{ trained }}", "{}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "assets")
    assert tokenizer.chat_template == "{{ trained }}"
    assert not (tmp_path / "assets" / TOOL_TEMPLATE).parent.exists()


def test_unused_fields_survive(folder, tmp_path, capsys):
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    change_json(
        folder / "config.json",
        dual_chunk_attention_config=chunks,
        house_note="kept",
        auto_map={"AutoModelForCausalLM": "modeling.Own"},
        quantization_config=None,
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "own_field": [1, 2]})
    )
    source = json.loads((folder / "config.json").read_text())
    out = round_trip(folder, tmp_path)
    assert (
        "config.json of the source: left out, since they no longer hold: auto_map\n"
        in capsys.readouterr().err
    )
    written = json.loads((out / "config.json").read_text())
    assert {name: value for name, value in written.items() if name in source} == {
        name: value for name, value in source.items() if name != "auto_map"
    } | {"dtype": written["dtype"]}
    assert json.loads((out / "generation_config.json").read_text()) == {
        "temperature": 0.6,
        "top_k": 20,
        "own_field": [1, 2],
    }
    loaded = transformers.AutoConfig.from_pretrained(out)
    assert loaded.dual_chunk_attention_config == chunks


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "attn_factor": 0.878,
}
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_unused_rope_fields_survive_unless_rope_changes():
    source = SIZES | {"rope_theta": 1e6, "rope_scaling": YARN, "max_position_embeddings": 2048}
    config = TransformerConfig.from_hf_dict(source)
    written, left_out = described(config, source)
    assert written["rope_scaling"] == YARN and left_out == []
    assert written["rope_parameters"]["attn_factor"] == YARN["attn_factor"], (
        "programs read either of the two"
    )
    longer = config.with_positions(
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    )
    written, left_out = described(longer, source)
    assert left_out == ["rope_scaling.attn_factor"]
    assert (
        "attn_factor" not in written["rope_scaling"]
        and TransformerConfig.from_hf_dict(written) == longer
    )


def test_changed_fields_are_written_and_others_keep_their_spelling():
    source = SIZES | {
        "rope_theta": 10000,
        "pad_token_id": None,
        "eos_token_id": 2,
        "own": {"a": [1]},
    }
    config = TransformerConfig.from_hf_dict(source)
    assert described(config, source)[0].items() >= source.items()
    changed = TransformerConfig.from_hf_dict(
        source | {"vocab_size": 70, "eos_token_id": [2, 5], "max_position_embeddings": 9999}
    )
    written, left_out = described(changed, source)
    assert TransformerConfig.from_hf_dict(written) == changed and left_out == []
    assert (written["vocab_size"], written["eos_token_id"], written["max_position_embeddings"]) == (
        70,
        [2, 5],
        9999,
    )
    assert written["own"] == {"a": [1]}


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
PHI3 = SIZES | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "rope_theta": 5000.0,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "resid_pdrop": 0.0,
    "pad_token_id": None,
    "eos_token_id": 2,
}
NESTED = {"original_max_position_embeddings": 16, "rope_theta": 5000.0}


def written_config(config, source, folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(source))
    write_config(config, folder)
    return json.loads((folder / "config.json").read_text())


def longrope(source):
    """Returns what transformers computes from a config.json: frequencies, and the scale."""
    kind = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    return kind(transformers.AutoConfig.for_model(**source), "cpu", seq_len=60)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "longrope", **FACTORS}},
        {"rope_scaling": {"type": "su", **FACTORS}},
        {"rope_scaling": {"type": "yarn", **FACTORS}},
        {"rope_parameters": {"rope_type": "longrope", **FACTORS, **NESTED}},
        {
            "rope_parameters": {"rope_type": "longrope", **FACTORS, **NESTED}
            | {"partial_rotary_factor": 1.0}
        },
    ],
)
def test_both_versions_of_transformers_read_longrope(tmp_path, rope):
    """Version 4 refuses a Phi-3 whose rope_scaling has not these three fields; 5 prefers it."""
    source = PHI3 | rope
    config = TransformerConfig.from_hf_dict(source)
    written = written_config(config, source, tmp_path / "same")
    assert written["rope_scaling"] == {"type": "longrope", **FACTORS}
    assert written["original_max_position_embeddings"] == 16
    assert TransformerConfig.from_hf_dict(written) == config
    frequencies, scale = longrope(written)
    expected, expected_scale = longrope(PHI3 | {"rope_scaling": {"type": "longrope", **FACTORS}})
    assert torch.equal(frequencies, expected) and scale == expected_scale


def test_a_scale_that_transformers_4_does_not_compute_is_named(tmp_path):
    """Also with the factor that the lengths have."""
    scaling = {"rope_type": "longrope", **FACTORS, "attention_factor": 1.5}
    source = PHI3 | {"rope_scaling": scaling}
    with pytest.warns(UserWarning, match=r"only transformers 5 .* model's RoPE scales otherwise$"):
        written = written_config(TransformerConfig.from_hf_dict(source), source, tmp_path / "same")
    assert longrope(written)[1] == 1.5


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_a_longer_model_keeps_its_longrope_and_other_fields(tmp_path, family, recwarn):
    """A factor that followed from the length is now written; a Phi-3's has no place in version
    4."""
    source = PHI3 | {"rope_scaling": {"rope_type": "longrope", **FACTORS}, "house_note": "kept"}
    if family == "llama":
        source |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config = TransformerConfig.from_hf_dict(source)
    written = written_config(config.with_length(128), source, tmp_path / "longer")
    assert (written["resid_pdrop"], written["house_note"]) == (0.0, "kept")
    assert written["rope_scaling"]["factor"] == config.rope.factor == 4
    theirs, before = longrope(written), longrope(source)
    assert torch.equal(theirs[0], before[0]) and theirs[1] == before[1]
    told = [str(warning.message) for warning in recwarn]
    assert any("only transformers 5 can load it" in text for text in told) == (family == "phi3")
    assert not any("resid_pdrop" in text for text in told)


def indexed(folder, **weight_map):
    """Replaces a folder's weights by an index."""
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def of_dtype(dtype):
    return lambda folder: change_weights(
        folder,
        lambda weights: weights.update({name: t.to(dtype) for name, t in weights.items()}),
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_dtype(torch.float64), f"tensor {EMBEDDING} is F64; supported are BF16, F16, F32"),
        (of_dtype(torch.float8_e4m3fn), f"tensor {EMBEDDING} is F8_E4M3; supported are"),
        (indexed, "not a safetensors index (ValueError('it names no tensors'))"),
        (lambda folder: indexed(folder, a="b\ud800"), r"a file's name is 'b\\ud800'"),
        (
            lambda folder: change_json(folder / "config.json", note={"a": "\ud800"}),
            "config.json: note.a holds half of a surrogate pair",
        ),
        (
            lambda folder: change_json(folder / "config.json", **{"\ud800": 1}),
            r"config.json: '\ud800' is no field's name",
        ),
        (
            lambda folder: change_json(
                folder / "config.json", note=json.loads("[" * 900 + "]" * 900)
            ),
            "config.json: note.0.0 is nested more than 100 deep",
        ),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"x": "\\ud800"}'),
            "generation_config.json: x holds half of a surrogate pair",
        ),
    ],
)
def test_what_an_export_cannot_write_is_refused_before_the_import(
    folder, tmp_path, capsys, change, reason
):
    change(folder)
    assert import_hf.main([str(folder), str(tmp_path / "checkpoint")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {folder}") and reason in line
    assert not (tmp_path / "checkpoint").exists()
