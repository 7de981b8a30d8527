"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors` in a folder.

If a family's files hold k projections as the rows of one tensor, PEFT adapts that tensor with a
single A. Ours has an A of rank r per projection, exported as an adapter of rank k r: its A stacks
ours, and its B is block-diagonal. With any other B, each projection gets a copy of the whole A.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from data.errors import UserError
from data.folders import building, holds_files
from data.outputs import new_folder
from data.paths import expanded
from data.untrusted_files import file_within, read_json
from model.adapter import ATTENTION, MAGNITUDE, AdapterConfig
from model.attention import Mask
from model.config import LayerStack, TransformerConfig
from model.families import FAMILIES
from model.language_model import LanguageModel
from model.parameter_declarations import declare
from trainer.config.fields import check_kinds

from . import adapter_config, peft_experts
from .adapter_config import CONFIG, WEIGHTS, write_config
from .assets import copy_files, mask_of, trained_mask
from .folder import EMBEDDING, HEAD, are_equal
from .names import misnamed
from .peft_experts import FactorEntry
from .peft_modules import PREFIXES, AdaptedModules
from .peft_tensors import PREFIX, factors, filled, misshapen, shape_at, text_tensors
from .read import padded_part
from .table import DTYPES, HFEntry, HoldsNaN, check_numbers, hf_layout
from .write import warn_of_mask

# The configuration of the model that was trained, in an exported adapter: PEFT's format has none.
TRAINED_CONFIG = "trained_config.json"
_ATTENTION = "attention"  # its field for the recipe's window and global tokens, which no config has
_REPLACED = ("original_module", "modules_to_save")  # peft's parts of a module trained in full
# Parameters with a row for each token in the files.
_ROWS = ("embed_tokens.weight", "lm_head.weight")


def adapter_layout(
    config: TransformerConfig,
    shares_a: bool = False,
    per_expert: bool = False,
    published: bool = False,
) -> list[HFEntry]:
    """Returns every trained parameter of a model with adapters, and its PEFT tensors.

    Args:
      shares_a: whether projections in one tensor share an A, as in adapters that PEFT creates.
      per_expert: whether each expert has its own tensors, as with transformers 4.
      published: whether modules trained in full have the names of published files, as with
        transformers 4; otherwise transformers 5's, which differ for some routers.
    """
    assert config.adapter is not None
    entries = [
        dataclasses.replace(entry, hf_name=PREFIX + entry.hf_name)
        for entry in hf_layout(config, stacked=not published)
        if config.adapter.trains(entry.name)
    ]
    shape_of = {name: parameter.shape for name, parameter in declare(config).items()}
    for stack in config.stacks:
        if stack.config.num_experts:
            entries += peft_experts.entries(config, stack, PREFIX, shares_a, per_expert)
        for projection in config.adapter.projections:
            if projection in ATTENTION or not config.num_experts:
                entries += _projection_entries(config, stack, projection, shape_of, shares_a)
    return entries


def _projection_entries(
    config: TransformerConfig,
    stack: LayerStack,
    projection: str,
    shape_of: Mapping[str, tuple[int, ...]],
    shares_a: bool,
) -> list[HFEntry]:
    """Returns the tensors of one projection's adapter in a stack of layers; if the projection is
    fused, the rows and columns of the fused tensors that belong to it."""
    assert config.adapter is not None
    rank = config.adapter.rank
    block = f"{'self_attn' if projection in ATTENTION else 'mlp'}."
    inputs, outputs = config.projection_sizes(projection)
    shapes = {"lora_A": (rank, inputs), "lora_B": (outputs, rank), MAGNITUDE: (outputs,)}
    fused = FAMILIES[config.family].fused_projections
    module = next((module for module, names in fused.items() if projection in names), projection)
    names = fused.get(module, (projection,))
    sizes, number = [config.projection_sizes(name)[1] for name in names], names.index(projection)
    output_rows = {"first_row": sum(sizes[:number]), "file_rows": sum(sizes)}
    first_rank, file_rank = (0, rank) if shares_a else (number * rank, len(names) * rank)
    slices = {
        "lora_A": {"first_row": first_rank, "file_rows": file_rank},
        MAGNITUDE: output_rows,
        "lora_B": {**output_rows, "first_column": first_rank, "file_columns": file_rank},
    }
    entries = []
    for part in config.adapter.parts:
        name = f"{stack.prefix}{block}{projection}.{part}"
        suffix = "" if part == MAGNITUDE else ".weight"
        entries.append(
            HFEntry(
                name,
                f"{PREFIX}model.layers.{{i}}.{block}{module}.{part}{suffix}",
                shape_of[name],
                shapes[part],
                stack.layers,
                transpose=part != MAGNITUDE,
                first_layer=stack.first,
                **slices[part],
            )
        )
    return entries


