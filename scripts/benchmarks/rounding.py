"""Measures the distance of transformers' float32 logits from its float64 logits.

    python -m scripts.benchmarks.rounding HF_DIR [--length 4096]

No comparison of logits can have a smaller tolerance: where transformers itself is 1e-2 from
float64, nobody equals it to 1e-3.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from jaxtyping import Int

from scripts.benchmarks.commands import make_parser
from trainer import entry

TEXTS = ("ARCHITECTURE.md", "trainer/huggingface/table.py")


def largest_difference(folder: Path, tokens: Int[np.ndarray, "1 length"]) -> float:
    """Returns the largest difference between float32 and float64 logits of a model folder."""
    import torch
    from transformers import AutoModelForCausalLM

    logits = []
    for dtype in (torch.float32, torch.float64):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            logits.append(model(torch.tensor(tokens)).logits.double())
    return float((logits[0] - logits[1]).abs().max())


def work(args: argparse.Namespace) -> None:
    """Prints both differences."""
    from trainer.model_source import open_model

    source = open_model(str(args.folder))
    text = "".join(Path(name).read_text(encoding="utf-8") for name in TEXTS)
    inputs = {
        "text": np.asarray(source.tokenizer().encode(text)[: args.length])[None],
        "random tokens": np.random.default_rng(0).integers(
            0, source.config.vocab_size, (1, args.length)
        ),
    }
    for kind, tokens in inputs.items():
        print(f"{kind}, {tokens.shape[1]} tokens: {largest_difference(args.folder, tokens):.1e}")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser("rounding", __doc__)
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens (default 4096)")
    args = parser.parse_args(argv)
    return entry.run(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
