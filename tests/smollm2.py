"""The real model that tests use: SmolLM2-135M-Instruct, made once and kept between runs."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def smollm2_dir() -> Path:
    """The model's Hugging Face folder. Made by the project's own script in $LONGSTRIPE_CACHE/smollm2.

    Raises RuntimeError with the script's message if it cannot be made.
    """
    cache = Path(os.environ.get("LONGSTRIPE_CACHE") or Path.home() / ".cache" / "longstripe")
    folder = cache / "smollm2"
    # In a process of its own: what it imports and holds (1 GB while converting) does not stay with the tests.
    done = subprocess.run([sys.executable, "-m", "scripts.make_smollm2", str(folder)], cwd=REPOSITORY, text=True,
                          capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return folder