def write_adapter(
    params: Mapping[str, Any],
    config: TransformerConfig,
    base: str | None,
    out: str | Path,
    finish: Callable[[Path], None] | None = None,
    assets: Path | None = None,
) -> None:
    """Writes an adapter as a folder that peft can load; `out` appears complete or not at all.

    A warning names a window and global tokens, which peft does not read.

    Args:
      params: the trained parameters by name: arrays, or arrays on disk that are read when sliced.
      config: the model, with its adapters.
      base: the path or name of the base model to record; None for none.
      finish: called with the folder before it becomes `out`, to add files.
      assets: the checkpoint's folder with the tokenizer, its template and the configuration, which
        are written too; that of the model, with the mask, as TRAINED_CONFIG.

    Raises:
      UserError: `out` is not empty or cannot be written; or `adapter.train` names modules that the
        format does not hold.
    """
    out = new_folder(out)
    try:
        check_train(config)
    except ValueError as error:  # a run of an earlier version, which allowed it
        raise UserError(f"{error}; --merge writes this run as a whole model") from None
    if assets:
        warn_of_mask(assets, out)
    tensors = _tensors(params, config)
    with building(out, holds_files) as scratch:
        write_config(config, base, scratch)
        save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})
        if assets:
            copy_files(assets, scratch)
            _write_trained_config(assets, scratch)
        if finish:
            finish(scratch)


def check_train(config: TransformerConfig) -> None:
    """Raises ValueError if `adapter.train` names modules that the model lacks or PEFT's format does
    not hold."""
    assert config.adapter is not None
    config.adapter.check_train(declare(config), FAMILIES[config.family].fused_projections.values())


def _tensors(params: Mapping[str, Any], config: TransformerConfig) -> dict[str, np.ndarray]:
    """Returns the file's tensors by name; arguments as in `write_adapter`."""
    tensors: dict[str, np.ndarray] = {}
    for entry in adapter_layout(config):
        value = np.asarray(params[entry.name])[tuple(map(slice, entry.shape))]
        for i, name in enumerate(entry.hf_names()):
            tensor = tensors.setdefault(name, np.zeros(entry.file_shape, value.dtype))
            layer = value if entry.layers is None else value[i]
            check_numbers(name, layer)
            entry.put(tensor, layer)
    head, embedding = (f"{PREFIX}{name}" for name in (HEAD, EMBEDDING))
    if config.tie_word_embeddings and embedding in tensors:
        tensors[head] = tensors[embedding].copy()  # peft saves and loads tied modules twice
    return tensors


def _write_trained_config(assets: Path, folder: Path) -> None:
    """Replaces a folder's config.json, which would make it a whole model, with TRAINED_CONFIG."""
    path, mask = folder / "config.json", trained_mask(assets)
    attention = {"window": mask.window, "global_tokens": mask.global_tokens}
    content = {**read_json(path, folder), _ATTENTION: attention}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (folder / TRAINED_CONFIG).write_text(text, encoding="utf-8")
    path.unlink()


def exported_mask(folder: Path) -> Mask | None:
    """Returns the mask in the TRAINED_CONFIG of an exported adapter; None in an earlier version's.

    Raises:
      UserError, ValueError: it is not a mask; one line that names the file and the field.
    """
    path = folder / TRAINED_CONFIG
    attention = read_json(path, folder).get(_ATTENTION)
    if attention is None:
        return None
    check_kinds({_ATTENTION: attention}, str(path))
    try:
        return mask_of(attention)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; export the adapter again") from None


