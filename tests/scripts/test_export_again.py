"""An export that was interrupted leaves nothing, and the same command then writes all of it."""

import errno
import os

import pytest

from scripts import export_hf, import_hf
from tests.soak.folders import adapters
from trainer.huggingface import peft


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


def test_the_remains_of_a_killed_export_are_removed(checkpoint, tmp_path):
    (tmp_path / ".hf-0123abcd").mkdir()
    (tmp_path / ".hf-0123abcd" / "lock").touch()
    assert export_hf.main([str(checkpoint), str(tmp_path / "hf")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_adapter_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(peft, "save_file", full)
    (tmp_path / "base").mkdir()
    with pytest.raises(Exception, match="No space left on device"):
        adapters(tmp_path / "base")
    assert not (tmp_path / "base" / "adapter").exists()
