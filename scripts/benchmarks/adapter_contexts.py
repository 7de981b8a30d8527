"""Finds the longest row that fits for QLoRA of LLaMA-3.1-8B on one GPU, by the CUDA compiler.

    python -m scripts.benchmarks.adapter_contexts               # resumes where it stopped
    python -m scripts.benchmarks.adapter_contexts --only gb_24  # rows with these words

Every row is the training step of configs/adapters/llama31_8b_qlora_24gb.yaml with rank 32, compiled
for a described GPU; nothing is run. Two compilations for an H100 fit a line of memory over tokens
for each memory policy; the policy whose line allows the most tokens is then compiled for the actual
GPU until a multiple of 8,192 tokens fits and the next one does not. --output records each
compilation before the next one begins. Writes docs/results/adapter_contexts.json.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

from data.outputs import output_files
from model.config import TransformerConfig
from planning.machines import memory_gib
from planning.plan import Job, changed, plan
from scripts.benchmarks.commands import read_json, write_json
from scripts.benchmarks.results import ROOT, fingerprint, load, renew, row, versions
from trainer.config import load as configuration
from trainer.config.schema import RunConfig
from trainer.options import command, option

RECIPE = "configs/adapters/llama31_8b_qlora_24gb.yaml"
PRESET, RANK = "llama-3.1-8b", 32
STEP = 8192  # tokens: the query chunks below are then whole projection chunks
PROBES = (8 * STEP, 32 * STEP)
# Host memory, and the part left to the system and the data loader.
HOST_GIB, HOST_LEFT_GIB = 128, 8
GROUPS = {"attention_groups": 8}  # one per key/value head
QUERY_CHUNKS = {**GROUPS, "query_chunks": 8}
EVERY: list[dict[str, Any]] = [{"remat": "offload_every_k", "every_k": k} for k in (2, 4)]
# Policies with layer inputs in host memory, and policies without host memory.
ON_HOST: tuple[dict[str, Any], ...] = (
    {"remat": "offload"},
    {"remat": "offload", **GROUPS},
    {"remat": "offload", **QUERY_CHUNKS},
    {**EVERY[1], **GROUPS},
    {**EVERY[0], **QUERY_CHUNKS},
    {**EVERY[1], **QUERY_CHUNKS},
)
ON_DEVICE: tuple[dict[str, Any], ...] = (
    {"remat": "nothing"},
    *({"remat": "every_k", "every_k": 4, **options} for options in (GROUPS, QUERY_CHUNKS)),
)
NAME = "adapter_contexts"


@dataclasses.dataclass(frozen=True)
class Case:
    """A GPU with or without host memory.

    Attributes:
      unsloth: the tokens that Unsloth publishes for this memory; None if it publishes none.
    """

    gigabytes: int
    topology: str
    host: bool
    unsloth: int | None

    @property
    def name(self) -> str:
        return f"gb_{self.gigabytes}_{'with' if self.host else 'without'}_host"

    @property
    def host_gib(self) -> float:
        """The host memory that a step may use."""
        return HOST_GIB - HOST_LEFT_GIB if self.host else 0.0

    @property
    def policies(self) -> tuple[dict[str, Any], ...]:
        return (*ON_HOST, *ON_DEVICE) if self.host else ON_DEVICE

    def fits(self, sizes: dict[str, float]) -> bool:
        """Whether a step of these sizes fits in device and host memory."""
        device_gib = memory_gib(self.topology)
        assert device_gib is not None
        return sizes["peak_gib"] <= device_gib and sizes["host_gib"] <= self.host_gib

    def most(self, short: tuple[int, dict], long: tuple[int, dict]) -> int:
        """The largest multiple of STEP that fits by the line through two (tokens, sizes)."""
        limits = {"peak_gib": memory_gib(self.topology), "host_gib": self.host_gib}
        lengths = []
        for size, limit in limits.items():
            slope = (long[1][size] - short[1][size]) / (long[0] - short[0])
            if slope > 0:
                lengths.append(long[0] + (limit - long[1][size]) / slope)
        return max(0, int(min(lengths) // STEP) * STEP)


UNSLOTH = {24: 78_475, 48: 191_728, 80: 342_733}
GPU_OF = {24: "rtx4090:1", 48: "l40s:1", 80: "h100:1", 141: "h200:1"}
CASES = tuple(
    Case(gigabytes, topology, host, UNSLOTH.get(gigabytes) if host else None)
    for gigabytes, topology in GPU_OF.items()
    for host in (True, False)
)


@functools.cache
def recipe() -> RunConfig:
    """Returns the recipe with the rank of Unsloth's measurements."""
    run = configuration.load(
        ["--config", str(ROOT / RECIPE), "--data.path", "any", "--model.path", "any"]
    )
    return changed(run, adapter={"rank": RANK, "alpha": float(RANK)})


