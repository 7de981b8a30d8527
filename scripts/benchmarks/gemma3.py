"""Compares Gemma 3 270M with transformers: loss on a book, and greedy continuations.

    python -m scripts.make_gemma3 HF_DIR
    python -m scripts.benchmarks.gemma3 --model HF_DIR --book BOOK.txt [--tokens 2048]

Ours runs in float32 on four simulated devices, fsdp 1 x tensor 2 x sequence 2, by the striped ring;
the text is longer than the windows. Writes docs/results/gemma3.json.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64

from scripts.benchmarks.results import renew, row
from trainer.options import Tokens, command, option

if TYPE_CHECKING:
    from trainer.source_kinds import ModelSource

QUESTION = "Question: What is the capital of France?\nAnswer:"
NEW_TOKENS = 12


def by_transformers(
    folder: str, question: list[int], text: list[int]
) -> tuple[list[int], Float64[np.ndarray, " N"]]:
    """Returns transformers' greedy answer and the losses of the text's tokens after the first."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(text[1:]), reduction="none"
        ).numpy()
        generated = model.generate(
            torch.tensor([question]), max_new_tokens=NEW_TOKENS, do_sample=False
        )[0, len(question) :]
    return generated.tolist(), losses


def by_ours(
    source: ModelSource, question: list[int], text: list[int], tokens: int
) -> tuple[list[int], Float64[np.ndarray, " N"]]:
    """Returns our greedy answer and the losses of the text's tokens after the first.

    Args:
      tokens: the most that the text may have.
    """
    import jax.numpy as jnp

    from model.decode import Generator
    from trainer.build import build_language_model
    from trainer.config.schema import MeshConfig, ModelConfig, RunConfig
    from trainer.mesh import make_mesh

    model = build_language_model(
        RunConfig(model=ModelConfig(compute_dtype="float32")),
        source.config,
        make_mesh(MeshConfig(fsdp=1, tensor=2, sequence=2)),
    )
    params = source.read(model)
    assert all(value.dtype == jnp.float32 for value in params.values())
    generator = Generator(
        model, rows=1, capacity=tokens + 64, new_tokens=NEW_TOKENS, stop_ids=(), chunk=1024
    )
    (answer,) = generator(dict(params), [question])
    (scores,) = generator.score(dict(params), [text], [1])
    return answer, -np.asarray(scores.log_likelihoods, np.float64)


def work(args: Options) -> None:
    """Measures and saves."""
    from trainer.mesh import simulate
    from trainer.model_source import open_model

    simulate(4)
    source = open_model(args.model)
    tokenizer = source.tokenizer()
    assert tokenizer.bos_id is not None
    question = [tokenizer.bos_id, *tokenizer.encode(QUESTION)]
    book = Path(args.book).read_text(encoding="utf-8")
    middle = tokenizer.encode(book[len(book) // 2 :][: 8 * args.tokens])
    text = [tokenizer.bos_id, *middle][: args.tokens]
    answer, losses = by_ours(source, question, text, args.tokens)
    expected_answer, expected = by_transformers(args.model, question, text)
    difference = float(abs(losses.mean() - expected.mean()))
    largest = float(np.abs(losses - expected).max())
    answers = [tokenizer.decode(ids).strip().splitlines()[0] for ids in (answer, expected_answer)]
    print(
        f"loss on {len(text):,} tokens: {losses.mean():.6f}, transformers {expected.mean():.6f}; "
        f"a token's losses differ by at most {largest:.1e}\n{QUESTION} {answers[0]}"
    )
    rows = {
        "loss": row(
            f"Gemma 3 270M: loss on {len(text):,} tokens of a book, ours and transformers'",
            f"{losses.mean():.6f} and {expected.mean():.6f}",
            "1e-4 apart",
            difference <= 1e-4,
        ),
        "token": row(
            "the same: largest difference of a single token's loss",
            f"{largest:.1e}",
            "1e-3",
            largest <= 1e-3,
        ),
        "answer": row(
            f"Gemma 3 270M, greedy answer: {QUESTION.splitlines()[0]}",
            answers[0],
            "transformers' greedy tokens",
            answer == expected_answer,
        ),
    }
    command = (
        f"python -m scripts.benchmarks.gemma3 --model HF_DIR --book BOOK.txt --tokens {args.tokens}"
    )
    renew("gemma3", rows, command=command)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    model: str = option("the folder that scripts.make_gemma3 makes")
    book: str = option("a text", metavar="BOOK.txt")
    tokens: Tokens = option("tokens of the book", 2048)


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
