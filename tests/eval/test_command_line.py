"""The command line of line retrieval refuses sizes below 1."""

import pytest

from eval import line_retrieval


@pytest.mark.parametrize("flag", ["max-new-tokens", "fsdp", "tensor", "sequence"])
@pytest.mark.parametrize("wrong", ["0", "-1", "1.5"])
def test_sizes_are_at_least_one(flag, wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        line_retrieval.parse(["--checkpoint", "x", "--output", "y", "--lines", "2", f"--{flag}", wrong])
    assert f"argument --{flag}: found {wrong}; a whole number, at least 1, is needed" in capsys.readouterr().err
