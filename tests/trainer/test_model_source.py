"""Tests of trainer/model_source.py: what a model from scratch takes from preset and recipe, and
which tokens end an answer."""

import dataclasses
import json
import shutil
import types

import pytest
import transformers

from data.errors import UserError
from data.tokenizer import Tokenizer
from eval.line_cases import generate
from eval.runner import Prompt, prompt_ids, stop_ids
from model.config import TransformerConfig
from scripts import import_hf
from tests.data.test_rebuilt_tokenizer import _PREPEND, _folder
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.schema import ModelConfig, RunConfig
from trainer.model_source import choose_model, for_templates, open_model
from trainer.run.bucket import Bucket
from trainer.source_kinds import CheckpointSource
from trainer.text import TextObjective


@pytest.fixture
def chosen(repository):
    def choose(preset, **overrides):
        tokenizer = str(repository / "data/fixtures/tiny_tokenizer")
        return choose_model(
            ModelConfig(preset=preset, tokenizer=tokenizer, overrides=overrides)
        ).config

    return choose


def test_rope_theta_keeps_the_rest_of_the_preset(chosen):
    preset = TransformerConfig.preset("llama-3.1-8b")
    config = chosen("llama-3.1-8b", rope_theta=100)
    assert config.to_hf()["rope_theta"] == 100 != preset.rope.theta
    assert dataclasses.replace(config.rope, theta=preset.rope.theta) == preset.rope
    assert (config.hidden_size, config.num_key_value_heads) == (
        preset.hidden_size,
        preset.num_key_value_heads,
    )


def test_invalid_rope_theta(chosen):
    with pytest.raises(ValueError, match="rope_theta: -1"):
        chosen("tiny", rope_theta=-1)


@pytest.mark.parametrize("value", [None, {"theta": 1e4}])
def test_fields_that_a_recipe_cannot_set_are_refused(chosen, value):
    with pytest.raises(
        UserError, match=r"^model\.overrides: unknown field 'local_rope'; valid: .*rope_scaling"
    ):
        chosen("gemma-3-1b", local_rope=value)


@pytest.mark.parametrize(
    ("preset", "overrides", "heads", "key_heads", "head_dim"),
    [
        ("llama-7b", {"hidden_size": 2048}, 32, 32, 64),
        ("llama-7b", {"num_attention_heads": 16}, 16, 16, 256),
        ("llama-3.1-8b", {"num_attention_heads": 16}, 16, 8, 256),
        (
            "llama-3.1-8b",
            {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
            16,
            4,
            128,
        ),
        ("smollm2-135m", {"hidden_size": 1152}, 9, 3, 128),
        ("tiny", {"hidden_size": 128}, 4, 2, 32),  # names its head_dim
        (None, {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}, 4, 2, 8),
    ],
)
def test_explicit_preset_fields_stay_and_implicit_ones_follow_overrides(
    chosen, preset, overrides, heads, key_heads, head_dim
):
    config = chosen(preset, **overrides)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        heads,
        key_heads,
        head_dim,
    )


def test_key_heads_that_do_not_divide_the_heads_are_refused(chosen):
    with pytest.raises(
        ValueError,
        match="num_key_value_heads: 8 does not divide num_attention_heads 12; these do: 1, 2, 3",
    ):
        chosen("llama-3.1-8b", num_attention_heads=12, hidden_size=768)


def test_a_model_from_scratch_takes_a_checkpoints_tokenizer_as_it_was_trained(tmp_path, recwarn):
    """As with model.path, and unlike the same files without run.yaml, of which transformers builds
    its own tokenizer, with tokens that the files do not name."""
    folder = _folder(tmp_path / "assets", _PREPEND, None, None)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    given = ModelConfig(preset="tiny", tokenizer=str(folder))
    assert choose_model(given).config.bos_token_id is not None and len(recwarn) == 1
    (folder / "run.yaml").touch()
    source = choose_model(given)
    assert source.config.bos_token_id is source.tokenizer().bos_id is None and len(recwarn) == 1


