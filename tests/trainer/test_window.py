"""A recipe with a sliding window and global tokens: train.py runs it, its checkpoint records it,
evaluation and export respect it."""

import json
import math

import pytest
import yaml

import model.decode
import train
from eval import line_retrieval
from model.attention import Mask
from scripts import export_hf
from tests import small_run
from trainer.model_source import open_model

MASK = Mask(window=24, global_tokens=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory, repository):
    """Three steps of a small recipe on two sequence shards."""
    folder = tmp_path_factory.mktemp("window")
    recipe = small_run.recipe(folder, repository, conversations=40)
    written = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    written["mesh"] = {"data": 4, "sequence": 2, "simulate": 8}
    written["attention"] |= {"window": MASK.window, "global_tokens": MASK.global_tokens}
    written["train"] = {"steps": 3, "batch_size": 4}
    recipe.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    assert train.main(small_run.command(recipe, folder / "run")) == 0
    return folder / "run"


def test_train_runs_it_and_its_checkpoint_records_it(run):
    rows = small_run.rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and all(
        math.isfinite(row["loss_nats_per_target"]) for row in rows
    )
    for path in (run, run / "checkpoints", run / "checkpoints" / "3"):
        opened = open_model(str(path))
        assert opened.mask == MASK and opened.folder == run / "checkpoints" / "3"


def test_line_retrieval_uses_the_same_mask(run, tmp_path, monkeypatch):
    seen = []

    class Generator(model.decode.Generator):
        def __call__(self, params, prompts, draws=None):
            seen.append(self.model.mask)
            return [[5]] * len(prompts)

    monkeypatch.setattr(model.decode, "Generator", Generator)
    flags = ["--checkpoint", str(run), "--output", str(tmp_path / "found")]
    flags += ["--lines", "2", "--count", "1", "--sequence", "8"]
    line_retrieval.evaluate(line_retrieval.parse(flags))
    assert seen == [MASK]


def test_export_warns_that_a_llama_config_cannot_express_it(run, tmp_path, capsys):
    assert export_hf.main([str(run), str(tmp_path / "hf")]) == 0
    (warning,) = (
        line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")
    )
    assert "attention.window = 24" in warning and "attention.global_tokens = 4" in warning
    assert "sliding_window" not in json.loads(
        (tmp_path / "hf" / "config.json").read_text(encoding="utf-8")
    )
    assert open_model(str(tmp_path / "hf")).mask == Mask()
