"""Opens models for inference."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from data.errors import UserError
from model.adapter import AdapterConfig, Quantization
from model.language_model import LanguageModel
from model.sharding import STORAGE_AXES

from . import entry
from .adapted_source import AdaptedSource, CheckpointAdapter
from .build import build_language_model
from .config.schema import AttentionConfig, MeshConfig, ModelConfig, RunConfig
from .jax_settings import fix_random_numbers
from .mesh import make_mesh, simulate
from .model_source import open_adapter, open_model
from .source_kinds import ModelSource

ComputeDtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class InferenceModel:
    """A model on its mesh, with the source of its parameters and tokenizer.

    Attributes:
      quantize: how the base of its adapter is quantized; None for a whole model.
    """

    source: ModelSource
    model: LanguageModel
    compute_dtype: ComputeDtype
    quantize: Quantization | None

    def read(self) -> dict[str, jax.Array]:
        """Returns the parameters, on the mesh."""
        return self.source.read(self.model)


def open_for_inference(
    path: str,
    mesh: MeshConfig,
    *,
    schedule: str,
    simulated: int = 0,
    replicate: bool = False,
    compute_dtype: ComputeDtype | None = None,
    adapter: str | None = None,
    quantize: Quantization | None = None,
) -> InferenceModel:
    """Returns a model whose parameters are not read yet.

    Args:
      path: as for `open_model`; with `adapter`, its base.
      mesh: of all devices.
      schedule: of attention.
      simulated: devices that JAX simulates on the CPU; 0 takes those of the machine.
      replicate: keep a copy of all parameters on every device.
      compute_dtype: by default bfloat16, but on a CPU float32, which is several times faster there.
      adapter: an adapter of the model.
      quantize: of the adapter's base; by default as in training.

    Raises:
      UserError, ValueError: as `open_model`, `make_mesh` and `build_language_model`; or `quantize`
        without an adapter.
    """
    if simulated:
        simulate(simulated)
    entry.keep_compiled()
    fix_random_numbers()
    dtype = compute_dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    source = open_adapter(adapter, path) if adapter else open_model(path)
    beside = adapter_of(source, path, quantize)
    config = RunConfig(
        model=ModelConfig(compute_dtype=dtype),
        adapter=beside,
        attention=AttentionConfig(
            schedule=schedule, window=source.mask.window, global_tokens=source.mask.global_tokens
        ),
    )
    is_runs = isinstance(source, AdaptedSource) and isinstance(source.adapter, CheckpointAdapter)
    model = build_language_model(
        config,
        source.config,
        make_mesh(mesh, schedule=schedule),
        () if replicate else STORAGE_AXES,
        allow_any_train=is_runs,  # an earlier version may have trained it
    )
    return InferenceModel(source, model, dtype, beside.quantize if beside.rank else None)


def adapter_of(source: ModelSource, path: str, quantize: Quantization | None) -> AdapterConfig:
    """Returns the model's adapter with its base's quantization; rank 0 for a whole model.

    Raises:
      UserError: `quantize`, without an adapter.
    """
    if isinstance(source, AdaptedSource):
        return dataclasses.replace(
            source.adapter.config, quantize=quantize or source.adapter.config.quantize
        )
    if quantize:
        raise UserError(
            f"--quantize: found {quantize}; {path} is a whole model, and only an adapter's base "
            "can be quantized; --adapter names one"
        )
    return AdapterConfig()
