"""Compares a QLoRA training step with transformers + peft + bitsandbytes: speed, memory, losses.

    python -m scripts.benchmarks.bench_qlora --lengths 8192 32768 --torch-liger  # on a GPU
    python -m scripts.benchmarks.bench_qlora --model tiny --lengths 256 --dtype float32  # on a CPU

Both sides start from the same random weights, stored once as a model with one layer, which is
copied to every layer of the measured model. The base is in NF4 with double quantization; adapters
of all projections, their moments and AdamW are in float32. A row holds documents of about
--document-tokens, and every step trains on the same row. Layers are recomputed on both sides, as in
peft's prepare_model_for_kbit_training. The sides run in separate processes; each adds its row to
OUTPUT/qlora.jsonl when it ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from data.errors import UserError
from data.outputs import output_files
from model.adapter import PROJECTIONS, AdapterConfig
from model.config import TransformerConfig
from scripts.benchmarks.bench_step import (
    device_facts,
    document_lengths,
    make_batch,
    preset,
    random_row,
)
from scripts.benchmarks.commands import ProcessFailed, in_own_process
from scripts.benchmarks.torch_step import torch_facts
from trainer.config.schema import OptimizerConfig
from trainer.options import AtLeastOne, Tokens, TokensOr0, command, option

OPTIMIZER = OptimizerConfig(learning_rate=1e-4, schedule="constant")
SIDES = ("theirs", "ours")
_LAYER = "model.layers.0."


def adapter(args: Options) -> AdapterConfig:
    """Returns the adapters of both sides, as in the shipped recipes."""
    return AdapterConfig(rank=args.rank, alpha=2.0 * args.rank, quantize="nf4")


def one_layer(config: TransformerConfig) -> TransformerConfig:
    """Returns the configuration with one layer."""
    return dataclasses.replace(config, num_hidden_layers=1)


def write_weights(config: TransformerConfig, adapters: AdapterConfig, folder: Path) -> None:
    """Writes random weights of a one-layer model (bfloat16) and of its adapters (float32) in
    Hugging Face's and PEFT's formats."""
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    from trainer.huggingface.adapter_config import write_config
    from trainer.huggingface.peft import WEIGHTS, adapter_layout
    from trainer.huggingface.table import hf_layout

    rng = np.random.default_rng(0)

    def uniform(shape: tuple[int, ...], bound: float) -> np.ndarray:
        return (2 * bound * (rng.random(shape, np.float32) - np.float32(0.5))).astype(np.float32)

    one = one_layer(config)
    bound = config.initializer_range * 3**0.5  # of a uniform distribution with that deviation
    weights = {}
    for entry in hf_layout(one):
        shape = entry.hf_shape
        norm = len(shape) == 1
        drawn = np.ones(shape, np.float32) if norm else uniform(shape, bound)
        weights[entry.hf_name.format(i=0)] = drawn.astype(bfloat16)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(one.to_hf()), encoding="utf-8")
    adapted = dataclasses.replace(one, adapter=adapters)
    parts = {
        entry.hf_name.format(i=0): np.zeros(entry.hf_shape, np.float32)
        if "lora_B" in entry.hf_name
        else uniform(entry.hf_shape, entry.hf_shape[1] ** -0.5)
        for entry in adapter_layout(adapted)
    }
    (folder / "adapter").mkdir()
    save_file(parts, folder / "adapter" / WEIGHTS)
    write_config(adapted, None, folder / "adapter")


def ours(length: int, weights: Path, args: Options) -> dict:
    """Returns the seconds and losses of our steps, and device facts."""
    import jax
    import jax.numpy as jnp

    from model.attention import get_kernel
    from model.language_model import LanguageModel
    from model.memory.options import MemoryConfig
    from planning.compiled import memory as planned_memory
    from trainer.config.schema import MeshConfig
    from trainer.mesh import make_mesh
    from trainer.step import StepBuilder
    from trainer.text import text_batch

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    config = dataclasses.replace(preset(args.model, args.layers), adapter=adapter(args))
    memory = MemoryConfig(args.remat, loss_chunk=args.loss_chunk)
    options: dict[str, Any] = {"dtype": jnp.dtype(args.dtype), "memory": memory}
    model = LanguageModel(config, mesh, kernel=get_kernel(args.kernel), **options)
    params = _params(model, weights)
    batch_shape = text_batch(1, length, mesh)
    builder = StepBuilder(
        model, model.loss, batch_shape, optimizer_config=OPTIMIZER, memory_config=memory
    )
    start = time.perf_counter()
    step = builder.lower_train().compile()
    compile_seconds = time.perf_counter() - start
    batch = make_batch(builder, length, _documents(length, args))
    # transformers has no target for the last token.
    batch["loss_weights"] = batch["loss_weights"].at[:, -1].set(0)
    trained = {name: params.pop(name) for name in builder.trainable}
    moments = builder.init_optimizer(trained)
    seconds, losses = [], []
    for number in range(args.steps):
        start = time.perf_counter()
        trained, moments, metrics = step(trained, params, moments, batch, number)
        losses.append(float(metrics.loss))
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds,
        "losses": losses,
        "planned_gib": planned_memory(step)["peak"],
        "compile_seconds": compile_seconds,
        "remat": args.remat,
        **device_facts(),
    }


def _params(model, folder: Path) -> dict[str, Any]:
    """Returns the parameters of our model, whose layers all copy the layer in the folder."""
    import contextlib

    import jax
    import jax.numpy as jnp

    from model.parameter_declarations import LAYERS
    from trainer.huggingface.peft import read_adapter
    from trainer.huggingface.read import read_hf, stored_hf

    one = dataclasses.replace(model, config=one_layer(model.config))
    plain = dataclasses.replace(one.config, adapter=None)
    shardings = {
        name: one.shardings[name]
        for name in one.parameters
        if name not in one.quantized_names and not _is_part(name)
    }
    dtypes = {name: one.parameters[name].dtype for name in shardings}
    params = read_hf(folder, plain, shardings, dtypes, one.in_memory)
    with contextlib.ExitStack() as stack:
        params |= one.quantized(stored_hf(folder, plain, stack))
    params |= read_adapter(folder / "adapter", one)
    layers = model.config.num_hidden_layers
    copied = jax.jit(lambda x: jnp.repeat(x, layers, 0))
    return {name: copied(x) if name.startswith(LAYERS) else x for name, x in params.items()}


def _is_part(name: str) -> bool:
    """Whether a parameter is part of a quantized weight or an adapter."""
    from model.adapter import ADAPTER_PARTS
    from model.quantized_weights import weight_of

    return weight_of(name) != name or name.rpartition(".")[2] in ADAPTER_PARTS


def theirs(length: int, weights: Path, args: Options) -> dict:
    """Returns the seconds and losses of peft's steps, and device facts."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _peft_model(args, weights, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
        fused=device == "cuda",
    )
    tokens = random_row(preset(args.model, args.layers).vocab_size, length)[:, :-1]
    inputs = {"input_ids": torch.from_numpy(tokens).long().to(device)}
    lengths = document_lengths(length, _documents(length, args))
    if len(lengths) > 1:  # transformers recognizes a packed row's documents by their positions
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        inputs["position_ids"] = positions.to(device)
    seconds, losses = [], []
    for number in range(args.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, OPTIMIZER.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))  # waits for the device
        seconds.append(time.perf_counter() - start)
        if device == "cuda" and number == 0:
            torch.cuda.reset_peak_memory_stats()
    return {
        "seconds": seconds,
        "losses": losses,
        "attention": args.torch_attention,
        "liger": args.torch_liger,
        **torch_facts("peft", "bitsandbytes"),
    }


