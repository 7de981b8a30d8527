"""Loss by position: buckets against counting, and the command's numbers against transformers'
losses."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import peft
import pytest
import torch
import transformers
import yaml

from data.errors import UserError
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


def by_bucket(model, ids, tokens):
    """Returns transformers' losses of rows of LENGTH ids, each seeing its piece of `tokens` tokens,
    in lists by powers of two of the tokens before the target."""
    losses = {}
    for start in range(0, len(ids), LENGTH):
        row = ids[start : start + LENGTH]
        for before, loss in enumerate(transformers_losses(model, row, tokens), 1):
            losses.setdefault(before.bit_length() - 1, []).append(loss)
    return [np.array(losses[k]) for k in sorted(losses)]


def book(tokenizer):
    """Returns a text of 7 full rows and a rest, so that the number of rows is even, and its ids."""
    words = ["whale", "ship", "sea", "swam", "sailed", "round", "and", "the"]
    rng, text, ids = np.random.default_rng(1), "", []
    while len(ids) < 7.5 * LENGTH:
        text += str(rng.choice(words)) + " "
        ids = [
            i
            for i in (tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id)
            if i is not None
        ]
    return text, ids


class Case(NamedTuple):
    """A model's folder, a book and a recipe in a folder.

    Attributes:
      ids: the book's tokens.
      arguments: the command's, without those that the recipe replaces.
    """

    folder: Path
    model: transformers.LlamaForCausalLM
    ids: list[int]
    arguments: list[str]

    @property
    def recipe(self) -> list[str]:
        return ["--config", str(self.folder / "recipe.yaml")]

    @property
    def source(self) -> dict:
        return {"path": str(self.folder / "book.txt"), "format": "text", "add_bos": True}

    def measure(self, *arguments):
        """Runs the command and returns what it has written."""
        assert loss_by_position.main([*self.arguments, *arguments]) == 0
        return json.loads((self.folder / "out/loss_by_position.json").read_text())

    def curve(self, written):
        """Returns the losses of the model's buckets."""
        rows = written["curves"][str(self.folder / "hf")]
        return np.array([row["loss_nats_per_target"] for row in rows])


