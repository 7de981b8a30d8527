"""Plans of preference tuning: the planned step is the trained one, without the arrays of a second
model."""

import dataclasses
import math
import re

import jax
import pytest

from model.config import TransformerConfig
from planning.plan import DEFAULT_RECIPE, changed, compile_run
from scripts.benchmarks.plan_store import read_plans
from trainer.config.data import SourceConfig
from trainer.config.preference import PreferenceConfig
from trainer.config.schema import AdapterConfig, MeshConfig
from trainer.huggingface.table import hf_layout
from trainer.mesh import make_mesh
from trainer.objectives import objective_class

LENGTH, VOCABULARY, CHUNK = 512, 1024, 32
MODEL = TransformerConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def job(**preference):
    run = changed(
        DEFAULT_RECIPE,
        data={"context_length": LENGTH},
        train={"batch_size": 1},
        memory={"loss_chunk": CHUNK},
        mesh=MeshConfig(),
        adapter=AdapterConfig(rank=4),
        model={"compute_dtype": "float32"},
    )
    if not preference:
        return run
    sources = (SourceConfig("-", "preference"),)
    return changed(
        run,
        preference=PreferenceConfig(**preference),
        data=dataclasses.replace(run.data, sources=sources),
    )


@pytest.mark.parametrize("loss", ["sigmoid", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_step_has_no_second_model_and_no_whole_logits(loss):
    """The base is the reference and runs once, before the first step: a step reads two numbers per
    pair."""
    devices = jax.devices()[:1]
    text = compile_run(job(), MODEL, devices).memory_analysis()
    compiled = compile_run(job(loss=loss), MODEL, devices)
    memory = compiled.memory_analysis()
    extra_arguments = memory.argument_size_in_bytes - text.argument_size_in_bytes
    assert 0 < extra_arguments < 4 * LENGTH + 1024 < text.argument_size_in_bytes / 100
    logits = [
        size
        for size in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
        if size.endswith(f",{VOCABULARY}")
    ]
    rows = {int(size.split(",")[-2]) for size in logits}
    assert CHUNK in rows <= {CHUNK, MODEL.hidden_size}, "logits exist for one chunk at a time"
    copy = text.argument_size_in_bytes
    assert memory.temp_size_in_bytes < text.temp_size_in_bytes + copy / 2, "no copy of the model"


def test_the_plan_at_128k_tokens_has_no_whole_logits_and_no_reference():
    """The CUDA compiler's figures for the recipe, for one of its eight GPUs."""
    plan = read_plans()["preference/llama31_8b_128k_qlora"]
    shape = TransformerConfig.preset(plan["model"])
    logits = plan["context"] / 8 * shape.vocab_size * 4 / 2**30
    assert plan["temporaries_gib"] < logits / 2
    both_embeddings = 2 * shape.vocab_size * shape.hidden_size
    others = sum(math.prod(entry.shape) for entry in hf_layout(shape)) - both_embeddings
    base = (2 * both_embeddings + others / 2) / 8 / 2**30  # bfloat16, and 4-bit codes
    arguments = plan["peak_gib"] - plan["temporaries_gib"]
    assert base < arguments < 1.5 * base, "more than one base, adapters and their moments"


def test_the_planned_batch_has_the_arrays_of_training():
    run = job(loss="kto")
    mesh = make_mesh(run.mesh, jax.devices()[:1])
    _, batch = objective_class(run).abstract_model_and_batch(run, MODEL, mesh)
    names = {"pairs", "chosen_shares", "references", "labels", "label_shares", "shared"}
    assert names <= batch.keys() and batch["references"].shape == (1, 1, 2)
    windowed = changed(run, attention={"window": 8})
    _, batch = objective_class(windowed).abstract_model_and_batch(windowed, MODEL, mesh)
    assert "shared" not in batch, "windows count tokens of the row, so prompts cannot be shared"
