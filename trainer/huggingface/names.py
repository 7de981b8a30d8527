"""Tensor names that differ from those of a text model with its head, `...ForCausalLM`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The parts of a text model without its head.
_BASE_PARTS = ("embed_tokens", "layers", "norm")
# Prefixes of tensor names of the text model inside a vision-language model -> ours; they depend on
# the version of transformers that wrote the file.
_TEXT = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# Prefixes of the names of such a model's other parts, also after `model.`.
_OTHERS = ("vision_tower.", "multi_modal_projector.", "visual.")
# Parts that wrappers and older programs put into names: torch.compile, DataParallel, FSDP, PEFT.
_INSERTED = (
    "_orig_mod",
    "module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "language_model",
    "default",
)


class Renamed:
    """Stands in for the opened file of one tensor, under another name."""

    def __init__(self, file: Any, stored: str) -> None:
        self._file, self._stored = file, stored

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._stored)

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(self._stored)


def of_text_model(files: Mapping[str, Any], is_wrapped: bool) -> dict[str, Any]:
    """Returns the opened file of each tensor of the text model, by its name in `...ForCausalLM`.

    Args:
      files: by the names in the files.
      is_wrapped: whether they are of a vision-language model, whose other parts are left out.

    Raises:
      ValueError: two tensors have the same name in the text model.
    """
    text_names = {name: name for name in files}
    if is_wrapped:
        left_out = {*other_parts(files)}
        text_names = {name: _of_wrapped(name) for name in files if name not in left_out}
    elif not any(name.startswith("model.") for name in files):  # as transformers reads it
        text_names = {
            name: f"model.{name}" if name.partition(".")[0] in _BASE_PARTS else name
            for name in files
        }
    tensors: dict[str, Any] = {}
    for stored, name in text_names.items():
        if name in tensors:
            raise ValueError(
                f"tensor {stored} is there twice: another name also means {name}; the model saved "
                "again by transformers would work"
            )
        tensors[name] = files[stored] if stored == name else Renamed(files[stored], stored)
    return tensors


def other_parts(names: Iterable[str]) -> list[str]:
    """Returns the names of the tensors of a vision-language model that its text model lacks."""
    return [name for name in names if name.removeprefix("model.").startswith(_OTHERS)]


def _of_wrapped(name: str) -> str:
    """Returns the name that a vision-language model's tensor has in the text model."""
    for start, ours in _TEXT.items():
        if name.startswith(start):
            return ours + name.removeprefix(start)
    return name


def misnamed(name: str, found: Iterable[str]) -> str | None:
    """Returns one of the names that differs from `name` only by what a wrapper inserts; None if
    none does."""
    wanted = _without_inserted(name)
    return next((other for other in found if _without_inserted(other) == wanted), None)


def _without_inserted(name: str) -> list[str]:
    """The parts of a name without those of wrappers, and without the names of whole models."""
    parts = [part for part in name.split(".") if part not in _INSERTED]
    while parts and parts[0] in ("base_model", "model"):
        parts = parts[1:]
    return parts