@pytest.fixture
def case(tmp_path, monkeypatch):
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
    text, ids = book(tokenizer)
    (tmp_path / "book.txt").write_text(text)
    arguments = ["--checkpoint", str(tmp_path / "hf"), "--output", str(tmp_path / "out")]
    case = Case(tmp_path, model, ids, arguments)
    data = {
        "sources": [case.source],
        "context_length": LENGTH,
        "held_out_fraction": 0.0,
        "prepared": str(tmp_path / "prepared"),
    }
    recipe = {
        "model": {"compute_dtype": "float32"},
        "data": data,
        "mesh": {"fsdp": 2, "sequence": 4, "simulate": 8},
        "train": {"batch_size": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return case


def test_losses_and_gains_from_earlier_text_match_transformers(case, capsys):
    written = case.measure(*case.recipe, "--without-earlier", "8", "24")
    output, name = capsys.readouterr().out, str(case.folder / "hf")
    assert "split train, batches 0 to 3 of 4 (0 skipped)" in output and "batch 4 of 4: " in output
    assert "has seen these rows" in output and "Gain from earlier text" in output
    picture = case.folder / "out/loss_by_position.png"
    assert str(picture) in output.replace("\n", "") and PICTURE in picture.read_bytes()[:1000]
    assert written["about"]["batches"] == 4
    assert [len(curve) for curve in written["curves"].values()] == [6, 6, 6]

    whole = by_bucket(case.model, case.ids, LENGTH)
    assert [row["targets"] for row in written["curves"][name]] == [len(losses) for losses in whole]
    expected = [losses.mean() for losses in whole]
    within(np.abs(case.curve(written) - expected).max(), 1e-4, "loss")

    # As if a piece of 24 tokens were everything; the next piece's first token is a target too.
    pieces = by_bucket(case.model, case.ids, 24)
    differences = [pieces[k] - whole[k] for k in (4, 5)]
    gains = written["gains"][f"{name}, against pieces of 24 tokens"]
    assert [row["tokens_before_from"] for row in gains] == [16, 32], (
        "no difference where both see the same text"
    )
    np.testing.assert_allclose(
        [row["loss_nats_per_target"] for row in gains],
        [difference.mean() for difference in differences],
        atol=1e-4,
    )
    np.testing.assert_allclose(
        [row["standard_error"] for row in gains],
        [difference.std(ddof=1) / len(difference) ** 0.5 for difference in differences],
        rtol=1e-3,
    )


def test_without_a_recipe_the_mesh_is_chosen_for_losses_alone(case, monkeypatch, capsys):
    """Training would not fit on these devices, but no gradients or moments are needed."""
    small = Machine("gpu:8", "8 x small GPU", 1e-6, 0.0)
    monkeypatch.setattr("planning.auto.machine_of", lambda _: small)
    fields = {
        "data.sources": json.dumps([case.source]),
        "data.context_length": LENGTH,
        "data.held_out_fraction": 0,
        "data.prepared": case.folder / "prepared",
        "mesh.simulate": 8,
        "model.compute_dtype": "float32",
        "train.batch_size": 2,
    }
    written = case.measure(*(part for name, x in fields.items() for part in (f"--{name}", str(x))))
    assert "mesh: data 1 x fsdp 2 x tensor 1 x sequence 4 = 8\n" in capsys.readouterr().out
    expected = [losses.mean() for losses in by_bucket(case.model, case.ids, LENGTH)]
    within(np.abs(case.curve(written) - expected).max(), 1e-4, "loss")


def test_a_checkpoint_has_its_own_rope_and_not_the_recipes(case):
    """Before training in stages the curve is that of the model as it is; a flag gives another."""
    recipe = yaml.safe_load((case.folder / "recipe.yaml").read_text())
    stage = {"context_length": LENGTH, "steps": 1, "rope": {"rope_theta": 20.0}}
    recipe["model"]["overrides"] = {"rope_theta": 50.0}
    (case.folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "stages": [stage]}))
    as_it_is = [losses.mean() for losses in by_bucket(case.model, case.ids, LENGTH)]
    within(np.abs(case.curve(case.measure(*case.recipe)) - as_it_is).max(), 1e-4, "loss")
    case.model.save_pretrained(case.folder / "rescaled")
    file = case.folder / "rescaled/config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] = 20.0
    file.write_text(json.dumps(config))
    rescaled = transformers.LlamaForCausalLM.from_pretrained(case.folder / "rescaled")
    rescaled = [losses.mean() for losses in by_bucket(rescaled, case.ids, LENGTH)]
    flags = ["--model.overrides", "{rope_theta: 20.0}"]
    within(np.abs(case.curve(case.measure(*case.recipe, *flags)) - rescaled).max(), 1e-4, "loss")
    assert np.abs(np.array(rescaled) - as_it_is).max() > 0.01


def test_the_held_out_split_is_measured_if_there_is_one(case, capsys):
    case.measure(
        *case.recipe, "--batches", "1", "--data.held_out_path", str(case.folder / "book.txt")
    )
    output = capsys.readouterr().out
    assert "split held_out, batches 0 to 0 of 4" in output and "has seen these rows" not in output


def test_rows_that_do_not_fill_a_batch_are_measured(case):
    """8 rows: 6 and 2."""
    written = case.measure(*case.recipe, "--train.batch_size", "6")
    whole = by_bucket(case.model, case.ids, LENGTH)
    [rows] = written["curves"].values()
    assert [row["targets"] for row in rows] == [len(losses) for losses in whole]
    within(np.abs(case.curve(written) - [x.mean() for x in whole]).max(), 1e-4, "loss")
    assert written["about"]["rows"] == 8


def test_targets_may_differ_in_the_token_that_ends_a_text():
    base = np.array([[5, 6, 2, 7, 2, -100]])
    tuned = np.array([[5, 6, 3, 7, 3, -100]])
    assert loss_by_position.same_targets(base, tuned)
    assert not loss_by_position.same_targets(base, np.array([[5, 6, 3, 8, 3, -100]]))
    assert not loss_by_position.same_targets(base, base[:, :-1])


def test_a_checkpoint_with_another_tokenizer_is_refused(case, capsys):
    """Its targets are others, though a loss per target would look comparable."""
    other = case.folder / "other"
    shutil.copytree(case.folder / "hf", other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:100]
    (other / "tokenizer.json").write_text(json.dumps(content))
    arguments = [*case.arguments, "--checkpoint", str(other), *case.recipe, "--batches", "1"]
    assert loss_by_position.main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--checkpoint: {other} has another tokenizer or chat template than" in error


