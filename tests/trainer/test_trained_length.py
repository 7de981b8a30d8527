"""The trained length of pretrained models, of runs from scratch and of their stages."""

import json

import pytest
import yaml

from model.config import TransformerConfig
from trainer.adapted_source import AdaptedSource, CheckpointAdapter
from trainer.source_kinds import CheckpointSource, HuggingFaceSource, ScratchSource
from trainer.trained_length import trained_length

CONFIG = TransformerConfig.preset("llama-7b", max_position_embeddings=2048)
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 32768,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 32768),
        ({"rope_scaling": YARN}, 131072),  # as Qwen 2.5's model card advises
        ({"model_type": "qwen3", "max_position_embeddings": 40960, "head_dim": 32}, 32768),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 32768),
    ],
)
def test_a_pretrained_model_has_the_length_of_its_positions(tmp_path, changes, length):
    (tmp_path / "config.json").write_text(json.dumps(QWEN | changes))
    config = TransformerConfig.from_hf(tmp_path)
    source = HuggingFaceSource(config, tmp_path, tmp_path, config)
    assert trained_length(source) == trained_length(source, 999_999) == length


def checkpoint(run, context_length, path=None):
    """Writes the recipe of a run and of its checkpoint; returns the checkpoint as a source."""
    folder = run / "checkpoints" / "3"
    (folder / "assets").mkdir(parents=True)
    recipe = {"model": {"path": path}, "data": {"context_length": context_length}}
    for file in (folder / "assets" / "run.yaml", run / "config.yaml"):
        file.write_text(yaml.safe_dump(recipe))
    return CheckpointSource(CONFIG, folder, folder, CONFIG)


def test_a_model_from_scratch_has_its_longest_stages_length(tmp_path):
    """Its positions reach further. Stages are found where the run is now."""
    assert trained_length(ScratchSource(CONFIG, tmp_path), 256) == 256
    run = tmp_path / "run"
    checkpoint(run / "stages" / "1", 512)
    second = checkpoint(run / "stages" / "2", 1024, "elsewhere/run/stages/1")
    last = checkpoint(run, 256, "elsewhere/run/stages/2")
    assert trained_length(second) == trained_length(last) == 1024
    assert trained_length(last, 4096) == 4096
    for end in ("run", "run/best", "run/checkpoints/3"):
        further = checkpoint(tmp_path / f"after {end}".replace("/", " "), 128, str(tmp_path / end))
        assert trained_length(further) == 1024
    adapter = CheckpointAdapter(None, checkpoint(tmp_path / "adapter", 1536, str(run)).folder)
    adapted = AdaptedSource(CONFIG, tmp_path, last, adapter)
    assert trained_length(adapted) == 1536


def test_a_run_on_a_pretrained_model_has_the_length_of_its_positions(tmp_path):
    """As has one whose first stage is gone, or that seems to continue itself."""
    (tmp_path / "hf").mkdir()
    for number, path in enumerate((str(tmp_path / "hf"), "org/name", "gs://bucket/run/stages/1")):
        source = checkpoint(tmp_path / str(number), 256, path)
        assert trained_length(source) == 2048
    assert trained_length(checkpoint(tmp_path / "loop", 256, str(tmp_path / "loop"))) == 2048
    without_recipe = checkpoint(tmp_path / "old", 256)
    (without_recipe.folder / "assets" / "run.yaml").unlink()
    assert trained_length(without_recipe) == 2048
