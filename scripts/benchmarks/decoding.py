"""Measures decoding over the sequence axis: memory on 1 to 8 devices, and tokens after 8K prompts.

    python -m scripts.benchmarks.decoding [--context 16384]

Memory is the compiler's, of a prefill of SmolLM2-135M with a cache for --context tokens:
parameters, cache and temporaries. The tokens are those of the slow test of
tests/model/test_decode.py, which this command runs: greedy continuations of 20 prompts of different
lengths on eight simulated devices, on one, and of transformers. Writes docs/results/decoding.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scripts.benchmarks.commands import make_parser, python
from scripts.benchmarks.results import measured, row, save, table
from trainer import entry

DEVICES = (1, 2, 4, 8)
TEST = "test_eight_devices_give_the_tokens_of_one_and_of_transformers"
DEPENDS_ON = (
    "model/decode.py",
    "model/cache.py",
    "model/attention/**/*.py",
    "tests/model/test_decode.py",
    "scripts/benchmarks/decoding.py",
)


def memory_rows(context: int) -> list[tuple[int, float, float]]:
    """Returns (devices, MiB of a prefill per device, MiB of its cache) for each of DEVICES."""
    import jax
    import jax.numpy as jnp

    from model.config import TransformerConfig
    from model.decode import Generator
    from model.language_model import LanguageModel
    from trainer.config.schema import MeshConfig
    from trainer.mesh import make_mesh, simulate

    simulate(max(DEVICES))
    rows = []
    for count in DEVICES:
        mesh = make_mesh(MeshConfig(sequence=count), jax.devices()[:count])
        model = LanguageModel(TransformerConfig.preset("smollm2-135m"), mesh, dtype=jnp.float32)
        generator = Generator(model, rows=1, capacity=context, new_tokens=64, stop_ids=())
        sizes = generator.prefill_bytes(generator.cached), generator.cached.bytes_per_device
        rows.append((count, sizes[0] / 2**20, sizes[1] / 2**20))
        print(
            f"{count} devices: {rows[-1][1]:,.0f} MiB of each, of it {rows[-1][2]:,.0f} of the "
            "cache",
            flush=True,
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and saves."""
    parser = make_parser("decoding", __doc__)
    parser.add_argument(
        "--context", type=int, default=16384, help="tokens that the cache holds (default 16384)"
    )
    args = parser.parse_args(argv)
    memory = memory_rows(args.context)
    python(f"-m pytest -q -p no:cacheprovider -m slow -n 1 tests/model/test_decode.py -k {TEST}")
    totals = [total for _, total, _ in memory]
    rows = {
        "memory": row(
            f"prefill of a prompt of {args.context:,} tokens: MiB of each of 1, 2, 4, 8 devices",
            " / ".join(f"{total:,.0f}" for total in totals),
            "falls",
            totals == sorted(totals, reverse=True),
        ),
        # The command would have ended at the test's first difference.
        "tokens": row(
            "tokens after 20 prompts of 7K to 8K on 8 devices: one's, and transformers'",
            "equal",
            "equal",
            True,
        ),
    }
    prefill = table(
        "devices | MiB of each | of it the cache",
        [[str(count), f"{total:,.0f}", f"{cache:,.0f}"] for count, total, cache in memory],
    )
    save(
        "decoding",
        measured(
            "Decoding over the sequence axis",
            rows,
            "python -m scripts.benchmarks.decoding",
            DEPENDS_ON,
            tables={"a prefill": prefill},
            note="docs/notes/retrieval.md",
            facts=[
                "SmolLM2-135M's sizes, float32, chunks of 4,096 tokens; the tokens are a small "
                "model's, equal but where transformers' two best logits are within 1e-3."
            ],
        ),
    )


if __name__ == "__main__":
    sys.exit(entry.run(main))
