"""train.epochs: the run trains each row that many times, in as few steps as possible; metrics report
the fraction of epochs."""

import dataclasses
import shutil

import jax
import pytest
import torch
import transformers
import yaml

import train
from scripts import export_hf
from tests import small_run
from trainer.checkpoint.readers import stored_parameters
from trainer.config.load import dump, load
from trainer.config.schema import TrainConfig
from trainer.mesh import make_mesh
from trainer.state import TrainingState
from trainer.text import TextObjective


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"),
    [(None, 10, 100), (3, 10, 8), (0.01, 10, 1), (1, 8, 2), (2.5, 7, 5), (0.07, 400, 7)],
)
def test_steps_of_epochs(epochs, rows, steps):
    assert TrainConfig(batch_size=4, epochs=epochs).for_epochs(rows).steps == steps


@pytest.mark.parametrize(
    ("epochs", "rows", "taken"),
    [
        (None, 10, [0, 4, 8, 12]),
        (None, None, [0, 4, 8, 12]),
        (1, 8, [0, 4, 8]),
        (1, 9, [0, 4, 8, 9]),
        (3, 3, [0, 4, 8, 9]),
        (0.5, 9, [0, 4, 5]),  # half a row is trained as a whole one
        (0.07, 100, [0, 4, 7]),  # 0.07 * 100 is a little more than 7
        (0.01, 10, [0, 1]),
    ],
)
def test_the_last_step_of_epochs_takes_only_the_rows_that_are_left(epochs, rows, taken):
    train = TrainConfig(batch_size=4, steps=3, epochs=epochs).for_epochs(rows)
    assert [train.rows_taken(step, rows) for step in range(train.steps + 1)] == taken


def test_endless_data_have_no_epochs():
    with pytest.raises(
        ValueError,
        match=r"train\.epochs: found 2, needs to be left out, since rows are drawn endlessly",
    ):
        TrainConfig(epochs=2).for_epochs(None)


def test_an_epoch_without_rows_is_refused():
    with pytest.raises(
        ValueError,
        match=r"train\.epochs: found 2, needs to be left out, since the sources' weights leave no",
    ):
        TrainConfig(epochs=2).for_epochs(0)


@pytest.mark.parametrize("epochs", ["0", "-1", ".nan"])
def test_epochs_are_positive(small_recipe, epochs):
    with pytest.raises(Exception, match=r"train\.epochs: found .*, needs a positive number"):
        load(["--config", str(small_recipe), "--train.epochs", epochs])


def test_another_number_of_epochs_is_refused_before_compiling(small_recipe, tmp_path, capfd):
    run = tmp_path / "run"
    words = ["--config", str(small_recipe), "--run_dir", str(run), *small_run.DATA_PARALLEL]
    begun = load([*words, "--train.epochs", "0.1"])
    run.mkdir()
    begun = dataclasses.replace(begun, train=dataclasses.replace(begun.train, steps=3))
    (run / "config.yaml").write_text(dump(begun), encoding="utf-8")
    assert train.main([*words, "--train.epochs", "0.2"]) == 2
    errors = capfd.readouterr().err
    assert "train.steps is 3 there and" in errors and "compiling" not in errors
    # A dry run says the same.
    assert train.main([*words, "--train.epochs", "0.2", "--dry-run"]) == 2
    assert "train.steps is 3 there and" in capfd.readouterr().err


@pytest.fixture(scope="module")
def words(small_recipe):
    """A command whose run can be extended, without its folder and length."""
    return [
        *("--config", str(small_recipe), "--train.evaluate_every", "0"),
        *("--optimizer.schedule", "constant", "--checkpoint.every", "1"),
        *small_run.DATA_PARALLEL,
    ]


@pytest.fixture(scope="module")
def loader(words):
    """The run's rows, as if it never ended."""
    config = load(words)
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.devices])
    return TextObjective(config, mesh).loader


@pytest.fixture(scope="module")
def epochs(loader):
    """A length of which the last step has 3 rows of 8."""
    return str((2 * 8 + 3) / len(loader))


@pytest.fixture(scope="module")
def whole(words, epochs, tmp_path_factory):
    """The folder of that run."""
    run = tmp_path_factory.mktemp("epochs") / "run"
    assert train.main([*words, "--run_dir", str(run), "--train.epochs", epochs]) == 0
    return run


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run", symlinks=True)


