"""A run records the code it is trained with; processes with different code stop before the first
step."""

import json
import shutil

import jax
import pytest

import train
from data.errors import TransientError
from tests import small_run
from trainer.run import cluster, versions


def tree(root, **contents):
    for name, content in {
        "train.py": "1",
        "trainer/loop.py": "2",
        "data/x.py": "3",
        **contents,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_the_digest_covers_names_and_contents_of_the_code_that_training_runs(tmp_path):
    same = versions.source_digest(tree(tmp_path / "a"))
    assert versions.source_digest(tree(tmp_path / "b")) == same
    assert (
        versions.source_digest(
            tree(tmp_path / "c", **{"docs/x.md": "4", "trainer/x.pyc": "5", "scripts/x.py": "6"})
        )
        == same
    )
    for change in (
        {"data/x.py": "4"},
        {"data/y.py": "3"},
        {"train.py": "12"},
        {"model/new.py": ""},
    ):
        assert versions.source_digest(tree(tmp_path / str(change), **change)) != same


def test_libraries_and_the_commit_are_recorded():
    recorded = versions.versions()
    assert (
        recorded["jax"] == jax.__version__ and recorded["jaxlib"] and len(recorded["source"]) == 12
    )
    assert (
        versions.difference(recorded) == ""
        and versions.difference({**recorded, "commit": "elsewhere"}) == ""
    )
    assert versions.difference({**recorded, "jax": "0.1"}) == f"jax 0.1, now {jax.__version__}"
    assert versions.difference({**recorded, "libx": "1"}) == "libx 1, now (none)"


def test_a_process_with_other_code_is_named(monkeypatch):
    compared = {}

    def first_then_others(work, encode):  # acts as process 1, where process 0 has other sources
        received = {**compared, "this project's source": "other"}
        work(json.dumps(received))

    monkeypatch.setattr(cluster, "first_then_others", first_then_others)
    monkeypatch.setattr(
        versions, "versions", lambda: {"source": "mine", "jax": "1", "commit": "abc"}
    )
    compared.update({"the version of jax": "1"})
    with pytest.raises(
        TransientError,  # a launcher installs again
        match="this project's source is 'mine' there and 'other' in process 0; all processes "
        "need the same code",
    ):
        versions.require_same_code()


def test_resuming_with_other_code_prints_one_line(
    whole_run, small_recipe, tmp_path, monkeypatch, capfd
):
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    recorded = json.loads((run / "versions.json").read_text())
    data = json.loads((run / f"checkpoints/{small_run.STEPS}/data/data.json").read_text())
    assert recorded == data["versions"] == versions.versions()
    monkeypatch.setattr(versions, "versions", lambda: {**recorded, "source": "0123456789ab"})
    assert train.main(["--config", str(small_recipe), "--run_dir", str(run)]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert (
        len(lines) == 1
        and f"was written with source {recorded['source']}, now 0123456789ab; the run continues"
        in lines[0]
    )
