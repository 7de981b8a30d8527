"""The chat templates of TRL's wheel for tests, unpacked once and kept between runs; none of them is
copied into this repository."""

import os
import tempfile
import zipfile
from pathlib import Path

from scripts.wheel_models import download_wheel

WHEEL = "trl==1.16.0"


def trl_templates() -> dict[str, str]:
    """Returns the templates by name, such as qwen3, from the folder $LONGSTRIPE_CACHE/trl-1.16.0.

    Raises:
        UserError: pip could not download the wheel.
    """
    cache = Path(os.environ.get("LONGSTRIPE_CACHE") or Path.home() / ".cache" / "longstripe")
    folder = cache / WHEEL.replace("==", "-")
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            with zipfile.ZipFile(download_wheel(WHEEL, Path(scratch))) as archive:
                names = [
                    name
                    for name in archive.namelist()
                    if name.startswith("trl/chat_templates/") and name.endswith(".jinja")
                ]
                archive.extractall(scratch, names)
            try:
                (Path(scratch) / "trl/chat_templates").rename(folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
