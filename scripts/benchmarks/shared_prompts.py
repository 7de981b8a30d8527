"""Prints what a preference step saves if both completions of a pair share their prompt.

    python -m scripts.benchmarks.shared_prompts [--prompt 3072] [--completion 256] [--output FILE]

FLOPs are LLaMA-3.1-8B's by MFU's formula. Bytes are those of a small model's step, compiled for
four simulated devices in a ring: a device's temporaries, and the bytes it receives.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from data.outputs import output_file
from scripts.benchmarks.commands import write_json
from trainer.options import Tokens, command, option

DEVICES = 4


def flops(prompt: int, completion: int, shared: int) -> float:
    """Returns the FLOPs of a step on one pair whose completions share `shared` prompt tokens."""
    import numpy as np

    from model.config import TransformerConfig
    from trainer.flops import flops_per_step, pairs_per_layer

    model = TransformerConfig.preset("llama-3.1-8b")
    length, before = prompt + completion, np.array([0, shared])
    lengths = length - before
    pairs = pairs_per_layer(model, lengths, shared=before)
    return flops_per_step(model, int(lengths.sum()), pairs)


def compiled_bytes(tokens: int, share: bool) -> tuple[float, float]:
    """Returns a device's bytes of temporaries and of received data in a DPO step on a row of
    `tokens` tokens."""
    import jax

    from model.config import TransformerConfig
    from planning.compiled import GIB, memory
    from planning.compiled.communication import communication
    from planning.plan import DEFAULT_RECIPE, changed, compile_run
    from trainer.config.data import SourceConfig
    from trainer.config.preference import PreferenceConfig
    from trainer.config.schema import AdapterConfig, MeshConfig

    model = TransformerConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    run = changed(
        DEFAULT_RECIPE,
        data={"context_length": tokens, "sources": (SourceConfig("-", "preference"),)},
        train={"batch_size": 1},
        memory={"loss_chunk": 128},
        mesh=MeshConfig(sequence=DEVICES),
        attention={"kernel": "xla"},
        adapter=AdapterConfig(rank=4),
        preference=PreferenceConfig("sigmoid", share_prompts=share),
    )
    compiled = compile_run(run, model, jax.devices()[:DEVICES])
    text = compiled.as_text()
    assert text is not None
    sent = communication(text, DEVICES)
    received = sum(kind["received_gib"] for kind in sent.values())
    return memory(compiled)["temporaries"] * GIB, received * GIB


def figures(prompt: int, completion: int) -> dict[str, tuple[float, float]]:
    """Returns the tokens, FLOPs, memory and received bytes for a pair whose prompt is computed
    twice, and once.

    Args:
      prompt: tokens of the prompt.
      completion: tokens of each completion.
    """
    both, shared = 2 * (prompt + completion), prompt - 1  # the prompt's last token occurs twice
    tokens = [-(-count // DEVICES) * DEVICES for count in (both, both - shared)]
    twice, once = (
        compiled_bytes(row, share) for row, share in zip(tokens, (False, True), strict=True)
    )
    return {
        "tokens of the row": (float(tokens[0]), float(tokens[1])),
        "TFLOPs of a step": (
            flops(prompt, completion, 0) / 1e12,
            flops(prompt, completion, shared) / 1e12,
        ),
        "MiB of temporaries": (twice[0] / 2**20, once[0] / 2**20),
        "MiB received": (twice[1] / 2**20, once[1] / 2**20),
    }


def table(prompt: int, completion: int, values: dict[str, tuple[float, float]]) -> list[str]:
    """Returns the lines of a table of the `figures` of a pair with these lengths."""
    head = f"a prompt of {prompt:,} tokens and two completions of {completion:,}"
    lines = [head, f"{'':22}{'twice':>12}{'shared':>12}{'saved':>9}"]
    for name, (twice, once) in values.items():
        lines.append(f"{name:22}{twice:12,.1f}{once:12,.1f}{1 - once / twice:9.1%}")
    return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    prompt: Tokens = option("tokens of the prompt", 3072)
    completion: Tokens = option("tokens of each completion", 256)
    output: Path | None = option("JSON file for the figures", None, metavar="FILE")


def work(args: Options) -> None:
    """Prints the table."""
    from trainer.mesh import simulate

    if args.output:
        output_file(args.output, b'"MiB received"')
    simulate(DEVICES)
    values = figures(args.prompt, args.completion)
    print(*table(args.prompt, args.completion, values), sep="\n")
    if args.output:
        write_json(args.output, values)


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
