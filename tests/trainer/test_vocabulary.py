"""A vocabulary and heads that `tensor` does not divide, and a growing vocabulary: in memory,
checkpoints and exports."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
import torch
import transformers

import train
from data.tokenizer import Tokenizer
from model.padding import PADDED, logical_axes, vocabulary_axes
from model.parameter_declarations import unpadded_shapes
from scripts import export_hf
from tests import small_run
from tests.model.build import llama
from trainer.checkpoint.readers import restore_model
from trainer.checkpoint.store import CheckpointStore
from trainer.huggingface.assets import copy_assets
from trainer.huggingface.read import read_hf
from trainer.huggingface.write import write_hf
from trainer.model_source import open_model

from .huggingface.test_huggingface import make_model, tensors

ROWS = 129  # 129 on one tensor rank, 130 on two, 132 on four, 136 on eight
HIDDEN = 42  # 44 on four ranks that share the storage
HEADS = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}  # 8, 4 on 2 and 4 ranks; 16, 8 on 8


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(request, tmp_path_factory):
    """A Hugging Face model of 129 ids, 6 query and 3 key heads, with biases."""
    folder = tmp_path_factory.mktemp("odd")
    make_model(
        folder,
        torch.bfloat16,
        vocab_size=ROWS,
        tie_word_embeddings=request.param == "tied",
        attention_bias=True,
        **HEADS,
    )
    (folder / "tokenizer.json").unlink()  # none can be read, and exports open the existing files
    return folder


def without_padding(name, array):
    """The part of a parameter or moment that is not padding; padding must be zero."""
    array = np.asarray(array)
    sizes = {"vocab": ROWS, "heads": 6, "kv_heads": 3, "embed": HIDDEN, "norm": HIDDEN}
    assert set(sizes) == set(PADDED)
    for axis, logical in enumerate(logical_axes(name) if array.ndim else ()):
        if logical in sizes:
            assert not np.take(array, range(sizes[logical], array.shape[axis]), axis).any()
            array = np.take(array, range(sizes[logical]), axis)
    return array


def test_padded_in_memory_and_cut_at_export(tmp_path, folder):
    source = open_model(str(folder))
    whole, model = llama(source.config), llama(source.config, {"tensor": 2, "sequence": 4})
    params = source.read(model)
    assert params["embed_tokens.weight"].shape[0] == 130
    heads = [params[f"layers.self_attn.{letter}_proj.weight"].shape[2] for letter in "qkv"]
    assert (
        params["norm.weight"].shape == (44,)
        and params["layers.mlp.down_proj.weight"].shape[2] == 44
    )
    assert heads == [8, 4, 4] and params["layers.self_attn.o_proj.weight"].shape[1] == 8
    for name, value in source.read(whole).items():
        np.testing.assert_array_equal(without_padding(name, params[name]), value)
    copy_assets(folder, tmp_path / "assets")
    write_hf(params, source.config, tmp_path / "assets", tmp_path / "out")
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
        for name in before
    )


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "as in earlier releases"])
def test_restored_on_a_mesh_that_needs_other_padding(tmp_path, folder, recorded):
    source = open_model(str(folder))
    copy_assets(folder, tmp_path / "assets")
    model = llama(source.config, {"tensor": 4})
    params = source.read(model)
    tx = optax.adam(1e-3)
    gradient = jax.tree.map(lambda x: x * 2, params)
    state = tx.update(gradient, tx.init(params), params)[1]
    with CheckpointStore(tmp_path / "run") as store:
        store.save(
            3,
            model=params,
            optimizer=state,
            data={},
            assets=tmp_path / "assets",
            shapes=unpadded_shapes(source.config) if recorded else None,
        )
    for tensor, shape in ((1, {"sequence": 4}), (2, {"tensor": 2, "fsdp": 4}), (8, {"tensor": 8})):
        other = llama(source.config, shape)
        abstract = {
            name: jax.ShapeDtypeStruct(p.shape, np.float32, sharding=other.shardings[name])
            for name, p in other.parameters.items()
        }
        moments = jax.eval_shape(tx.init, abstract)
        placed = jax.tree_util.tree_map_with_path(
            lambda path, x, o=other: jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=o.shardings.get(getattr(path[-1], "key", None), o.shardings["norm.weight"])
                if x.ndim
                else None,
            ),
            moments,
        )
        restored = CheckpointStore(tmp_path / "run").restore(3, abstract, placed)
        assert restored.model["embed_tokens.weight"].shape[0] == {1: 129, 2: 130, 8: 136}[tensor]
        assert (
            restored.model["layers.self_attn.o_proj.weight"].shape[3]
            == {1: 44, 2: 44, 8: 42}[tensor]
        )
        assert restored.model["layers.self_attn.k_proj.bias"].shape[1] == {1: 3, 2: 4, 8: 8}[tensor]
        again = open_model(str(tmp_path / "run")).read(other)
        for name, value in params.items():
            for actual in (restored.model[name], again[name]):
                np.testing.assert_array_equal(
                    without_padding(name, actual), without_padding(name, value)
                )
            for actual, was in (
                (restored.optimizer[0].mu, state[0].mu),
                (restored.optimizer[0].nu, state[0].nu),
            ):
                np.testing.assert_array_equal(
                    without_padding(name, actual[name]), without_padding(name, was[name])
                )
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert (
        all(torch.equal(before[name], after[name]) for name in before)
        and before.keys() == after.keys()
    )
    with pytest.raises(
        ValueError, match=r"embed_tokens\.weight is float32\[132, 42\] in the checkpoint"
    ):
        restore_model(
            tmp_path / "run",
            model.shardings,
            shapes={
                **{name: p.shape for name, p in model.parameters.items()},
                "embed_tokens.weight": (132 + 1024, 42),
            },
        )
    with pytest.raises(
        ValueError, match=r"k_proj\.bias is float32\[3, 4, 16\] in the checkpoint.*\[3, 2, 16\]"
    ):
        restore_model(
            tmp_path / "run",
            model.shardings,
            shapes={
                **{name: p.shape for name, p in model.parameters.items()},
                "layers.self_attn.k_proj.bias": (3, 2, 16),
            },
        )


def test_new_rows_are_near_the_mean_and_the_same_on_every_mesh(folder):
    source = open_model(str(folder))
    grown = dataclasses.replace(
        source, config=dataclasses.replace(source.config, vocab_size=ROWS + 6)
    )
    before = read_hf(folder, source.config, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    single, sharded = (
        grown.read(llama(grown.config, shape), seed=5)
        for shape in ({}, {"tensor": 2, "sequence": 4})
    )
    for name, value in before.items():
        axis = vocabulary_axes().get(name)
        if axis is None:
            np.testing.assert_array_equal(single[name], value)
            continue
        old, rows = np.split(np.asarray(single[name]), [ROWS], axis)
        np.testing.assert_array_equal(old, value)
        np.testing.assert_allclose(
            np.asarray(sharded[name])[tuple(map(slice, single[name].shape))],
            single[name],
            atol=1e-6,
        )
        noise = rows - np.asarray(value, np.float64).mean(axis, keepdims=True)
        assert noise.shape[axis] == 6 and 0.015 < noise.std() < 0.025 and np.abs(noise).max() < 0.1


def test_a_run_that_adds_control_tokens_is_exported_with_them(tmp_path, repository, small_recipe):
    """chatml on a model without its tokens: trained on four tensor ranks, exported, loaded by
    transformers."""
    bare = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    make_model(tmp_path / "in", torch.float32, vocab_size=bare.vocab_size, eos_token_id=bare.eos_id)
    bare.save(tmp_path / "in")
    flags = small_run.command(
        small_recipe,
        tmp_path / "run",
        *("--model.path", tmp_path / "in", "--model.trainable", "embed_tokens.*|lm_head.*"),
        *("--data.template", "chatml", "--data.prepared", tmp_path / "prepared"),
        *("--train.steps", 2, "--train.batch_size", 2, "--mesh.fsdp", 1, "--mesh.tensor", 4),
    )
    assert train.main(flags) == 2  # refused: suggests adding them
    assert train.main([*flags, "--data.add_control_tokens", "true"]) == 0
    assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == bare.vocab_size + 1 and model.config.vocab_size == bare.vocab_size + 2
    assert model.get_input_embeddings().weight.shape[0] == bare.vocab_size + 2
    assert model.generation_config.eos_token_id == [bare.eos_id, end]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[0] == end - 1 and ids.count(end) == 1
    moved = (
        model.get_input_embeddings().weight[: bare.vocab_size].detach().numpy()
        != tensors(tmp_path / "in")["model.embed_tokens.weight"].numpy()
    )
    assert moved.any() and json.loads((tmp_path / "out/config.json").read_text())[
        "eos_token_id"
    ] == [bare.eos_id, end]