def _peft_model(args: Options, weights: Path, device: str):
    """Returns transformers' model in bitsandbytes' NF4 with peft's adapters, whose layers all copy
    the layer in the folder."""
    import torch
    import transformers
    from peft import (
        LoraConfig,
        get_peft_model,
        prepare_model_for_kbit_training,
        set_peft_model_state_dict,
    )
    from safetensors.torch import load_file

    if args.torch_liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config, dtype = preset(args.model, args.layers), getattr(torch, args.dtype)

    def copied_to_all_layers(tensors):
        return {
            name.replace("layers.0.", f"layers.{i}."): tensor
            for name, tensor in tensors.items()
            for i in range(config.num_hidden_layers if _LAYER in name else 1)
        }

    stored = load_file(weights / "model.safetensors")
    base = transformers.LlamaForCausalLM.from_pretrained(
        None,
        config=transformers.LlamaConfig(**config.to_hf()),
        state_dict=copied_to_all_layers(stored),
        dtype=dtype,
        attn_implementation=args.torch_attention,
        device_map={"": device},
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
    )
    base = prepare_model_for_kbit_training(
        base, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    adapters = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=list(PROJECTIONS))
    model = get_peft_model(base, adapters)
    parts = load_file(weights / "adapter" / "adapter_model.safetensors")
    unread: Any = set_peft_model_state_dict(model, copied_to_all_layers(parts))
    assert not unread.unexpected_keys, unread
    return model.train()


