"""Reading and writing Hugging Face folders, checked with transformers, torch and safetensors."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data.errors import UserError
from model.config import TransformerConfig
from scripts import export_hf
from tests.model.test_config import NAMES as PRESETS
from trainer.checkpoint.readers import stored_parameters
from trainer.checkpoint.store import save_checkpoint
from trainer.huggingface.assets import copy_assets
from trainer.huggingface.folder import folder_config
from trainer.huggingface.hub_models import resolve_model_path
from trainer.huggingface.read import check_weights, read_hf
from trainer.huggingface.table import hf_layout
from trainer.huggingface.write import write_hf


def make_model(folder: Path, dtype: torch.dtype, **fields) -> TransformerConfig:
    """A random LLaMA saved by transformers; every tensor is random, including biases and norms."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    shards = {"max_shard_size": fields.pop("max_shard_size", "5GB")}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **fields}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(folder, **shards)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return TransformerConfig.from_hf(folder)


def shardings(config: TransformerConfig) -> dict[str, NamedSharding]:
    """Deliberately awkward: matrices split over two axes, head_dim split too, some layers
    replicated."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    specs = {}
    for entry in hf_layout(config):
        axes = [None] * len(entry.shape)
        for dimension, axis in zip(
            range(len(entry.shape) - 1, -1, -1), ("a", "b", "c"), strict=False
        ):
            if entry.shape[dimension] % 2 == 0:
                axes[dimension] = axis
        specs[entry.name] = NamedSharding(mesh, PartitionSpec(*axes))
    return specs


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def generation_config(folder: Path) -> dict[str, object]:
    """Returns what transformers or we have written, without the version that wrote it."""
    written = json.loads((folder / "generation_config.json").read_text())
    written.pop("transformers_version", None)
    return written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1, "head_dim": 8},
    ],
    ids=["untied", "tied", "bias", "mqa"],
)
def test_import_then_export_gives_the_same_bytes(tmp_path, dtype, fields):
    config = make_model(
        tmp_path / "in", dtype, bos_token_id=3, eos_token_id=5, pad_token_id=7, **fields
    )
    params = read_hf(tmp_path / "in", config, shardings(config))
    copy_assets(tmp_path / "in", tmp_path / "assets")
    (tmp_path / "assets/generation_config.json").unlink()
    write_hf(params, config, tmp_path / "assets", tmp_path / "out")
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype == dtype
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    assert TransformerConfig.from_hf(tmp_path / "out") == config
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    written, original = (generation_config(tmp_path / part) for part in ("out", "in"))
    assert written.items() <= original.items()
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (3, 5, 7)


def test_arrays_are_placed_and_oriented_as_the_table_says(tmp_path):
    config = make_model(tmp_path, torch.float32)
    expected = shardings(config)
    params = read_hf(tmp_path, config, expected)
    source = tensors(tmp_path)
    for name, value in params.items():
        assert value.sharding == expected[name]
        assert value.dtype == np.float32
    q = np.stack(
        [
            source[f"model.layers.{i}.self_attn.q_proj.weight"].numpy().T.reshape(32, 4, 16)
            for i in range(3)
        ]
    )
    o = np.stack(
        [
            source[f"model.layers.{i}.self_attn.o_proj.weight"].numpy().T.reshape(4, 16, 32)
            for i in range(3)
        ]
    )
    np.testing.assert_array_equal(params["layers.self_attn.q_proj.weight"], q)
    np.testing.assert_array_equal(params["layers.self_attn.o_proj.weight"], o)
    np.testing.assert_array_equal(params["lm_head.weight"], source["lm_head.weight"].numpy().T)
    np.testing.assert_array_equal(
        params["embed_tokens.weight"], source["model.embed_tokens.weight"].numpy()
    )


def test_sharded_index_is_read_and_written(tmp_path):
    config = make_model(tmp_path / "in", torch.bfloat16, max_shard_size="8KB")
    assert (tmp_path / "in/model.safetensors.index.json").exists()
    params = read_hf(tmp_path / "in", config, shardings(config))
    copy_assets(tmp_path / "in", tmp_path / "assets")
    write_hf(params, config, tmp_path / "assets", tmp_path / "out", max_shard_bytes=8000)
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    sizes = []
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        held = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(held) <= 8000 or len(held) == 1, (
            "a shard exceeds the limit although none of its tensors does"
        )
        sizes.append(sum(held))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes) and len(sizes) > 3
    assert all(torch.equal(before[name], after[name]) for name in before)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_index_decides_which_shard_a_tensor_comes_from(tmp_path):
    """Both shards hold the norm, with different values: the index decides, whichever file is read
    first."""
    config = make_model(tmp_path, torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    norm = "model.norm.weight"
    save_file(
        {**weights, norm: torch.full((32,), 1.0)}, tmp_path / names[0], metadata={"format": "pt"}
    )
    head = "lm_head.weight"
    save_file(
        {head: weights[head], norm: torch.full((32,), 2.0)},
        tmp_path / names[1],
        metadata={"format": "pt"},
    )

    def read(changes):
        index = {**dict.fromkeys(weights, names[0]), head: names[1], **changes}
        index = {name: file for name, file in index.items() if file}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return read_hf(tmp_path, config, jax.sharding.SingleDeviceSharding(jax.devices()[0]))[
            "norm.weight"
        ]

    for number, file in enumerate(names, 1):
        assert (np.asarray(read({norm: file})) == number).all()
    first = "model.layers.0.input_layernorm.weight"
    with pytest.raises(
        ValueError,
        match=rf"index\.json: tensor {first} is not in {names[1]}, .*; download the folder again",
    ):
        read({first: names[1]})
    with pytest.raises(
        ValueError,
        match=rf"tensor {norm} is in {names[0]} and {names[1]}, and .*index\.json does not say",
    ):
        read({norm: None})
    with pytest.raises(
        ValueError, match=r"model-00003-of-00002\.safetensors: missing, but .*index\.json names it"
    ):
        read({norm: "model-00003-of-00002.safetensors"})


def test_an_index_that_is_not_text_is_named(tmp_path):
    config = make_model(tmp_path, torch.float32, max_shard_size="8KB")
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"\xff": ""}}')
    with pytest.raises(ValueError, match=r"index\.json: not a safetensors index"):
        read_hf(tmp_path, config, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def shape_of(preset: str, most: float) -> TransformerConfig:
    """A preset with one layer. If that has less than `most` parameters it keeps its widths;
    otherwise widths and vocabulary are divided by about 16, and heads, key heads and ties stay."""
    config = dataclasses.replace(TransformerConfig.preset(preset), num_hidden_layers=1)
    if sum(math.prod(entry.shape) for entry in hf_layout(config)) < most:
        return config
    head_dim = config.head_dim // 32 * 2
    return dataclasses.replace(
        config,
        head_dim=head_dim,
        hidden_size=config.num_attention_heads * head_dim,
        intermediate_size=config.intermediate_size // 16,
        vocab_size=config.vocab_size // 16,
    )


def in_shards(folder: Path, config: TransformerConfig, shards: int) -> None:
    """A folder as transformers saves it, with its names and shapes, random bfloat16 weights and an
    index."""
    folder.mkdir()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf()))
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    shapes = {
        name: p.shape
        for name, p in model.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    files = {
        name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors"
        for i, name in enumerate(shapes)
    }
    for file in set(files.values()):
        part = {
            name: torch.randn(shape, dtype=torch.bfloat16)
            for name, shape in shapes.items()
            if files[name] == file
        }
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(2 * shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# `make soak` tests every preset at its own widths; the widest, llama-3.1-70b, takes 6 GB on disk
# twice, and somewhat more in memory.
WIDE = [
    pytest.param(name, math.inf, marks=pytest.mark.slow)
    for name in PRESETS
    if shape_of(name, 1e8) != shape_of(name, math.inf)
]


@pytest.mark.parametrize(("preset", "most"), [*((name, 1e8) for name in PRESETS), *WIDE])
def test_import_then_sharded_export_gives_the_same_bytes_for_every_preset(tmp_path, preset, most):
    config = shape_of(preset, most)
    in_shards(tmp_path / "in", config, shards=3)
    assert TransformerConfig.from_hf(tmp_path / "in") == config
    # The widest preset as one copy, with two bytes per weight: shards on several devices would be
    # reassembled on the host as another copy.
    wide = sum(math.prod(entry.shape) for entry in hf_layout(config)) > 5e8
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if wide else shardings(config)
    params = read_hf(
        tmp_path / "in", config, sharding, dtype=ml_dtypes.bfloat16 if wide else np.float32
    )
    copy_assets(tmp_path / "in", tmp_path / "assets")
    before = json.loads((tmp_path / "in/model.safetensors.index.json").read_text())
    write_hf(
        params,
        config,
        tmp_path / "assets",
        tmp_path / "out",
        max_shard_bytes=before["metadata"]["total_size"] // 2,
    )
    after = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert before["weight_map"].keys() == after["weight_map"].keys()
    assert before["metadata"]["total_size"] == after["metadata"]["total_size"]
    for name in before["weight_map"]:
        was, now = (
            stored(tmp_path / sharding, index["weight_map"][name], name)
            for sharding, index in (("in", before), ("out", after))
        )
        assert was.dtype == now.dtype and torch.equal(
            was.view(torch.uint8), now.view(torch.uint8)
        ), name
    assert TransformerConfig.from_hf(tmp_path / "out") == config


def stored(folder: Path, file: str, name: str) -> torch.Tensor:
    with safe_open(folder / file, framework="pt") as opened:
        return opened.get_tensor(name)


class Taken:
    """An array that records every part taken from it."""

    def __init__(self, value):
        self.value, self.shape, self.taken = np.asarray(value), value.shape, []

    def __getitem__(self, index):
        self.taken.append(index)
        return self.value[index]

    def __array__(self, dtype=None, copy=None):
        self.taken.append("whole")
        return self.value


def test_export_holds_one_layer_at_a_time(tmp_path):
    config = make_model(tmp_path / "in", torch.bfloat16)
    copy_assets(tmp_path / "in", tmp_path / "assets")
    params = read_hf(tmp_path / "in", config, shardings(config))
    # On disk each layer is a separate chunk, so that taking one layer reads one.
    save_checkpoint(tmp_path / "checkpoint", model=params, assets=tmp_path / "assets")
    stored = stored_parameters(tmp_path / "checkpoint")
    assert stored.keys() == params.keys()
    for name, value in stored.items():
        pieces = value.chunk_layout.read_chunk.shape
        assert pieces[0] == 1 or not name.startswith("layers."), name
        np.testing.assert_array_equal(np.asarray(value), params[name])
    watched = {name: Taken(value) for name, value in params.items()}
    write_hf(watched, config, tmp_path / "assets", tmp_path / "out", max_shard_bytes=8000)
    for name, value in watched.items():
        assert value.taken == ([0, 1, 2] if name.startswith("layers.") else ["whole"]), name
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )


def test_mixed_dtypes_and_special_values_survive(tmp_path):
    config = make_model(tmp_path / "in", torch.bfloat16)
    before = tensors(tmp_path / "in")
    before["model.norm.weight"] = before["model.norm.weight"].float() + 1e-3
    before["lm_head.weight"][0, :4] = torch.tensor(
        [1e-40, -0.0, float("inf"), 9.2e-41]
    )  # denormal in bfloat16
    save_file(before, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    params = read_hf(tmp_path / "in", config, shardings(config))
    copy_assets(tmp_path / "in", tmp_path / "assets")
    write_hf(params, config, tmp_path / "assets", tmp_path / "out")
    after = tensors(tmp_path / "out")
    for name in before:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name


def _replace(folder: Path, **changes) -> None:
    stored = tensors(folder)
    for keyword, value in changes.items():
        name = keyword.replace("__", ".")
        if value is None:
            del stored[name]
        else:
            stored[name] = value
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def test_tensors_that_do_not_fit_the_config_are_named(tmp_path):
    folder = tmp_path / "good"
    config = make_model(folder, torch.float32)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def message(change) -> str:
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(folder, broken)
        change(broken)
        with pytest.raises(ValueError) as caught:
            read_hf(broken, config, sharding)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "model.norm.weight is missing" in message(
        lambda f: _replace(f, model__norm__weight=None)
    )
    wrong = message(
        lambda f: _replace(f, model__layers__1__mlp__up_proj__weight=torch.zeros(32, 48))
    )
    assert (
        "model.layers.1.mlp.up_proj.weight" in wrong and "[32, 48]" in wrong and "[48, 32]" in wrong
    )
    bias = message(lambda f: _replace(f, model__layers__0__self_attn__q_proj__bias=torch.zeros(64)))
    assert "q_proj.bias does not belong" in bias
    assert "I64" in message(
        lambda f: _replace(f, model__norm__weight=torch.zeros(32, dtype=torch.int64))
    )
    cut = message(
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:5000]
        )
    )
    assert "not a complete safetensors file" in cut
    pickled = message(lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"))
    assert "pickled" in pickled and "convert" in pickled
    assert "no weights" in message(lambda f: (f / "model.safetensors").unlink())
    index = json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}})

    def only_index(f):
        (f / "model.safetensors").unlink()
        (f / "model.safetensors.index.json").write_text(index)

    assert "model-00001-of-00002.safetensors: missing" in message(only_index)


def test_sizes_are_read_without_all_files_of_the_weights(tmp_path):
    """As after an interrupted download; only in whole weights is a tied model's head looked for."""
    config = make_model(tmp_path, torch.float32, tie_word_embeddings=True, max_shard_size="10KB")
    sorted(tmp_path.glob("model-*"))[1].unlink()
    assert folder_config(tmp_path) == config
    with pytest.raises(ValueError, match=r"model-00002-of-\d+\.safetensors: missing"):
        check_weights(tmp_path, config)