def test_an_adapter_is_measured_on_its_base(case, capsys):
    """Beside the base, which the recipe's adapter is not a part of, against peft; another adapter
    would not be read."""
    expected = [[x.mean() for x in by_bucket(case.model, case.ids, LENGTH)]]
    adapted = peft.get_peft_model(
        case.model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    folder = case.folder / "adapter"
    adapted.peft_config["default"].base_model_name_or_path = str(case.folder / "hf")
    adapted.save_pretrained(folder)
    expected += [[x.mean() for x in by_bucket(adapted, case.ids, LENGTH)]]
    recipe = yaml.safe_load((case.folder / "recipe.yaml").read_text())
    section = {"rank": 4, "alpha": 6, "targets": ["q_proj", "down_proj"], "path": str(folder)}
    (case.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"adapter": section}))
    written = case.measure(*case.recipe, "--checkpoint", str(folder))
    losses = [
        [row["loss_nats_per_target"] for row in written["curves"][str(case.folder / name)]]
        for name in ("hf", "adapter")
    ]
    within(np.abs(np.subtract(losses, expected)).max(), 1e-4, "loss")
    assert np.abs(np.subtract(*expected)).max() > 0.1
    more = [*case.recipe, "--checkpoint", str(folder), "--adapter.path", "a", "--adapter.rank", "4"]
    assert loss_by_position.main(["--output", str(case.folder / "out"), *more]) == 2
    assert f"--adapter.path: {folder} is an adapter too" in capsys.readouterr().err


def test_a_checkpoint_is_measured_without_the_adapter_of_an_earlier_stage(case):
    """Stages hand on their adapters; the recipe's new one changes nothing."""
    stage = {"context_length": LENGTH, "batch_size": 2, "steps": 1}
    more = ["--stages", json.dumps([stage, stage]), "--adapter.rank", "4"]
    expected = [losses.mean() for losses in by_bucket(case.model, case.ids, LENGTH)]
    losses = case.curve(case.measure(*case.recipe, *more))
    within(np.abs(losses - expected).max(), 1e-4, "loss")


def test_devices_are_simulated_before_a_checkpoint_is_opened(case, monkeypatch, capsys):
    """To open a run's starts JAX, which then keeps its number of devices."""

    def simulate(devices):
        raise UserError(f"simulates {devices}")

    monkeypatch.setattr("trainer.mesh.simulate", simulate)
    monkeypatch.setattr("trainer.model_source.open_model", lambda *_, **__: pytest.fail("opened"))
    assert loss_by_position.main([*case.arguments, *case.recipe]) == 2
    assert capsys.readouterr().err == "error: simulates 8\n"


def test_a_recipe_of_episodes_is_refused(case, capsys):
    """The message does not ask for texts or a tokenizer, which such a run has not."""
    recipe = REPOSITORY / "configs/trajectories/walker_walk.yaml"
    assert loss_by_position.main([*case.arguments, "--config", str(recipe)]) == 2
    assert "error: trajectories.path: found " in capsys.readouterr().err


def test_skipping_all_batches_is_refused(case, capsys):
    assert loss_by_position.main([*case.arguments, *case.recipe, "--skip", "4"]) == 2
    assert "--skip" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--model.path", "m"], ["--model-path=m"]])
def test_a_model_beside_the_checkpoints_is_refused(tmp_path, capsys, flag):
    words = ["--data.path", "d", *flag, "--checkpoint", str(tmp_path), "--output", f"{tmp_path}/o"]
    assert loss_by_position.main(words) == 2
    assert "--model.path: each --checkpoint takes its place" in capsys.readouterr().err


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


def test_preference_pairs_are_refused(case, capsys):
    """A pair's two completions would be read as one text."""
    more = ["--preference.loss", "sigmoid", "--data.sources", "[{path: p, format: preference}]"]
    assert loss_by_position.main([*case.arguments, *case.recipe, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: preference.loss: found sigmoid; losses by position are of texts"
    )
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "repeated"),
    [
        (["--checkpoint", "m", "m"], "--checkpoint: found m"),
        (["--checkpoint", "m", "--without-earlier", "8", "16", "8"], "--without-earlier: found 8"),
    ],
)
def test_a_repeated_value_is_refused(words, repeated, capsys):
    """The same targets, counted twice, would only make standard errors smaller."""
    with pytest.raises(SystemExit, match="2"):
        loss_by_position.main(["--output", "o", "--data.path", "d", *words])
    assert capsys.readouterr().err == f"error: {repeated} twice; each value once would work\n"
