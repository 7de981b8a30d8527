"""`train.py --dry-run`: what it counts is what the data and a run's checkpoints are, and nothing is
trained."""

import re

import pytest
import yaml

import train
from planning.dry_run import dry_run
from trainer.config.load import load


@pytest.fixture(scope="module")
def recipe(small_recipe):
    return str(small_recipe)


def said_by(capsys, *argv) -> tuple[int, str]:
    status = train.main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_rows_epochs_and_padding_are_those_of_the_data(recipe, tmp_path, capsys):
    status, said = said_by(
        capsys, "--config", recipe, "--run_dir", str(tmp_path / "run"), "--dry-run"
    )
    documents, tokens = (
        int(count.replace(",", ""))
        for count in re.search(r"data: ([\d,]+) documents of ([\d,]+) tokens", said).groups()
    )
    rows, padding = re.search(
        r"rows: ([\d,]+) of 128 tokens in an epoch, ([\d.]+)% padding", said
    ).groups()
    assert status == 0 and documents > 100
    assert 1 - tokens / (int(rows) * 128) == pytest.approx(float(padding) / 100, abs=0.001)
    assert f"40 of 4 rows: 160 rows, {160 / int(rows):.2f} epochs, 20,480 tokens" in said
    assert "name the machine" in said and not (tmp_path / "run").exists()


def test_the_disk_is_that_of_the_run(recipe, whole_run, capsys):
    """Checkpoints after 7, 14, ... 35 and 40 steps, two of which are kept and a third is being
    written."""
    _, said = said_by(capsys, "--config", recipe, "--dry-run")
    count, size, most, total = re.search(
        r"disk: (\d+) checkpoints of ([\d.]+) MiB .* at most (\d+) at a time: ([\d.]+) MiB", said
    ).groups()
    assert (count, most) == ("6", "3") and float(total) == pytest.approx(3 * float(size), abs=0.2)
    # The best one, by the loss of the held-out data, stays beside them.
    best = said_by(
        capsys,
        "--config",
        recipe,
        "--checkpoint.best",
        "held_out_loss_nats_per_target",
        "--dry-run",
    )[1]
    assert "at most 4 at a time" in best
    newest = max((whole_run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    files = [
        file
        for part in ("model", "optimizer")
        for file in (newest / part).rglob("*")
        if file.is_file()
    ]
    stored = sum(file.stat().st_size for file in files)
    assert stored / 2**20 == pytest.approx(float(size), rel=0.35), (
        "Orbax adds indices and compresses"
    )


def test_a_machine_adds_time_and_says_what_fits(recipe, capsys):
    status, said = said_by(capsys, "--config", recipe, "--dry-run", "8xH100")
    assert status == 0 and "fits, by the estimate" in said and "seconds of a step" in said
    status, said = said_by(capsys, "--config", recipe, "--dry-run", "8xH10")
    assert status == 2 and "did you mean H100?" in said
    status, said = said_by(capsys, "--config", recipe, "--dry-run=2x8xH100")
    assert status == 2 and "has 16 devices, the mesh takes" in said


def test_a_gpu_of_which_only_the_memory_is_known(recipe, capsys):
    """--gpu-memory, as scripts.plan takes it; without it, whether the run fits is not known."""
    mesh = [
        "--mesh.fsdp",
        "1",
        "--mesh.tensor",
        "1",
        "--mesh.sequence",
        "1",
        "--mesh.simulate",
        "1",
    ]
    status, said = said_by(
        capsys, "--config", recipe, *mesh, "--dry-run", "gpu", "--gpu-memory", "24"
    )
    assert (
        status == 0 and "fits, by the estimate" in said and "a program may use        22.80" in said
    )
    status, said = said_by(
        capsys, "--config", recipe, *mesh, "--dry-run", "gpu", "--gpu-memory=0.001"
    )
    assert status == 1 and "does not fit, by the estimate" in said
    status, said = said_by(capsys, "--config", recipe, *mesh, "--dry-run", "gpu")
    assert status == 0 and "--gpu-memory GIB gives it" in said
    status, said = said_by(
        capsys, "--config", recipe, *mesh, "--dry-run", "gpu", "--gpu-memory", "much"
    )
    assert status == 2 and "--gpu-memory: found 'much'" in said


def test_what_does_not_fit_ends_with_1(small_recipe, tmp_path, capsys):
    fields = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    fields["model"]["overrides"] |= {
        "hidden_size": 16384,
        "intermediate_size": 65536,
        "num_hidden_layers": 80,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    }
    large = tmp_path / "large.yaml"
    large.write_text(yaml.safe_dump(fields), encoding="utf-8")
    status, said = said_by(capsys, "--config", str(large), "--dry-run", "8xA100-40GB")
    assert status == 1 and "does not fit, by the estimate" in said


def test_every_stage_is_counted(small_recipe, tmp_path, capsys):
    fields = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    fields["stages"] = [{"context_length": 64, "steps": 3}, {"context_length": 128, "steps": 2}]
    staged = tmp_path / "staged.yaml"
    staged.write_text(yaml.safe_dump(fields), encoding="utf-8")
    assert dry_run(load(["--config", str(staged), "--run_dir", str(tmp_path / "run")]))
    said = capsys.readouterr().out
    assert (
        "stage 1 of 2" in said
        and "steps: 3 of 4 rows: 12 rows" in said
        and "steps: 2 of 4 rows: 8 rows" in said
    )
