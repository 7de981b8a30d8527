"""What a text objective says about its data: the report once, and a warning where nothing is held out."""
import json

import pytest

from trainer.config.load import load
from trainer.mesh import make_mesh
from trainer.text import TextObjective


@pytest.fixture
def opened(small_recipe, tmp_path):
    """Returns a function that opens the small recipe's objective with some flags more."""
    def opened(*flags):
        config = load(["--config", str(small_recipe), "--run_dir", str(tmp_path / "run"), *flags])
        return TextObjective(config, make_mesh(config.mesh))

    return opened


def test_the_report_is_printed_at_the_first_start_alone(opened, tmp_path, capsys):
    opened()
    assert "records, " in capsys.readouterr().out
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("config_version: 2\n", encoding="utf-8")
    opened()
    captured = capsys.readouterr()
    assert "records, " not in captured.out and "warning" not in captured.err


def test_a_held_out_set_is_never_silently_empty(opened, small_recipe, tmp_path, capsys):
    source = json.dumps([{"path": str(small_recipe.parent / "conversations.json")}])
    flags = ("--data.sources", source, "--data.held_out_path", "null")
    assert not opened(*flags, "--data.held_out_fraction", "1.0e-9").has_held_out
    assert "warning: there is no held-out loss: data.held_out_fraction 1e-09 of " in capsys.readouterr().err
    assert not opened(*flags, "--data.held_out_fraction", "0").has_held_out, "as asked for"
    assert "warning" not in capsys.readouterr().err
    assert opened().has_held_out
    assert "warning" not in capsys.readouterr().err
