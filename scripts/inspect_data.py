"""Shows what a recipe trains on.

    python -m scripts.inspect_data CONFIG.yaml [--rows N] [--tokens N] [--section.field value ...]
    python -m scripts.inspect_data --model.path MODEL --data.path DATA [--section.field value ...]

With the flags of a train.py command it shows what that command would read. It prints the first
packed rows as text, with tokens in the loss in colour (without colours, in ⟦ ⟧), the numbers of
used and dropped records, the documents' lengths, and the share of padding.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from rich.text import Text

from data import printable
from data.batch import Batch
from data.errors import UserError
from data.loader import Loader
from data.pairs import PairLoader
from data.prepared import Documents, counts
from data.tokenizer import Tokenizer
from trainer import entry
from trainer.options import FIELDS, AtLeastOne, TokensOr0, command, no_download, option, other_words

IN_LOSS, SEPARATOR = "bold green", "dim"  # rich styles
LONGEST_BAR = 40  # characters


class _Run(NamedTuple):
    """Consecutive tokens of one document that are all in the loss, or all outside it."""

    segment_id: int
    in_loss: bool
    start: int
    end: int


def row_text(row: Batch, tokenizer: Tokenizer, max_tokens: int, brackets: bool = False) -> Text:
    """Returns a row as text: a heading per document, and a last line with the amount of padding.

    Args:
        row: a row of the loader, arrays [L].
        tokenizer: the tokenizer; control tokens are shown as their text.
        max_tokens: the largest number of tokens to show.
        brackets: whether to mark tokens in the loss with ⟦ ⟧, for output without colours.
    """
    text = Text()
    used = int((row["segment_ids"] > 0).sum())
    for run in _runs(row, min(used, max_tokens)):
        if run.start == 0 or row["segment_ids"][run.start - 1] != run.segment_id:
            text.append(
                f"{'' if run.start == 0 else chr(10)}── document {run.segment_id} ──\n", SEPARATOR
            )
        ids = row["tokens"][run.start : run.end]
        part = tokenizer.decode(ids, skip_special=False)
        text.append(
            f"⟦{part}⟧" if brackets and run.in_loss else part, IN_LOSS if run.in_loss else None
        )
    text.append(f"\n── {used} tokens, {len(row['tokens']) - used} of padding", SEPARATOR)
    text.append(f"; the first {max_tokens} are shown ──" if used > max_tokens else " ──", SEPARATOR)
    return text


def _runs(row: Batch, end: int) -> Iterator[_Run]:
    """Yields the runs of a row's first `end` tokens."""
    segments, in_loss = row["segment_ids"], np.zeros(len(row["tokens"]), bool)
    # A token is in the loss as the target of the previous token.
    in_loss[1:] = row["loss_weights"][:-1] > 0
    borders = np.flatnonzero((np.diff(segments[:end]) != 0) | (np.diff(in_loss[:end]) != 0)) + 1
    for start, stop in zip([0, *borders], [*borders, end], strict=True):
        if stop > start:
            yield _Run(int(segments[start]), bool(in_loss[start]), int(start), int(stop))


def histogram(lengths: Int[np.ndarray, " N"]) -> str:
    """Returns a line per power of two: the number of documents of about that length, and their
    share of the tokens.

    Args:
        lengths: number of tokens of each document.
    """
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    lines = []
    for power in range(powers.min(), powers.max() + 1):
        in_bin = powers == power
        share = lengths[in_bin].sum() / lengths.sum()
        bar = "█" * round(LONGEST_BAR * in_bin.sum() / np.bincount(powers).max())
        lines.append(
            f"{2**power:9,} .. {2 ** (power + 1) - 1:9,}  {in_bin.sum():8,} documents {share:6.1%} "
            f"of tokens  {bar}"
        )
    return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    """Returns a number of things: `1 row`, `12 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def describe(documents: Documents, loader: Loader) -> str:
    """Returns the counts, lengths and padding of a split as text."""
    total = counts(documents)
    return (
        f"{documents.name}: {_counted(total.documents, 'document')}, {total.tokens:,} tokens, "
        f"{total.trained_tokens / max(total.tokens, 1):.1%} of them in the "
        f"loss\n{histogram(documents.lengths)}\n"
        f"{_counted(len(loader), 'row')} of {loader.context_length:,} in the first epoch, "
        f"{loader.padding_share:.2%} padding"
    )


def work(args: "Options") -> None:
    """Shows the first rows, and describes both splits.

    Raises:
        UserError: the recipe or the data are invalid.
    """
    from trainer.config.command_line import with_recipe_named
    from trainer.config.load import load
    from trainer.model_source import choose_model, for_templates
    from trainer.stages import choose_stage
    from trainer.text import prepare_text
    from trainer.text_checks import data_warnings

    recipe = load(with_recipe_named(args.flags), command_flags=vars(args).keys() - {"flags"})
    if recipe.trajectories.path:
        raise UserError(
            f"trajectories.path: found {recipe.trajectories.path}, which has episodes and no "
            "texts; scripts.inspect_trajectories shows them"
        )
    config = choose_stage(recipe, args.stage)
    source, tokenizer = for_templates(choose_model(config.model, weights=False), config.data)
    prepared = prepare_text(config, source.config, tokenizer)
    rows = (prepared.train, config.data.context_length, config.train.batch_size, config.data.seed)
    loader = PairLoader(*rows, shares=False) if config.preference.loss else Loader(*rows)
    console = printable.console(highlight=False, soft_wrap=True)
    brackets = console.no_color or console.color_system is None
    if brackets:
        console.print("tokens in the loss are in ⟦ ⟧", markup=False)
    for number in range(min(args.rows, len(loader))):
        console.print(f"row {number}", style="bold")
        console.print(row_text(loader.row(number), tokenizer, args.tokens, brackets))
    console.print(prepared.report.summary(), markup=False)
    console.print(describe(prepared.train, loader), markup=False)
    for warning in data_warnings(source, config, prepared, loader):
        console.print(f"warning: {warning}", markup=False)
    if len(prepared.held_out):
        console.print(
            f"held_out: {_counted(len(prepared.held_out), 'document')}, "
            f"{prepared.held_out.lengths.sum():,} tokens"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    rows: AtLeastOne = option("number of rows to show", 2)
    tokens: TokensOr0 = option("number of tokens to show per row", 600)
    stage: int | None = option("stage of a recipe with stages, from 1 (default: the last)", None)
    no_download: bool = no_download()
    flags: tuple[str, ...] = other_words("[CONFIG.yaml] [--section.field value ...]", FIELDS)


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
