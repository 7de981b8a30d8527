"""The processes' secret comes from the environment or the run's folder, or is made by process 0."""

import os
import stat

import pytest

from data.errors import UserError
from trainer.run import shared_token
from trainer.run.shared_token import offered_token, token_of


@pytest.fixture(autouse=True)
def _without_one(monkeypatch):
    monkeypatch.delenv("LONGSTRIPE_TOKEN", raising=False)


def test_the_token_comes_from_the_environment_or_the_runs_folder(tmp_path, monkeypatch):
    assert token_of(None) == token_of(tmp_path) == token_of(tmp_path / "absent") == ""
    (tmp_path / "token").write_text("of the file\n")
    assert token_of(tmp_path) == token_of(tmp_path / "stages" / "1") == "of the file"
    with offered_token(tmp_path) as token:
        assert token == "of the file"
    assert (tmp_path / "token").exists()
    monkeypatch.setenv("LONGSTRIPE_TOKEN", "of the environment")
    assert token_of(tmp_path) == token_of(None) == "of the environment"
    with offered_token(tmp_path / "new") as token:
        assert token == "of the environment" and not (tmp_path / "new").exists()
    monkeypatch.delenv("LONGSTRIPE_TOKEN")
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UserError, match="token: is empty; remove it, or write"):
        token_of(tmp_path)
    (tmp_path / "token").unlink()
    (tmp_path / "token").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="outside of its folder"), offered_token(tmp_path):
        pass


@pytest.mark.parametrize("run", ["runs/new", "empty", "begun"])
def test_process_0_offers_a_new_token_while_the_processes_meet(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.yaml").write_text("")
    before = sorted(tmp_path.rglob("*"))
    with offered_token(tmp_path / run / "stages" / "1") as token:
        file = tmp_path / run / "token"
        assert len(token) == 64 and token == token_of(tmp_path / run)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_empty_token(tmp_path, monkeypatch):
    """It would be refused at each later start, with more room too."""
    full = os.open("/dev/full", os.O_WRONLY)

    def on_a_full_disk(path, flags):
        os.close(os.open(path, flags, 0o600))
        return os.dup(full)

    monkeypatch.setattr(shared_token, "_for_this_user", on_a_full_disk)
    with offered_token(tmp_path) as token:
        assert token == ""
    assert not list(tmp_path.iterdir())
    os.close(full)


def test_no_token_is_put_among_other_files(tmp_path):
    (tmp_path / "mine").write_text("")
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path, tmp_path / "file"):
        with offered_token(folder) as token:
            assert token == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