def job_of(topology: str, policy: dict[str, Any], tokens: int) -> Job:
    """Returns the step to compile, without a memory limit so that any size is measured."""
    run = changed(recipe(), data={"context_length": tokens}, memory=policy)
    return Job(run, TransformerConfig.preset(PRESET), topology, PRESET, own_device_gib=float("inf"))


def text(policy: dict[str, Any]) -> str:
    """Returns a policy as text, such as `offload_every_k, every 4 layers, 8 head groups`."""
    words = {
        "remat": "{}",
        "every_k": "every {} layers",
        "attention_groups": "{} head groups",
        "query_chunks": "{} query chunks",
    }
    return ", ".join(words[name].format(value) for name, value in policy.items())


class Compilations:
    """Recorded compilations: `topology, policy, tokens` -> sizes, in a file.

    The file is dropped when code or versions change.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inputs = {
            **{pattern: fingerprint(pattern) for pattern in load(NAME).depends_on},
            **versions(),
        }
        recorded = read_json(path) if path.exists() else {}
        self.sizes: dict[str, dict[str, float]] = (
            recorded["sizes"] if recorded.get("inputs") == self.inputs else {}
        )

    def __call__(self, topology: str, policy: dict[str, Any], tokens: int) -> dict[str, float]:
        """Returns a step's `peak_gib` and `host_gib`, compiling it if necessary."""
        key = f"{topology}, {text(policy)}, {tokens}"
        if key not in self.sizes:
            made = plan(job_of(topology, policy, tokens))
            self.sizes[key] = {
                name: float(f"{made[name]:.6g}")
                for name in ("peak_gib", "host_gib", "compile_seconds")
            }
            write_json(self.path, {"inputs": self.inputs, "sizes": self.sizes})
            figures = "{peak_gib:.2f} GiB, {host_gib:.2f} of host memory ({compile_seconds:.0f} s)"
            print(f"{key}: {figures.format(**self.sizes[key])}", flush=True)
        return self.sizes[key]


def longest(case: Case, compilations: Compilations) -> tuple[int, dict[str, Any]]:
    """Returns the largest multiple of STEP tokens that fits, and its policy."""

    def line(policy: dict[str, Any]) -> list[tuple[int, dict[str, float]]]:
        return [(tokens, compilations("h100:1", policy, tokens)) for tokens in PROBES]

    policy = max(case.policies, key=lambda policy: case.most(*line(policy)))
    tokens, known = max(STEP, case.most(*line(policy))), {}
    while True:
        known[tokens] = case.fits(compilations(case.topology, policy, tokens))
        neighbour = tokens + STEP if known[tokens] else tokens - STEP
        if known.get(neighbour) not in (None, known[tokens]):
            return min(tokens, neighbour), policy
        if neighbour == 0:
            raise ValueError(f"{case.name}: not even {STEP} tokens fit")
        tokens = neighbour


def save_result(outcomes: dict[Case, tuple[int, dict[str, Any]]]) -> None:
    """Writes the result of the known rows."""
    rows = {}
    for case, (tokens, policy) in outcomes.items():
        host = f"{HOST_GIB} GiB of host memory" if case.host else "no host memory"
        unsloth = f"{case.unsloth:,}" if case.unsloth else ""
        rows[case.name] = row(
            f"QLoRA of LLaMA-3.1-8B, rank {RANK}, one GPU of {case.gigabytes} GB, {host}",
            f"{tokens:,} tokens: {text(policy)}",
            unsloth and f"Unsloth: {unsloth}",
            tokens >= case.unsloth if case.unsloth else None,
        )
    renew(NAME, rows)


def work(args: Options) -> None:
    """Compiles what is missing, and writes the result after each row."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    output_files(args.output, {"compilations.json": b'"sizes"'})
    compilations = Compilations(args.output / "compilations.json")
    outcomes = {}
    for case in CASES:
        if all(word in case.name for word in args.only):
            outcomes[case] = longest(case, compilations)
            print(
                f"{case.name}: {outcomes[case][0]:,} tokens, {text(outcomes[case][1])}", flush=True
            )
            if not args.only:
                save_result(outcomes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    only: tuple[str, ...] = option(
        "rows whose name has all of these words; leaves the result file unchanged",
        (),
        metavar="WORD",
    )
    output: Path = option("folder for results", Path("runs/bench/adapter_contexts"))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
