"""How far a float32 forward is from the truth: transformers' logits in float32 against float64, text and random tokens.

    python -m scripts.benchmarks.rounding HF_DIR [--length 4096]

Says what the tolerance of a comparison can be: where transformers itself is 1e-2 from float64, nobody equals it to 1e-3.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from trainer import entry


def largest_difference(folder: Path, tokens: np.ndarray) -> float:
    """Largest difference of the logits of `tokens` int [1, length] between float32 and float64."""
    import torch
    from transformers import AutoModelForCausalLM

    logits = []
    for dtype in (torch.float32, torch.float64):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            logits.append(model(torch.tensor(tokens)).logits.double())
    return float((logits[0] - logits[1]).abs().max())


def main(argv=None) -> int:
    """Prints both figures."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.rounding", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--length", type=int, default=4096, help="tokens (default 4096)")
    args = parser.parse_args(argv)

    def work():
        from trainer.model_source import open_model

        source = open_model(str(args.folder))
        text = "".join(Path(name).read_text(encoding="utf-8") for name in ("ARCHITECTURE.md", "trainer/huggingface/read.py"))
        kinds = {
            "text": np.asarray(source.tokenizer().encode(text)[: args.length])[None],
            "random tokens": np.random.default_rng(0).integers(0, source.config.vocab_size, (1, args.length)),
        }
        for kind, tokens in kinds.items():
            print(f"{kind}, {tokens.shape[1]} tokens: {largest_difference(args.folder, tokens):.1e}")

    return entry.run(work)


if __name__ == "__main__":
    sys.exit(main())
