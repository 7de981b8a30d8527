"""Shows what a recipe trains on: python -m scripts.inspect_data CONFIG.yaml [--rows N] [--tokens N] [--section.field value ...]

The first packed rows as text, the part in the loss in colour; what became of every record; lengths; the share of padding.
"""

import argparse
import sys
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from data.loader import Loader
from data.prepare import Documents, counts
from data.tokenizer import Tokenizer

IN_LOSS, BORDER = "bold green", "dim"


def row_text(row: dict[str, np.ndarray], tokenizer: Tokenizer, most: int) -> Text:
    """A row of data.loader as text: its first `most` tokens, control tokens written out, what the loss asks for in
    IN_LOSS, each document under a line of its own, padding counted at the end."""
    text = Text()
    used = int((row["segment_ids"] > 0).sum())
    for segment, in_loss, start, end in _runs(row, min(used, most)):
        if start == 0 or row["segment_ids"][start - 1] != segment:
            text.append(f"{'' if start == 0 else chr(10)}── document {segment} ──\n", BORDER)
        text.append(tokenizer.decode(row["tokens"][start:end], skip_control=False), IN_LOSS if in_loss else None)
    text.append(f"\n── {used} tokens, {len(row['tokens']) - used} of padding", BORDER)
    text.append(f"; the first {most} are shown ──" if used > most else " ──", BORDER)
    return text


def _runs(row: dict[str, np.ndarray], end: int) -> Iterator[tuple[int, bool, int, int]]:
    """(document, in the loss, start, end) of consecutive tokens that are alike in both."""
    segments, in_loss = row["segment_ids"], np.zeros(len(row["tokens"]), bool)
    # A token is in the loss when it is the target of the one before.
    in_loss[1:] = row["loss_weights"][:-1] > 0
    borders = np.flatnonzero((np.diff(segments[:end]) != 0) | (np.diff(in_loss[:end]) != 0)) + 1
    for start, stop in zip([0, *borders], [*borders, end], strict=True):
        if stop > start:
            yield int(segments[start]), bool(in_loss[start]), int(start), int(stop)


def histogram(lengths: np.ndarray, width: int = 40) -> str:
    """A line for each power of two: documents of that many tokens, and the share of all tokens that they hold."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    lines = []
    for power in range(powers.min(), powers.max() + 1):
        here = powers == power
        share = lengths[here].sum() / lengths.sum()
        bar = "█" * round(width * here.sum() / np.bincount(powers).max())
        lines.append(f"{2**power:9,} .. {2 ** (power + 1) - 1:9,}  {here.sum():8,} documents {share:6.1%} of tokens  {bar}")
    return "\n".join(lines)


def describe(documents: Documents, loader: Loader) -> str:
    """Counts, lengths and padding of a split, for the terminal."""
    total = counts(documents)
    return (
        f"{documents.name}: {total.documents:,} documents, {total.tokens:,} tokens, "
        f"{total.trained_tokens / max(total.tokens, 1):.1%} of them in the loss\n{histogram(documents.lengths)}\n"
        f"{len(loader):,} rows of {loader.context_length:,} in the first epoch, {loader.padding_share:.2%} padding"
    )


def show(argv: list[str]) -> None:
    """The command; UserError for whatever is wrong with the recipe or the data."""
    parser = argparse.ArgumentParser(prog="python -m scripts.inspect_data", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG.yaml", help="a recipe; its fields may follow as --section.field value")
    parser.add_argument("--rows", type=int, default=2, help="rows to show (default 2)")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of a row to show (default 600)")
    args, flags = parser.parse_known_args(argv)
    # The one look from data/ up to trainer/: this is a command over both, as those in scripts/ are.
    from trainer.config.load import load
    from trainer.model_source import choose_model, for_templates
    from trainer.text import prepare_text

    config = load(["--config", args.config, *flags], own=vars(args))
    _, tokenizer = for_templates(choose_model(config.model), config.data)
    prepared = prepare_text(config, tokenizer)
    loader = Loader(prepared, config.data.context_length, config.train.batch_size, config.data.seed)
    console = Console(highlight=False, soft_wrap=True)
    for number in range(min(args.rows, len(loader))):
        console.print(f"row {number}", style="bold")
        console.print(row_text(loader.row(number), tokenizer, args.tokens))
    console.print(prepared.report.summary(), markup=False)
    console.print(describe(prepared.train, loader), markup=False)
    if len(prepared.held_out):
        console.print(f"held_out: {len(prepared.held_out):,} documents, {prepared.held_out.lengths.sum():,} tokens")


def main(argv: list[str] | None = None) -> int:
    from trainer import entry

    return entry.run(lambda: show(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    from trainer.entry import leave

    leave(main())