def test_write_refuses_what_it_would_corrupt(tmp_path):
    config = make_model(tmp_path / "in", torch.float32)
    params = read_hf(tmp_path / "in", config, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    copy_assets(tmp_path / "in", tmp_path / "assets")
    with pytest.raises(UserError, match="not an empty folder"):
        write_hf(params, config, tmp_path / "assets", tmp_path / "in")
    with pytest.raises(ValueError, match=r"norm\.weight is missing"):
        write_hf(
            {k: v for k, v in params.items() if k != "norm.weight"},
            config,
            tmp_path / "assets",
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


def test_model_path(tmp_path, monkeypatch):
    assert resolve_model_path(tmp_path) == tmp_path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="hf download some-org/some-model --revision abc"):
        resolve_model_path("some-org/some-model@abc")
    with pytest.raises(ValueError, match="no such folder"):
        resolve_model_path(tmp_path / "absent")


def test_commands(tmp_path, repository, capfd):
    """import_hf as a user calls it, which tests/test_quickstart.py does with export_hf; errors are
    one line without a traceback."""
    make_model(tmp_path / "in", torch.bfloat16, tie_word_embeddings=True)
    (
        tmp_path / "in" / "tokenizer.json"
    ).unlink()  # none can be read, and exports open the existing files
    command = [sys.executable, "-m", "scripts.import_hf", tmp_path / "in", tmp_path / "checkpoint"]
    subprocess.run(command, cwd=repository, check=True)
    assert export_hf.main([str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    capfd.readouterr()
    assert export_hf.main([str(tmp_path / "in"), str(tmp_path / "out2")]) == 2
    [error] = capfd.readouterr().err.splitlines()
    assert error.startswith("error: ")
