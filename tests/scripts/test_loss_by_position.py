"""Loss by position: buckets against counting, and the command's numbers against transformers'
losses."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
import yaml

from data.outputs import PICTURE
from data.tokenizer import Tokenizer
from planning.auto import Machine
from scripts import loss_by_position
from tests.conftest import REPOSITORY
from tests.errors import within

TOKENIZER = REPOSITORY / "data/fixtures/tiny_tokenizer"
LENGTH = 64


def test_buckets_are_powers_of_two_of_the_tokens_before():
    rng = np.random.default_rng(0)
    losses, weights = rng.exponential(size=(3, 300)), rng.integers(0, 2, (3, 300))
    positions = rng.permuted(np.tile(np.arange(300), (3, 1)), axis=1)
    buckets = loss_by_position.Buckets()
    for row in range(3):
        buckets.add(losses[row], positions[row], weights[row])
    rows = buckets.rows()
    assert [(row["tokens_before_from"], row["tokens_before_to"]) for row in rows] == [
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 31),
        (32, 63),
        (64, 127),
        (128, 255),
        (256, 511),
    ]
    for row in rows:
        # The token at position p has p tokens before it, and its target p + 1.
        bucket = [
            losses[r, i]
            for r in range(3)
            for i in range(300)
            if weights[r, i]
            and row["tokens_before_from"] <= positions[r, i] + 1 <= row["tokens_before_to"]
        ]
        assert row["targets"] == len(bucket)
        assert row["loss_nats_per_target"] == pytest.approx(np.mean(bucket))
        assert row["standard_error"] == pytest.approx(np.std(bucket, ddof=1) / len(bucket) ** 0.5)


@pytest.mark.parametrize("name", ["runs/[red]/checkpoints/3", "runs/lr[/0.1]"])
def test_a_checkpoints_path_is_not_read_as_markup(name, capsys):
    loss_by_position.print_table({name: []}, "Loss by position")
    assert name in capsys.readouterr().out


def transformers_losses(model, row, tokens):
    """Returns the losses of a row's targets, each predicted from the piece of `tokens` tokens that
    contains the preceding token."""
    losses = []
    for start in range(0, len(row) - 1, tokens):
        piece = torch.tensor([row[start : start + tokens]])
        targets = torch.tensor(row[start + 1 : start + tokens + 1])
        with torch.no_grad():
            logits = model(piece).logits[0, : len(targets)]
        losses += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
    return np.array(losses)


def test_the_command_matches_transformers_losses(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer.load(TOKENIZER)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=1024,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            initializer_range=0.3,
            bos_token_id=tokenizer.bos_id,
            eos_token_id=tokenizer.eos_id,
        )
    )
    model.save_pretrained(tmp_path / "hf")
    for file in TOKENIZER.iterdir():
        shutil.copy(file, tmp_path / "hf" / file.name)
    # A text of 7 full rows and a rest, so that the number of rows is even.
    words = ["whale", "ship", "sea", "swam", "sailed", "round", "and", "the"]
    rng, text, ids = np.random.default_rng(1), "", []
    while len(ids) < 7.5 * LENGTH:
        text += str(rng.choice(words)) + " "
        ids = [
            i
            for i in (tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id)
            if i is not None
        ]
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"compute_dtype": "float32"},
                "data": {
                    "sources": [
                        {"path": str(tmp_path / "book.txt"), "format": "text", "add_bos": True}
                    ],
                    "context_length": LENGTH,
                    "held_out_fraction": 0.0,
                    "prepared": str(tmp_path / "prepared"),
                },
                "mesh": {"fsdp": 2, "sequence": 4, "simulate": 8},
                "train": {"batch_size": 2},
            }
        )
    )
    common = [
        "--config",
        str(tmp_path / "recipe.yaml"),
        "--checkpoint",
        str(tmp_path / "hf"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert loss_by_position.main([*common, "--without-earlier", "8", "24"]) == 0
    written = json.loads((tmp_path / "out/loss_by_position.json").read_text())
    rows = written["curves"][str(tmp_path / "hf")]
    output = capsys.readouterr().out
    assert "split train, batches 0 to 3 of 4 (0 skipped)" in output and "batch 4 of 4: " in output
    assert "has seen these rows" in output and str(
        tmp_path / "out/loss_by_position.png"
    ) in output.replace("\n", "")
    assert (
        written["about"]["batches"] == 4
        and PICTURE in (tmp_path / "out/loss_by_position.png").read_bytes()[:1000]
    )
    expected, expected_gain = {}, {}
    for start in range(0, len(ids), LENGTH):
        row = ids[start : start + LENGTH]
        losses = transformers_losses(model, row, LENGTH)
        # Without the earlier text, as if a piece of 24 tokens were everything; the next piece's
        # first token is a target too.
        gains = transformers_losses(model, row, 24) - losses
        for before in range(1, len(row)):
            expected.setdefault(before.bit_length() - 1, []).append(losses[before - 1])
            expected_gain.setdefault(before.bit_length() - 1, []).append(gains[before - 1])
    assert [row["targets"] for row in rows] == [len(expected[k]) for k in range(6)]
    measured = [row["loss_nats_per_target"] for row in rows]
    curve = [np.mean(expected[k]) for k in range(6)]
    within(np.abs(np.array(measured) - curve).max(), 1e-4, "loss")
    assert {len(curve) for curve in written["curves"].values()} == {6} and len(
        written["curves"]
    ) == 3
    gains = written["gains"][f"{tmp_path / 'hf'}, against pieces of 24 tokens"]
    assert [row["tokens_before_from"] for row in gains] == [16, 32], (
        "no difference where both see the same text"
    )
    np.testing.assert_allclose(
        [row["loss_nats_per_target"] for row in gains],
        [np.mean(expected_gain[k]) for k in (4, 5)],
        atol=1e-4,
    )
    np.testing.assert_allclose(
        [row["standard_error"] for row in gains],
        [np.std(expected_gain[k], ddof=1) / len(expected_gain[k]) ** 0.5 for k in (4, 5)],
        rtol=1e-3,
    )
    assert "Gain from earlier text" in output
    source = {"path": str(tmp_path / "book.txt"), "format": "text", "add_bos": True}
    without_recipe = [*common[2:], "--data.sources", json.dumps([source]), "--mesh.simulate", "8"]
    for field, value in (
        ("model.compute_dtype", "float32"),
        ("data.context_length", LENGTH),
        ("data.held_out_fraction", 0),
        ("data.prepared", tmp_path / "prepared"),
        ("train.batch_size", 2),
    ):
        without_recipe += [f"--{field}", str(value)]
    # Training would not fit there, but no gradients or moments are needed.
    monkeypatch.setattr(
        "planning.auto.machine_of", lambda _: Machine("gpu:8", "8 x small GPU", 1e-6, 0.0)
    )
    assert loss_by_position.main(without_recipe) == 0
    assert "mesh: data 1 x fsdp 2 x tensor 1 x sequence 4 = 8\n" in capsys.readouterr().out
    written = json.loads((tmp_path / "out/loss_by_position.json").read_text())
    again = [row["loss_nats_per_target"] for row in written["curves"][str(tmp_path / "hf")]]
    within(np.abs(np.array(again) - curve).max(), 1e-4, "loss")
    assert loss_by_position.main([*common, "--skip", "4"]) == 2, "there is no fifth batch"
    assert (
        loss_by_position.main(
            [*common, "--batches", "1", "--data.held_out_path", str(tmp_path / "book.txt")]
        )
        == 0
    )
    output = capsys.readouterr().out
    assert "split held_out, batches 0 to 0 of 4" in output, (
        "the held-out split is measured if there is one"
    )
    assert "has seen these rows" not in output


def test_documents_are_cut_into_pieces_that_cannot_attend_to_each_other():
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 0, 0], [6, 4, 2, 0, 5, 3, 1, 0, 1, 2]])
    segment_ids = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
    pieces = loss_by_position.cut(
        {"positions": positions, "segment_ids": segment_ids, "tokens": positions}, 2
    )
    assert (
        pieces["positions"].tolist() == (positions % 2).tolist() and pieces["tokens"] is positions
    )
    for row in range(2):
        for a in range(10):
            for b in range(10):
                same = (
                    segment_ids[row, a] == segment_ids[row, b]
                    and positions[row, a] // 2 == positions[row, b] // 2
                )
                if segment_ids[row, a] and segment_ids[row, b]:
                    assert (pieces["segment_ids"][row, a] == pieces["segment_ids"][row, b]) == same
        assert ((pieces["segment_ids"][row] == 0) == (segment_ids[row] == 0)).all()
