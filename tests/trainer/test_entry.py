"""What every command does around its work: where compiled programs are kept."""
import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from trainer import entry

entry.keep_compiled(sys.argv[1] if sys.argv[1:] else None)
import jax

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
"""


@pytest.mark.parametrize("named", [True, False], ids=["by the recipe", "by the environment"])
def test_compiled_programs_are_kept_where_it_is_said(tmp_path, repository, named):
    subprocess.run([sys.executable, "-c", PROGRAM, *([str(tmp_path / "shared")] if named else [])], cwd=repository, check=True,
                   env={**os.environ, "LONGSTRIPE_CACHE": str(tmp_path / "own")})
    kept = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {"shared" if named else "own"}
