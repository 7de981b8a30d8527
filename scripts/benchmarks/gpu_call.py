"""Measures what fits into a few minutes on one GPU: rows by importance, each in its own process.

    python -m scripts.benchmarks.gpu_call                    # five minutes
    python -m scripts.benchmarks.gpu_call --call qlora       # another five
    python -m scripts.benchmarks.gpu_call --call mixtures    # another three
    python -m scripts.benchmarks.gpu_call --call backward    # another four
    python -m scripts.benchmarks.gpu_call --tiny             # the same rows at tiny sizes, on a CPU

The call `steps`: steps of Llama 3.2 1B's shape compared with transformers + Liger, a step of eight
layers of 8B with its profile, and kernels compared with cuDNN and torch. The call `qlora`: Llama
3.1 8B's shape with QLoRA compared with transformers + peft + bitsandbytes. The call `mixtures`:
three layers of Qwen3-30B-A3B compared with transformers, at 32K with Liger. The call `backward`:
attention's backward pass in one kernel (`attention.backward: any_order`) compared with the default,
exactness first. A row that does not fit into the remaining time is skipped, which is printed.
OUTPUT/rows.jsonl gets a line after each row; each row's folder has its command's output. --wheels
prints the command that downloads the peers' packages for a machine without network, which installs
them with pip install --no-index --find-links WHEELS.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from data.outputs import output_files
from scripts.benchmarks.commands import run_for
from trainer.options import AtLeastOne, command, option

ONE_B = "bench_step --model llama-3.2-1b --dtype bfloat16 --turns 1 --loss-chunk 4096 --torch-liger"
EIGHT_B = "--model llama-3.1-8b --layers 8 --dtype bfloat16 --loss-chunk 4096"
KERNELS = "bench_kernels --dtype bfloat16 --heads 32 --kv-heads 8 --rounds 1 --repeats 5"
KERNEL_PEERS = "--blocks diagonal packed --peers ours jax-cudnn torch-sdpa"


class Row(NamedTuple):
    """One measurement.

    Attributes:
      least: seconds it takes, including start and compilation; it is not started with less time.
      words: its command, without --output.
      tiny: options that replace its sizes with --tiny.
    """

    name: str
    least: int
    words: str
    tiny: str


_STEP, _KERNEL = "--model tiny --lengths 128 --dtype float32", "--lengths 64 --heads 2 --kv-heads 2"
STEPS = (
    Row(
        "exactness_one_rank",
        40,
        "kernel_exactness --kernels auto --dtypes bfloat16 --long 32768",
        "--kernels xla --long 1024",
    ),
    Row("8b_32k_profile", 45, f"profile_step {EIGHT_B} --length 32K", "--model tiny --length 128"),
    Row("1b_32k", 60, f"{ONE_B} --lengths 32768", _STEP),
    Row("1b_8k", 60, f"{ONE_B} --lengths 8192", _STEP),
    Row("kernels_128", 50, f"{KERNELS} --head-dim 128 --lengths 32768 {KERNEL_PEERS}", _KERNEL),
    Row(
        "1b_32k_packed",
        90,
        f"{ONE_B} --lengths 32768 --documents 16 --torch-attention flex_attention",
        f"{_STEP} --documents 4 --torch-attention sdpa",
    ),
    Row("kernels_64", 50, f"{KERNELS} --head-dim 64 --lengths 32768 {KERNEL_PEERS}", _KERNEL),
    Row(
        "8b_128k",
        75,
        f"bench_step --side ours --turns 1 --steps 1 {EIGHT_B} --lengths 131072 "
        "--remat save_attention",
        _STEP,
    ),
    Row(
        "exactness",
        60,
        "kernel_exactness --kernels auto --dtypes bfloat16",
        "--kernels xla --head-dims 64",
    ),
    Row(
        "exactness_cudnn",
        60,
        "kernel_exactness --kernels cudnn --dtypes bfloat16 --head-dims 64 128",
        "--kernels xla --head-dims 64",
    ),
)
_QLORA = "--model smollm2-135m --layers 2 --lengths 128 --document-tokens 64 --dtype float32"
# Ten steps of both sides at 32K would not fit in addition to the ten at 8K.
QLORA = (
    Row("qlora_8k", 110, "bench_qlora --torch-liger --lengths 8192", f"{_QLORA} --steps 3"),
    Row(
        "qlora_32k",
        150,
        "bench_qlora --torch-liger --lengths 32768 --steps 4",
        f"{_QLORA} --steps 3",
    ),
)
# Four layers are planned to take 61 GiB of an H100 at 32K; transformers keeps more than we do.
_MIXTURE = (
    "bench_step --model qwen3-30b-a3b --layers 3 --dtype bfloat16 --turns 1 --loss-chunk 4096"
)
_TINY_MIXTURE = "--model granite-3.1-3b-a800m --layers 1 --lengths 128 --dtype float32"
MIXTURES = (
    Row("mixture_32k", 90, f"{_MIXTURE} --torch-liger --lengths 32768", _TINY_MIXTURE),
    Row("mixture_8k", 75, f"{_MIXTURE} --lengths 8192", _TINY_MIXTURE),
)
_BACKWARDS = "--blocks diagonal packed --peers ours ours-any-order jax-cudnn"
BACKWARD = (
    Row(
        "any_order_exactness",
        60,
        "kernel_exactness --kernels any_order --dtypes bfloat16 --head-dims 64 128",
        "--head-dims 64",
    ),
    Row("any_order_128", 45, f"{KERNELS} --head-dim 128 --lengths 32768 {_BACKWARDS}", _KERNEL),
    Row("any_order_64", 45, f"{KERNELS} --head-dim 64 --lengths 32768 {_BACKWARDS}", _KERNEL),
    Row(
        "any_order_8b_32k",
        45,
        f"profile_step {EIGHT_B} --length 32K --backward any_order",
        "--model tiny --length 128",
    ),
    Row(
        "any_order_1b_32k",
        45,
        f"{ONE_B} --side ours --lengths 32768 --backward any_order",
        _STEP,
    ),
)
CALLS = {"steps": STEPS, "qlora": QLORA, "mixtures": MIXTURES, "backward": BACKWARD}
# What the peers need besides torch, transformers and peft.
WHEELS = {
    "steps": "liger-kernel",
    "qlora": "liger-kernel bitsandbytes==0.50.2",
    "mixtures": "liger-kernel",
    "backward": "",
}


def module(words: str) -> list[str]:
    """Returns Python's arguments of a row's command."""
    name, *options = words.split()
    package = "scripts" if name == "profile_step" else "scripts.benchmarks"
    return ["-m", f"{package}.{name}", *options]


def measure(row: Row, args: Options, seconds: float) -> dict:
    """Runs a row for at most `seconds`; returns its outcome."""
    words = module(row.words)
    if args.tiny:  # Liger needs a GPU
        words = [*(word for word in words if word != "--torch-liger"), *row.tiny.split()]
    folder, begin = (args.output / row.name).absolute(), time.monotonic()
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"} if args.tiny else None
    words = [*words, "--output", str(folder)]
    status = run_for(words, seconds, folder / "log.txt", environment)
    took = time.monotonic() - begin
    return {"row": row.name, "status": status, "seconds": took, "command": " ".join(words)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    seconds: AtLeastOne = option("time limit for all rows together", 290)
    call: str = option("the group of rows to measure", "steps", choices=tuple(CALLS))
    only: tuple[str, ...] = option(
        "only these rows", (), choices=tuple(row.name for rows in CALLS.values() for row in rows)
    )
    wheels: bool = option(
        "print the command that downloads the peers' packages, and measure nothing"
    )
    tiny: bool = option("at tiny sizes on a CPU, to check that each row runs")
    output: Path = option("folder for results", Path("runs/gpu_call"))


def work(args: Options) -> int:
    """Measures the rows; returns 1 if any failed or was skipped."""
    if args.wheels and not WHEELS[args.call]:
        print("nothing to download: this call needs only jax and torch")
        return 0
    if args.wheels:
        print(
            "pip download --no-deps --only-binary :all: --python-version 3.12 --platform "
            f"manylinux_2_24_x86_64 --dest WHEELS {WHEELS[args.call]}"
        )
        return 0
    output_files(args.output, {"rows.jsonl": b'"status"'})
    end, complete = time.monotonic() + args.seconds, True
    for row in CALLS[args.call]:
        if args.only and row.name not in args.only:
            continue
        left = end - time.monotonic()
        result = (
            measure(row, args, left)
            if left >= (1 if args.tiny else row.least)
            else {"row": row.name, "status": "skipped for lack of time", "seconds": 0.0}
        )
        complete &= result["status"] == "exit 0"
        print(f"{row.name:16} {result['seconds']:6.1f} s  {result['status']}", flush=True)
        with (args.output / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return 0 if complete else 1


main = command(Options, work, output="output")


if __name__ == "__main__":
    sys.exit(main())