def test_a_padding_token_that_ends_texts_is_not_a_scratch_models(repository, tmp_path):
    """The embedding of a model's padding token is not trained."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(repository / "data/fixtures/tiny_tokenizer", folder)
    given = ModelConfig(preset="tiny", tokenizer=str(folder))
    config = choose_model(given).config
    assert config.pad_token_id not in (None, config.bos_token_id, config.eos_token_id)
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "pad_token": described["eos_token"]}))
    source = choose_model(given)
    assert source.config.pad_token_id is None
    run = types.SimpleNamespace(source=source, config=RunConfig(name="run"))
    compared = TextObjective.inputs.fget(run)["config.json"]
    assert "eos_token_id" in compared and "pad_token_id" not in compared, "earlier runs resume"


@pytest.fixture
def base(repository, tmp_path):
    """A base model's assets: its tokenizer has the tokens of a chat (1024, 1025) and ends texts
    with </s> (2), as the config does."""
    bare = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    bare.with_controls(["<|im_start|>", "<|im_end|>"]).save(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(TransformerConfig.preset("tiny", vocab_size=1026).to_hf())
    )
    return tmp_path


SOURCES = {
    "chat": SourceConfig("a.json"),
    "book": SourceConfig("b.txt", "text"),
    "other chat": SourceConfig("c.json", template="vicuna_v1.1"),
}


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["chat"], (2, 1025)),
        (["book", "chat", "other chat"], (2, 1025)),
        (["other chat", "chat"], 2),
        (["book"], 2),
    ],
)
@pytest.mark.parametrize("add", [False, True])
def test_the_model_stops_where_answers_of_its_first_conversations_end(base, names, ends, add):
    """Whether or not the template's tokens had to be added; plain texts leave the model
    unchanged."""
    data = DataConfig(
        template="chatml", add_control_tokens=add, sources=tuple(SOURCES[name] for name in names)
    )
    source, tokenizer = for_templates(open_model(str(base)), data)
    assert (
        source.config.eos_token_id == ends
        and tokenizer.vocab_size == source.config.vocab_size == 1026
    )


@pytest.mark.parametrize(("given", "kept"), [(-1, 1023), (0, 0), (None, None)])
def test_the_padding_row_stays_the_same_in_a_larger_vocabulary(base, given, kept):
    """A negative id counts from the end, as in torch; the new last row is learned."""
    source = open_model(str(base))
    small = dataclasses.replace(source.config, vocab_size=1024, pad_token_id=given)
    source = dataclasses.replace(source, config=small).with_vocabulary(source.tokenizer())
    assert (source.config.vocab_size, source.config.pad_token_id) == (1026, kept)


def test_ends_of_answers_from_the_generation_config_alone_are_kept(base):
    (base / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1025, 2], "temperature": 0.6})
    )
    source = open_model(str(base))
    assert source.config.eos_token_id == (2, 1025)
    shutil.copytree(base, base / "assets")
    CheckpointSource(source.config, base, base, source.config).write_assets(
        base / "out", source.tokenizer(), "x", ""
    )
    written = json.loads((base / "out/generation_config.json").read_text())
    assert sorted(written["eos_token_id"]) == [2, 1025] and written["temperature"] == 0.6
    (base / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"generation_config\.json: not a JSON object"):
        open_model(str(base))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 2**70]}))
    with pytest.raises(
        ValueError, match=r"generation_config\.json: eos_token_id: \d+ is not a tok"
    ):
        open_model(str(base))


@pytest.mark.parametrize("name", ["runs/base", "runs/base/checkpoints/7"])
def test_a_base_in_a_bucket_is_named_by_its_checkpoint_there(
    store_and_url, hf_model, tmp_path, name
):
    """Adapters record the name. It opens the same weights on any machine, also once the run has
    another newest checkpoint."""
    url = store_and_url[1]
    assert import_hf.main([str(hf_model), str(tmp_path / "base")]) == 0
    for path in (tmp_path / "base").rglob("*"):
        if path.is_file():
            part = path.relative_to(tmp_path / "base").as_posix()
            Bucket(f"{url}/runs/base/checkpoints/7").write(part, path.read_bytes())
    source = open_model(f"{url}/{name}")
    assert source.name == f"{url}/runs/base/checkpoints/7"
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    small = open_model(source.name, weights=False)
    assert not (small.folder / "model").exists(), "tens of gigabytes that planning does not need"
    assert open_model(source.name).fingerprint == small.fingerprint == source.fingerprint


@pytest.mark.parametrize(
    ("stored", "trained", "written"), [(64, 128, 128), (256, 128, 256), (None, 128, None)]
)
def test_the_tokenizers_maximum_length_grows_to_the_trained_length(base, stored, trained, written):
    """With the earlier length transformers would truncate longer texts, or warn about them; a
    larger length, or none, is kept."""
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(
        json.dumps({**settings, "model_max_length": stored})
    )
    shutil.copytree(base, base / "assets")
    source = open_model(str(base))
    config = dataclasses.replace(source.config, max_position_embeddings=trained)
    CheckpointSource(config, base, base, config).write_assets(
        base / "out", source.tokenizer(), "x", ""
    )
    exported = json.loads((base / "out/tokenizer_config.json").read_text())
    assert (
        exported["model_max_length"] == written and exported["eos_token"] == settings["eos_token"]
    )


def test_line_retrieval_follows_the_template(base):
    """The end of a turn ends an answer, even if the model's config does not name it."""
    tokenizer, config = Tokenizer.load(base), TransformerConfig.from_hf(base)
    (case,) = generate(2, 1, key_style="short")
    assert stop_ids(config, tokenizer, "chatml") == (2, 1025) and stop_ids(
        config, tokenizer, "vicuna_v1.1"
    ) == (2,)
    chat, plain = (
        prompt_ids(Prompt(case.prompt, 1), tokenizer, template) for template in ("chatml", None)
    )
    assert (
        tokenizer.decode(chat, skip_special=False)
        == f"<|im_start|>user\n{case.prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    theirs = transformers.AutoTokenizer.from_pretrained(base)
    assert plain == theirs(case.prompt)["input_ids"], "BOS only if the tokenizer adds it"
    assert stop_ids(config, tokenizer, None) == (2,)
