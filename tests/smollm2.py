"""SmolLM2-135M-Instruct for tests, made once and kept between runs."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def smollm2_dir() -> Path:
    """Returns the model's Hugging Face folder $LONGSTRIPE_CACHE/smollm2, made by
    scripts.make_smollm2.

    Raises:
        RuntimeError: it cannot be made; with the script's message.
    """
    cache = Path(os.environ.get("LONGSTRIPE_CACHE") or Path.home() / ".cache" / "longstripe")
    folder = cache / "smollm2"
    # In a separate process, whose memory (1 GB while converting) is freed for the tests.
    finished = subprocess.run(
        [sys.executable, "-m", "scripts.make_smollm2", str(folder)],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(finished.stderr.strip())
    return folder