def open_config(folder: Path, base: TransformerConfig) -> AdapterConfig:
    """Returns the adapter in a folder for a base. Its rank is the highest of its modules', and its
    alpha that module's.

    Raises:
      ValueError: as `adapter_config.read_config`.
    """
    adapter, _ = adapter_config.read_config(folder, base)
    # Only the configuration may be here; and whoever reads the weights says what is wrong.
    with contextlib.suppress(ValueError), _opened(folder) as (files, prefix):
        config, modules = base.with_adapter(adapter), _modules(folder)
        options = _options(files, config, modules, prefix)
        if options["shares_a"]:
            found = factors(adapter_layout(config, **options), prefix)
            highest = max((x for _, name, x in found if name in files), key=modules.rank)
            rank, alpha = modules.rank(highest), modules.alpha(highest)
            return dataclasses.replace(adapter, rank=rank, alpha=alpha)
    return adapter


def check_trainable(folder: Path, config: TransformerConfig) -> None:
    """Raises ValueError for an adapter that would be trained otherwise than by peft: there B is
    kept, or modules have different scales.

    Args:
      config: the model, with its adapters.
    """
    adapter_config.check_trainable(folder)
    assert config.adapter is not None
    modules, layout = _modules(folder), adapter_layout(config)
    names = {name: None for prefix in PREFIXES for _, _, name in factors(layout, prefix)}
    for module in filter(modules.has, names):
        scale = modules.scale(module)
        if not math.isclose(scale, config.adapter.scale):
            raise ValueError(
                f"{folder / CONFIG}: rank_pattern and alpha_pattern give {module} the scale "
                f"{scale:g}, others {config.adapter.scale:g}, so the adapter can't be continued; a "
                "new adapter on what peft's merge_and_unload makes of it would work"
            )


def read_adapter(folder: str | Path, model: LanguageModel) -> dict[str, jax.Array]:
    """Reads an adapter's parameters in float32 onto the mesh of `model`; each device reads its
    shard.

    Raises:
      ValueError: as `opened_adapter`; or a tensor holds NaN.
    """
    with opened_adapter(folder, model.config) as (files, options):
        params: dict[str, jax.Array] = {}
        layouts = (adapter_layout(config, **options) for config in (model.config, model.in_memory))
        for entry, in_memory in zip(*layouts, strict=True):
            read = functools.partial(padded_part, files, entry, in_memory.shape, np.float32)
            params[entry.name] = jax.make_array_from_callback(
                in_memory.shape, model.shardings[entry.name], read
            )
            params[entry.name].block_until_ready()
        return params


@contextlib.contextmanager
def opened_adapter(
    folder: str | Path, config: TransformerConfig
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, bool]]]:
    """Opens an adapter's file and checks its tensors; yields the file of each tensor, and the
    options of `adapter_layout`.

    Args:
      config: the model, with its adapters, as `open_config` describes them.

    Raises:
      ValueError: there is no such file; or names a tensor that is missing, unknown, or of the wrong
        shape for this base and rank.
    """
    path = expanded(folder) / WEIGHTS
    with _opened(path.parent) as (files, prefix):
        assert config.adapter is not None
        modules = _modules(path.parent)
        options = _options(files, config, modules, prefix)
        layout = adapter_layout(config, **options)
        try:
            tensors = filled(files, layout, config.adapter, modules, prefix)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        _check_tensors(path, tensors, layout, config)
        yield tensors, options


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Opens an adapter's file; yields as `text_tensors`."""
    path = folder / WEIGHTS
    file_within(folder, WEIGHTS)
    try:
        with safe_open(path, framework="np") as file:
            try:
                opened = text_tensors(dict.fromkeys(file.keys(), file), folder)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            yield opened
    except HoldsNaN as error:
        raise ValueError(f"{path}: {error}") from None
    except FileNotFoundError:
        if (pickled := path.with_suffix(".bin")).is_file():
            raise ValueError(
                f"{path.parent}: only pickled weights here ({pickled.name}); they can run code "
                "when loaded and are refused; peft's save_pretrained writes safetensors"
            ) from None
        raise ValueError(f"{path}: no such file; peft writes it next to {CONFIG}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: not a complete safetensors file ({error}); write it again"
        ) from None


def _modules(folder: Path) -> AdaptedModules:
    """Returns which modules have an adapter."""
    return AdaptedModules(read_json(folder / CONFIG, folder))


