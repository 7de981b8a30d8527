"""The comparison of Gemma 3 with transformers, on a small random model."""

import dataclasses

import jax
import pytest

import trainer.mesh
from model.config import TransformerConfig
from scripts.benchmarks import gemma3
from tests import small_model


@pytest.mark.slow
def test_our_logits_match_transformers_and_a_book_is_read_from_its_middle(tmp_path, monkeypatch):
    config = dataclasses.replace(
        TransformerConfig.preset("gemma-3-270m"),
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        layer_types=("sliding_attention",) * 5 + ("full_attention",),
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=32,
        initializer_range=0.5,
    )
    book = tmp_path / "book.txt"
    book.write_text("no " * 5000 + "The striped ring sends keys and values around. " * 200)
    saved, make_mesh = {}, trainer.mesh.make_mesh
    monkeypatch.setattr(gemma3, "renew", lambda name, rows, command: saved.update(rows))
    monkeypatch.setattr(trainer.mesh, "simulate", lambda count: None)
    monkeypatch.setattr(
        trainer.mesh, "make_mesh", lambda config: make_mesh(config, jax.devices()[:4])
    )
    folder = small_model.write(tmp_path, config)
    command = ["--model", str(folder), "--book", str(book), "--tokens", "128"]
    assert gemma3.main(command) == 0
    assert [saved[name]["verdict"] for name in ("loss", "token", "answer")] == ["held"] * 3
    ours, theirs = map(float, saved["loss"]["found"].split(" and "))
    assert ours == pytest.approx(theirs, abs=1e-5) and ours > 1
