"""The measurements of `make bench`: their commands, and the functions that turn their files into
rows.

To add a measurement, create its result file (see `results`), write a function that returns its
rows, add a `Measurement` to MEASUREMENTS, and list the result in scripts/benchmarks/pages.toml.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks import gpu_summary, summaries
from scripts.benchmarks.summaries import Rows
from scripts.benchmarks.table3.cells import read_cells
from scripts.benchmarks.table3.summary import summarize

# Identity conversations: data/dummy_conversation.json of FastChat's repository, not part of ours.
CONVERSATIONS = Path("dummy_conversation.json")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How to measure one result.

    Attributes:
      summarize: maps the folder {out} to the rows.
      commands: commands of scripts.benchmarks, or Python's arguments (`-m MODULE`, `FILE.py`);
        {out} stands for the measurement's folder, {models} for a shared folder, {conversations} for
        CONVERSATIONS.
      needs_conversations: whether it is skipped without that file.
      takes_hours: whether it runs only with --only; also set if it needs an accelerator.
    """

    summarize: Callable[[Path], Rows]
    commands: tuple[str, ...]
    needs_conversations: bool = False
    takes_hours: bool = False

    def command(self, name: str) -> str:
        """Returns the command to record: the only one, or the command that runs all of them."""
        if len(self.commands) != 1:
            return f"python -m scripts.benchmarks --only {name}"
        (command,) = self.commands
        return shlex.join(("python", *words(command))).replace("{out}", f"runs/bench/{name}")


def words(command: str) -> list[str]:
    """Returns Python's arguments for a command of a `Measurement`."""
    first, *options = shlex.split(command)
    is_pythons = first.startswith("-") or first.endswith(".py")
    beginning = [first] if is_pythons else ["-m", f"scripts.benchmarks.{first}"]
    return [*beginning, *options]


def identity_run(name: str, recipe: str, export: str = "") -> tuple[str, ...]:
    """Returns the commands that train on the identity conversations, export and ask.

    On one device, since two cores simulate the recipes' eight in more than twice the time.
    """
    return (
        f"train.py --config {recipe} --model.path {{models}}/smollm2 --data.path {{conversations}} "
        f"--run_dir {{out}}/{name} --train.evaluate_every 60 "
        "--mesh.fsdp 1 --mesh.sequence 1 --mesh.simulate 1",
        f"-m scripts.export_hf {{out}}/{name} {{out}}/{name}_hf {export}",
        f"identity {{out}}/{name}_hf --unseen {{conversations}} --output {{out}}/{name}.json",
    )


def step_on_gpu(name: str, options: str) -> str:
    """Returns the command that times a step of 8 layers of LLaMA-3.1-8B."""
    return (
        "bench_step --side ours --model llama-3.1-8b --layers 8 --dtype bfloat16 --turns 1 "
        f"{options} --output {{out}}/{name}"
    )


def step_beside_torch(name: str, options: str) -> str:
    """Returns the command that times a step of Llama 3.2 1B's shape, ours and theirs."""
    return (
        "bench_step --model llama-3.2-1b --dtype bfloat16 --turns 1 --loss-chunk 4096 "
        f"--torch-liger {options} --output {{out}}/{name}"
    )


MEASUREMENTS = {
    "step": Measurement(summaries.step, ("bench_step --output {out}",)),
    "kernels": Measurement(
        summaries.kernels,
        (
            "bench_kernels --blocks diagonal --peers ours torch-sdpa --lengths 8192 16384 "
            "--output {out}/kernels",
        ),
    ),
    "balance": Measurement(
        summaries.balance, ("bench_schedules balance --output {out}/balance.json",)
    ),
    "overlap": Measurement(
        summaries.overlap,
        (
            "bench_schedules overlap --schedules ring 'ring bidirectional' 'attention2d overlap' "
            "balanced 'balanced split' --tokens 512 --output {out}/overlap.json",
        ),
    ),
    "balance_time": Measurement(
        summaries.balance_time,
        (
            "bench_schedules time --tiles 32 --lengths 16384 --output {out}/time_32.json",
            "bench_schedules time --output {out}/time.json",
        ),
    ),
    "bytes": Measurement(
        summaries.bytes_received,
        (
            "bench_schedules bytes --ranks 4 16 64 --schedules ring all_gather balanced ulysses "
            "attention2d --output {out}/bytes.json",
        ),
    ),
    "papers": Measurement(summaries.papers, ("papers --output {out}/papers",)),
    "measured_steps": Measurement(summaries.measured_steps, ("measured_steps --output {out}",)),
    "data": Measurement(
        summaries.dirty_data,
        (
            "-m scripts.make_smollm2 {models}/smollm2",
            "bench_data --tokenizer {models}/smollm2 --output {out}/data",
        ),
    ),
    "preparation": Measurement(
        summaries.preparation,
        (
            "-m scripts.make_smollm2 {models}/smollm2",
            "bench_data --tokenizer {models}/smollm2 --baseline 67afd98 --output {out}",
        ),
    ),
    "quickstart": Measurement(summaries.quickstart, ("-m scripts.quickstart --run_dir {out}/run",)),
    "shared_prompts": Measurement(
        summaries.shared_prompts, ("shared_prompts --output {out}/figures.json",)
    ),
    "identity": Measurement(
        summaries.identity,
        (
            "-m scripts.make_smollm2 {models}/smollm2",
            "identity {models}/smollm2 --unseen {conversations} --output {out}/before.json",
            *identity_run("full", "configs/sharegpt_smollm2.yaml"),
            *identity_run("lora", "configs/adapters/smollm2_lora.yaml", "--merge"),
            *identity_run("qlora", "configs/adapters/smollm2_qlora.yaml", "--merge --dequantize"),
        ),
        needs_conversations=True,
    ),
    "table3": Measurement(lambda _: summarize(read_cells()), ("table3",), takes_hours=True),
    "gpu": Measurement(
        gpu_summary.gpu,
        (
            "kernel_exactness --kernels auto gpu --output {out}/exactness",
            "kernel_exactness --kernels auto gpu --dtypes bfloat16 --long 1048576 "
            "--output {out}/long",
            "kernel_parts --output {out}/parts",
            "bench_kernels --dtype bfloat16 --head-dim 128 --lengths 32768 131072 --blocks "
            "diagonal full packed --peers ours jax-cudnn torch-sdpa --rounds 1 "
            "--output {out}/kernels",
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
        takes_hours=True,
    ),
    "gpu_steps": Measurement(
        gpu_summary.gpu_steps,
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
        takes_hours=True,
    ),
    # Each row has a separate command.
    "exactness": Measurement(summaries.exactness, (), takes_hours=True),
}
