"""What the tests of whole runs share: one recipe and its uninterrupted run, and a pretrained model."""

import json

import numpy as np
import pytest

from data.templates import jinja_template
from data.tokenizer import Tokenizer
from model.config import LlamaConfig
from tests.trainer import small_run
from trainer.huggingface import hf_layout, write_source_dtype
from trainer.huggingface_write import write_hf


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory, repository):
    """Recipe of a very small run."""
    return small_run.recipe(tmp_path_factory.mktemp("small"), repository)


@pytest.fixture(scope="session")
def whole_run(small_recipe, repository):
    """Folder of that run, never interrupted; tests copy what they spoil."""
    run = small_recipe.parent / "whole"
    small_run.finish(small_run.start(repository, small_recipe, run), run)
    return run


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory, repository):
    """A Hugging Face folder of a very small LLaMA."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=128)
    assets = folder / "assets"
    assets.mkdir()
    tokenizer = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    tokenizer.save(assets, jinja_template("vicuna_v1.1", tokenizer))
    write_source_dtype(assets, "float32")
    (assets / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    generator = np.random.default_rng(0)
    params = {entry.name: generator.normal(size=entry.shape).astype(np.float32) for entry in hf_layout(config)}
    write_hf(params, config, assets, folder / "hf")
    return folder / "hf"
