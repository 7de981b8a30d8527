"""An export that was interrupted, or whose checkpoint is removed meanwhile, leaves nothing; the same
command then writes all of it."""

import errno
import os
import shutil

import pytest

from scripts import export_hf, import_hf
from tests.soak.folders import adapters
from trainer.checkpoint.commit import remove
from trainer.huggingface import peft, write


@pytest.fixture(scope="module")
def checkpoint(hf_model, tmp_path_factory):
    """Returns a checkpoint of the small model."""
    folder = tmp_path_factory.mktemp("imported") / "checkpoint"
    assert import_hf.main([str(hf_model), str(folder)]) == 0
    return folder


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_at_the_card_leaves_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    """The card is the last file: it was once written into a folder that existed already, and the
    next start was refused."""
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)
        assert export_hf.main([str(checkpoint), str(tmp_path / "hf")]) == 75
    assert str(tmp_path) in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    assert export_hf.main([str(checkpoint), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "README.md").exists()


def test_a_complete_folder_that_cannot_be_opened_is_said_to_be_complete(
    checkpoint, tmp_path, monkeypatch, capsys
):
    """With 75 the same command would be started again, which refuses the folder."""

    def failing(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", failing)
    assert export_hf.main([str(checkpoint), str(tmp_path / "hf")]) == 2
    assert f"{tmp_path}/hf: is complete, but was not compared" in capsys.readouterr().err
    assert (tmp_path / "hf" / "README.md").exists()


def test_the_remains_of_a_killed_export_are_removed(checkpoint, tmp_path):
    (tmp_path / ".hf-0123abcd").mkdir()
    (tmp_path / ".hf-0123abcd" / "lock").touch()
    assert export_hf.main([str(checkpoint), str(tmp_path / "hf")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("function", ["_one_layer", "copy_files"])
def test_a_checkpoint_that_training_removes_meanwhile_is_not_exported_in_part(
    checkpoint, tmp_path, monkeypatch, capsys, function
):
    """It was once written with zeros for the weights and without a tokenizer."""
    folder = shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / "11")
    original = getattr(write, function)

    def after_removal(*arguments):
        if folder.exists():
            remove(folder)
        return original(*arguments)

    monkeypatch.setattr(write, function, after_removal)
    assert export_hf.main([str(folder), str(tmp_path / "hf")]) == 75
    assert f"error: {folder}: was removed while it was read" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_adapter_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(peft, "save_file", full)
    (tmp_path / "base").mkdir()
    with pytest.raises(Exception, match="No space left on device"):
        adapters(tmp_path / "base")
    assert not (tmp_path / "base" / "adapter").exists()
