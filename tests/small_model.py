"""A very small LLaMA with a tokenizer, as a Hugging Face folder."""

import dataclasses
import json
import pathlib

import numpy as np

from data.templates import jinja_template
from data.tokenizer import Tokenizer
from model.config import TransformerConfig
from model.rope_config import RopeConfig
from trainer.huggingface.assets import write_source_dtype
from trainer.huggingface.table import hf_layout
from trainer.huggingface.write import write_hf

TOKENIZER = pathlib.Path(__file__).resolve().parents[1] / "data/fixtures/tiny_tokenizer"
CONFIG = TransformerConfig(
    vocab_size=1024,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
# In rows of more than 128 tokens it has other RoPE frequencies.
LONGROPE = dataclasses.replace(
    CONFIG,
    max_position_embeddings=512,
    rope=RopeConfig(
        "longrope",
        factor=4.0,
        short_factor=(1.0, 1.0, 1.0, 1.0),
        long_factor=(1.0, 3.0, 9.0, 30.0),
        original_max_position_embeddings=128,
    ),
)


def write(folder: pathlib.Path, config: TransformerConfig = CONFIG) -> pathlib.Path:
    """Writes a model with random float32 weights into `folder`; returns its Hugging Face folder."""
    assets = folder / "assets"
    assets.mkdir()
    tokenizer = Tokenizer.load(TOKENIZER)
    tokenizer.save(assets, jinja_template("vicuna_v1.1", tokenizer))
    write_source_dtype(assets, "float32")
    (assets / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    generator = np.random.default_rng(0)
    params = {
        entry.name: generator.normal(size=entry.shape).astype(np.float32)
        for entry in hf_layout(config)
    }
    write_hf(params, config, assets, folder / "hf")
    return folder / "hf"