def torch_step(checkpoint, rows, folder):
    """The mean loss over the targets of some rows' documents, each on its own, and the norm of its
    gradient, by transformers in float64."""
    assert export_hf.main([str(checkpoint), str(folder)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total, count = 0.0, 0
    for row in rows:
        for number in range(1, row["segment_ids"].max() + 1):
            document = row["segment_ids"] == number
            tokens = torch.tensor(row["tokens"][document])
            weights = torch.tensor(row["loss_weights"][document][:-1])
            logits = model(input_ids=tokens[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, tokens[1:].long(), reduction="none")
            total, count = total + (losses * weights).sum(), count + weights.sum()
    (total / count).backward()
    norm = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None]).norm()
    return (total / count).item(), int(count), norm.item()


def test_each_row_is_trained_as_often_as_epochs_says(whole, loader, epochs, tmp_path):
    metrics = small_run.rows(whole / "metrics.jsonl")
    rows = [loader.row(number) for number in range(19)]
    assert len(metrics) == 3 and metrics[-1]["epoch"] == pytest.approx(float(epochs), rel=1e-12)
    assert metrics[0]["epoch"] == 8 / len(loader)
    assert sum(row["target_tokens"] for row in metrics) == sum(
        row["loss_weights"].sum() for row in rows
    )
    assert metrics[-1]["tokens_seen"] == sum((row["segment_ids"] > 0).sum() for row in rows)
    loss, count, norm = torch_step(whole / "checkpoints" / "2", rows[16:], tmp_path / "hf")
    last = metrics[-1]
    assert last["target_tokens"] == count
    assert last["loss_nats_per_target"] == pytest.approx(loss, rel=1e-5)
    assert last["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_run_resumes_before_its_last_step(copied, whole, words, epochs, monkeypatch, capfd):
    """Bitwise; also a run begun by a release that filled every batch, and counted no rows."""
    resume = TrainingState._resume_from

    def resume_earlier_run(state, restored, path):
        assert restored.data.pop("rows_seen") == 16
        resume(state, restored, path)

    monkeypatch.setattr(TrainingState, "_resume_from", resume_earlier_run)
    shutil.rmtree(copied / "checkpoints" / "3")
    assert train.main([*words, "--run_dir", str(copied), "--train.epochs", epochs]) == 0
    errors = capfd.readouterr().err
    assert "continuing from step 2" in errors and "not trained on" not in errors
    (again, rows), (expected, expected_rows) = (
        (
            stored_parameters(run / "checkpoints" / "3"),
            list(map(small_run.without_measured, small_run.rows(run / "metrics.jsonl"))),
        )
        for run in (copied, whole)
    )
    assert rows == expected_rows and again.keys() == expected.keys()
    for name, array in expected.items():
        assert again[name].read().result().tobytes() == array.read().result().tobytes(), name


def test_a_run_of_epochs_has_the_steps_recorded_and_may_be_extended(
    copied, words, epochs, loader, capfd
):
    command = [*words, "--run_dir", str(copied)]
    recorded = yaml.safe_load((copied / "config.yaml").read_text(encoding="utf-8"))
    assert recorded["train"]["steps"] == 3
    # The same command finds the run finished.
    assert train.main([*command, "--train.epochs", epochs]) == 0
    found = capfd.readouterr().err
    assert "already trained to step 3" in found and "not trained" not in found
    # A longer run counts the rows that it leaves out, even if they are all that it adds.
    for rows in (24, 30):
        assert train.main([*command, "--train.epochs", str(rows / len(loader))]) == 0
        found = capfd.readouterr().err
        assert ("already trained to step 3" in found) == (rows == 24)
        assert (
            "checkpoints/3: the run was extended after a last step that took only the rows left of "
            "its epochs: the other 5 rows of that batch are not trained on"
        ) in found
    metrics = small_run.rows(copied / "metrics.jsonl")
    assert len(metrics) == 4 and metrics[-1]["epoch"] == pytest.approx(25 / len(loader))
    for name in ("epoch", "tokens_seen", "wall_seconds"):
        values = [row[name] for row in metrics]
        assert values == sorted(values) and len(set(values)) == len(values), name
    shares = [row["padding_share"] for row in metrics]
    assert metrics[-1]["tokens_seen"] == round(sum((1 - share) * 8 * 128 for share in shares))


def test_an_earlier_releases_run_that_filled_its_last_batch_left_no_rows_out(
    copied, words, epochs, monkeypatch, capfd
):
    """The warning was printed with -5 rows."""
    resume = TrainingState._resume_from

    def resume_earlier_run(state, restored, path):
        assert restored.data.pop("rows_seen") == 19
        resume(state, restored, path)

    monkeypatch.setattr(TrainingState, "_resume_from", resume_earlier_run)
    assert train.main([*words, "--run_dir", str(copied), "--train.epochs", epochs]) == 0
    found = capfd.readouterr().err
    assert "already trained to step 3" in found and "not trained" not in found


def test_a_run_shortened_to_its_newest_checkpoint_ends_like_one_of_that_length(
    copied, words, tmp_path, capfd
):
    """It kept the logs of later steps, and made no measurement after its last step."""
    shutil.rmtree(copied / "checkpoints" / "3")
    for run in (copied, tmp_path / "at once"):
        command = [*words, "--run_dir", str(run), "--train.steps", "2"]
        assert train.main(command) == 0
        assert train.main(command) == 0
    assert "lost" not in (errors := capfd.readouterr().err) and "changed" not in errors
    for log in ("metrics.jsonl", "held_out.jsonl"):
        rows, at_once = (
            list(map(small_run.without_measured, small_run.rows(run / log)))
            for run in (copied, tmp_path / "at once")
        )
        assert rows == at_once and rows[-1]["step"] == 2, log


def test_a_dry_run_counts_the_rows_of_the_run(words, epochs, tmp_path, capfd):
    command = [*words, "--run_dir", str(tmp_path / "run"), "--train.epochs", epochs, "--dry-run"]
    assert train.main(command) == 0
    assert (
        f"steps: 3 of 8 rows: 19 rows, {float(epochs):.2f} epochs, {19 * 128:,} tokens"
        in capfd.readouterr().out
    )


def test_stages_need_steps(small_recipe):
    with pytest.raises(
        Exception, match=r"train\.epochs: found 1\.0, needs to be left out with stages"
    ):
        stages = '[{"context_length": 64}]'
        load(["--config", str(small_recipe), "--train.epochs", "1", "--stages", stages])


def test_the_section_keeps_its_other_fields():
    section = TrainConfig(batch_size=2, epochs=1.5, accumulation=2)
    assert section.for_epochs(4) == dataclasses.replace(section, steps=3)
