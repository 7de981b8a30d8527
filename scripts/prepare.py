"""Tokenizes a recipe's data ahead of training, where no accelerator waits for it; train.py then finds them made.

    python -m scripts.prepare --config RECIPE.yaml [--section.field value ...]

What is made lies under `data.prepared`, in a folder named by contents, templates, tokenizer and rules: it serves every run that
learns from the same, on any mesh and any machine that sees that path (a folder, gs:// or s3://).
"""
from __future__ import annotations

import argparse

from trainer import entry


def prepare(recipe: str, flags: list[str]) -> None:
    """Tokenizes, or finds the data tokenized, and says what became of the records; UserError for a recipe or data at fault."""
    from data.loader import Loader
    from scripts.inspect_data import describe
    from trainer.config.load import load
    from trainer.model_source import choose_model, for_templates
    from trainer.text import prepare_text

    config = load(["--config", recipe, *flags])
    _, tokenizer = for_templates(choose_model(config.model), config.data)
    prepared = prepare_text(config, tokenizer)
    print(prepared.report.summary())
    for documents in (prepared.train, prepared.held_out):
        if len(documents):
            print(describe(documents, Loader(documents, config.data.context_length, 1, config.data.seed)))
    print(f"prepared in {prepared.folder}")


def main(argv=None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.prepare", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="RECIPE.yaml",
                        help="a recipe; its fields may follow as --section.field value (python train.py --help has them all)")
    args, flags = parser.parse_known_args(argv)
    return entry.run(lambda: prepare(args.config, flags))


if __name__ == "__main__":
    entry.leave(main())
