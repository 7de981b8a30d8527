"""Times many questions to one long context: with its cache kept, and with a prefill for each.

    python -m scripts.benchmarks.questions [--context 16384] [--questions 100] [--layers 6]

The model has SmolLM2-135M's sizes with fewer layers and random weights, since only time is
measured. Each question adds 32 tokens to the context and is answered with 16. All questions are
asked with the cache kept, the first prefill included; of those with a prefill each, `--fresh` are
measured and the rest is taken to last as long. Both must give the same answers. Writes
docs/results/questions.json.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

from scripts.benchmarks.commands import make_parser
from scripts.benchmarks.results import measured, row, save
from trainer import entry

QUESTION, ANSWER = 32, 16  # tokens
DEPENDS_ON = (
    "model/decode.py",
    "model/cache.py",
    "model/attention/**/*.py",
    "scripts/benchmarks/questions.py",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and saves."""
    parser = make_parser("questions", __doc__)
    parser.add_argument(
        "--context", type=int, default=16384, help="tokens of the context (default 16384)"
    )
    parser.add_argument(
        "--questions", type=int, default=100, help="number of questions (default 100)"
    )
    parser.add_argument("--layers", type=int, default=6, help="layers of the model (default 6)")
    parser.add_argument(
        "--fresh", type=int, default=3, help="number of questions with a prefill each (default 3)"
    )
    args = parser.parse_args(argv)

    import jax.numpy as jnp
    import numpy as np

    from model.config import TransformerConfig
    from model.decode import Generator
    from model.language_model import LanguageModel
    from trainer.config.schema import MeshConfig
    from trainer.mesh import make_mesh

    config = dataclasses.replace(
        TransformerConfig.preset("smollm2-135m"), num_hidden_layers=args.layers
    )
    model = LanguageModel(config, make_mesh(MeshConfig()), dtype=jnp.float32)
    params = model.init(0)
    random = np.random.default_rng(0)
    context = random.integers(0, config.vocab_size, args.context).tolist()
    prompts = [
        context + random.integers(0, config.vocab_size, QUESTION).tolist()
        for _ in range(args.questions)
    ]
    generator = Generator(
        model, rows=1, capacity=args.context + QUESTION + ANSWER, new_tokens=ANSWER, stop_ids=()
    )

    def ask(prompt: list[int]) -> tuple[list[int], float]:
        start = time.perf_counter()
        (answer,) = generator(dict(params), [prompt])
        return answer, time.perf_counter() - start

    ask(prompts[0])  # compiles
    ask(prompts[1])
    generator.forget()
    kept = []
    for number, prompt in enumerate(prompts, start=1):
        kept.append(ask(prompt))
        if number % 20 == 0:
            print(f"{number} questions: {sum(seconds for _, seconds in kept):.1f} s", flush=True)
    fresh = []
    for prompt in prompts[: args.fresh]:
        generator.forget()
        fresh.append(ask(prompt))
        print(f"with a prefill of its own: {fresh[-1][1]:.1f} s", flush=True)
    if [answer for answer, _ in fresh] != [answer for answer, _ in kept[: args.fresh]]:
        raise SystemExit("error: the kept cache gives other answers than a prefill")
    with_cache = sum(seconds for _, seconds in kept)
    without = args.questions * sum(seconds for _, seconds in fresh) / args.fresh
    ratio = without / with_cache
    print(f"{args.questions} questions: {with_cache:.1f} s, against {without:.1f} s; {ratio:.1f}x")
    rows = {
        "ratio": row(
            f"{args.questions} questions to one context of {args.context:,} tokens, beside a "
            "prefill for each",
            f"{ratio:.1f}x ({with_cache:.0f} s against {without:.0f} s)",
            "20x",
            ratio >= 20,
        )
    }
    facts = [
        f"{args.layers} layers of SmolLM2-135M's sizes; questions of {QUESTION} tokens, answers of "
        f"{ANSWER}; {args.fresh} of the prefills were measured."
    ]
    command = (
        f"python -m scripts.benchmarks.questions --context {args.context} --questions "
        f"{args.questions} --layers {args.layers}"
    )
    save(
        "questions",
        measured("Many questions to one long context", rows, command, DEPENDS_ON, facts=facts),
    )


if __name__ == "__main__":
    sys.exit(entry.run(main))
