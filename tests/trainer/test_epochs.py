"""train.epochs: the run takes as many steps as that many passes over its data; metrics report the
fraction of epochs."""

import dataclasses
import math

import pytest
import yaml

import train
from tests import small_run
from trainer.config.load import dump, load
from trainer.config.schema import TrainConfig


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"),
    [(None, 10, 100), (3, 10, 8), (0.01, 10, 1), (1, 8, 2), (2.5, 7, 5), (0.07, 400, 7)],
)
def test_steps_of_epochs(epochs, rows, steps):
    assert TrainConfig(batch_size=4, epochs=epochs).for_epochs(rows).steps == steps


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


def test_a_run_of_epochs_equals_the_run_of_its_steps_and_resumes(small_recipe, tmp_path, capfd):
    run = tmp_path / "run"
    words = [
        "--config",
        str(small_recipe),
        "--run_dir",
        str(run),
        "--train.evaluate_every",
        "0",
        "--optimizer.schedule",
        "constant",
        *small_run.DATA_PARALLEL,
    ]
    assert train.main([*words, "--train.epochs", "0.1"]) == 0
    first = small_run.rows(run / "metrics.jsonl")
    rows = 8 / first[0]["epoch"]
    assert rows == round(rows) and len(first) == math.ceil(0.1 * rows / 8)
    assert yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["train"][
        "steps"
    ] == len(first)
    # The same command finds the run finished; `train.steps` with the epochs' steps continues the
    # same run; twice the epochs lengthen it.
    assert train.main([*words, "--train.epochs", "0.1"]) == 0
    assert train.main([*words, "--train.steps", str(len(first))]) == 0
    assert capfd.readouterr().err.count(f"already trained to step {len(first)}") == 2
    assert train.main([*words, "--train.epochs", "0.2"]) == 0
    whole = small_run.rows(run / "metrics.jsonl")
    assert len(whole) == math.ceil(0.2 * rows / 8)
    for name in ("epoch", "tokens_seen", "wall_seconds"):
        values = [row[name] for row in whole]
        assert values == sorted(values) and len(set(values)) == len(values), name
    shares = [row["padding_share"] for row in whole]
    assert whole[-1]["tokens_seen"] == round(sum((1 - share) * 8 * 128 for share in shares))


def test_stages_need_steps(small_recipe):
    with pytest.raises(
        Exception, match=r"train\.epochs: found 1\.0, needs to be left out with stages"
    ):
        load(
            [
                "--config",
                str(small_recipe),
                "--train.epochs",
                "1",
                "--stages",
                '[{"context_length": 64}]',
            ]
        )


def test_the_section_keeps_its_other_fields():
    section = TrainConfig(batch_size=2, epochs=1.5, accumulation=2)
    assert section.for_epochs(4) == dataclasses.replace(section, steps=3)