def _documents(length: int, args: Options) -> int:
    """Returns the row's number of documents."""
    return max(1, length // args.document_tokens) if args.document_tokens else 1


def measure(side: str, length: int, weights: Path, args: Options) -> dict:
    """Runs one side in a separate process; returns its row."""
    flags = ["--weights", str(weights)]
    for name, value in dataclasses.asdict(args).items():
        if name not in ("lengths", "side", "one", "weights", "output") and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    head = {"side": side, "model": args.model, "layers": args.layers, "length": length}
    try:
        result = in_own_process("bench_qlora", "--one", side, "--lengths", str(length), *flags)
    except ProcessFailed as failed:
        return {**head, "failed": failed.reason}
    # The first steps compile and warm up.
    seconds = min(result.pop("seconds")[2:] or [float("nan")])
    return {
        **head,
        "documents": _documents(length, args),
        "tokens_per_second": length / seconds,
        "step_seconds": seconds,
        **result,
    }


def report(args: Options) -> int:
    """Measures, prints and writes each row; returns 1 if one failed."""
    output_files(args.output, {"qlora.jsonl": b'"side"'})
    rows: dict[tuple[str, int], dict] = {}
    with TemporaryDirectory(dir=args.output) as scratch:
        weights = Path(scratch) / "weights"
        write_weights(preset(args.model, args.layers), adapter(args), weights)
        for length in args.lengths:
            for side in args.side:
                row = rows[side, length] = measure(side, length, weights, args)
                with (args.output / "qlora.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(_line(row), flush=True)
            if set(args.side) == set(SIDES):
                print(_comparison(rows["ours", length], rows["theirs", length]), flush=True)
    return 1 if any("failed" in row for row in rows.values()) else 0


def _line(row: dict) -> str:
    """Returns a row as text."""
    head = f"{row['side']:7} {row['length']:7}"
    if "failed" in row:
        return f"{head}  {row['failed']}"
    memory = f"{row['device_gib']:.2f} GiB" if row["device_gib"] else "memory unknown"
    losses = " ".join(f"{loss:.4f}" for loss in row["losses"])
    return f"{head} {row['tokens_per_second']:9.1f} tokens/s  {memory}  losses {losses}"


def _comparison(ours: dict, theirs: dict) -> str:
    """Returns the ratio of two rows' speeds and the largest difference between their losses."""
    if "failed" in ours or "failed" in theirs:
        return f"{ours['length']} tokens: nothing to compare"
    difference = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
    return f"{ours['length']} tokens: {ratio:.3f}x peft; losses differ by at most {difference:.1e}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    model: str = option("a preset", "llama-3.1-8b")
    layers: int = option("number of layers; 0 for all", 0)
    lengths: tuple[Tokens, ...] = option("tokens in the row", (8192, 32768))
    document_tokens: TokensOr0 = option("mean tokens of a document; 0: one document", 2048)
    steps: AtLeastOne = option("steps; the fastest after the second counts", 10)
    rank: AtLeastOne = option("rank of the adapters", 16)
    dtype: str = option("compute precision", "bfloat16", choices=("float32", "bfloat16"))
    remat: str = option("our remat policy", "save_attention")
    kernel: str = option("our attention kernel", "auto")
    loss_chunk: TokensOr0 = option("tokens per chunk of our loss", 4096)
    side: tuple[str, ...] = option("whose step to measure", SIDES, choices=SIDES)
    torch_attention: str = option("their attention: sdpa, flex_attention", "sdpa")
    torch_liger: bool = option("they use Liger's kernels (pip install liger-kernel)")
    output: Path = option("folder for results", Path("runs/bench"))
    one: str | None = option(argparse.SUPPRESS, None, choices=SIDES)
    weights: Path | None = option(argparse.SUPPRESS, None)


def work(args: Options) -> int:
    """Measures one side in this process, or compares both."""
    if not args.one:
        return report(args)
    if args.weights is None:
        raise UserError("--one: needs --weights")
    print(json.dumps((ours if args.one == "ours" else theirs)(args.lengths[0], args.weights, args)))
    return 0


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