def _options(
    files: Mapping[str, Any], config: TransformerConfig, modules: AdaptedModules, prefix: str
) -> dict[str, bool]:
    """Returns the options of `adapter_layout` for the tensors of a file."""
    options = {
        "per_expert": peft_experts.is_per_expert(files),
        "published": _has_published_names(files, config),
    }
    apart = adapter_layout(config, **options)
    return {**options, "shares_a": not _has_blocks(files, apart, modules, prefix)}


def _has_blocks(
    files: Mapping[str, Any], layout: list[HFEntry], modules: AdaptedModules, prefix: str
) -> bool:
    """Whether an adapter's tensors have the layout in which the projections of one tensor have an A
    each and their B are diagonal blocks, and one rank otherwise."""
    for entry, name, module in factors(layout, prefix):
        if name not in files:
            continue
        tensor = files[name].get_slice(name)
        shapes = {tuple(tensor.get_shape()), shape_at(entry, modules.rank(module))}
        if shapes != {entry.file_shape} or np.any(_off_diagonal(tensor, entry)):
            return False
    return True


def _has_published_names(files: Mapping[str, Any], config: TransformerConfig) -> bool:
    """Returns whether modules trained in full have the names of published files."""
    stacked, published = (
        {entry.hf_names()[0] for entry in adapter_layout(config, published=published)}
        for published in (False, True)
    )
    return any(name in files for name in published - stacked)


def _check_tensors(
    path: Path, files: Mapping[str, Any], layout: list[HFEntry], config: TransformerConfig
) -> None:
    expected = [(name, entry) for entry in layout for name in entry.file_tensors()]
    for name, entry in expected:
        if name not in files:
            raise ValueError(f"{path}: tensor {name} is missing{_there_instead(name, files)}")
        tensor = files[name].get_slice(name)
        shape = tuple(tensor.get_shape())
        if shape != entry.file_shape:
            if entry.name in _ROWS and shape[1:] == entry.file_shape[1:]:
                raise ValueError(f"{path}: tensor {name} {_resized(shape[0], entry.file_shape[0])}")
            raise ValueError(f"{path}: {misshapen(name, shape, entry.file_shape)}")
        if tensor.get_dtype() not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name} is {tensor.get_dtype()}; supported are {', '.join(DTYPES)}"
            )
    names = {name for name, _ in expected}
    head, embedding = (f"{PREFIX}{name}" for name in (HEAD, EMBEDDING))
    # peft saves tied modules twice.
    if config.tie_word_embeddings and embedding in names and head in files:
        if not are_equal(*(files[name].get_slice(name) for name in (head, embedding))):
            raise ValueError(
                f"{path}: tensor {head} differs from {embedding}, but the base ties its head to "
                "its embedding; adapters that untie them are not supported"
            )
        names.add(head)
    # If the base's embeddings were resized, peft also saves, and does not load, what it replaces.
    names |= {name.replace(".weight", f".{part}.weight") for name in names for part in _REPLACED}
    for name in sorted(set(files) - names):
        raise ValueError(f"{path}: tensor {name} belongs to no projection of the base")


def _there_instead(name: str, files: Mapping[str, Any]) -> str:
    """The end of a message about a missing tensor."""
    if other := misnamed(name, files):
        return f", and {other} is there; names as peft's save_pretrained writes them would work"
    unlike = sorted(files)[0] if files else "nothing"
    return f"; the base and the adapter do not match: the file has {unlike}"


def _resized(found: int, rows: int) -> str:
    """The end of a message about a tensor with a row for each token."""
    return (
        f"has {found:,} rows, the base {rows:,}: the adapter is of a base with resized embeddings; "
        f"transformers' resize_token_embeddings({found}) and save_pretrained make that base"
    )


def _off_diagonal(tensor: Any, entry: HFEntry) -> np.ndarray:
    """The numbers of a parameter's rows outside its columns."""
    if isinstance(entry, FactorEntry):
        return entry.others(tensor[:])
    if entry.file_shape[1:] == entry.hf_shape[1:]:
        return np.zeros(0)
    columns = np.arange(entry.columns[0].start, entry.columns[0].stop)
    return np.delete(tensor[entry.rows, :], columns, 1)
