"""Completions after the prompts of other records, from which KTO estimates its KL term.

TRL's KTOTrainer gives each prompt the previous record's completion, within a batch. Here it is the
previous record of the whole source, and the first record gets the last one's completion, so the
pairs do not depend on batches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from data.conversation import Record
from data.encode import CUT_PROMPT, Encoded, EncodingRules, TokenDocument, prompt_cut, shared_tokens

LONG_TWICE = "longer than context_length with its prompt a second time, for the KL term"
ALONE = "the only completion of its split, whose KL term needs one of another prompt"
CUT_COMPLETION = "the other record's completion for the KL term cut to fit context_length"


def with_mismatched(
    encoded: Iterable[tuple[Record, Encoded]],
    is_held_out: Callable[[Record], bool],
    rules: EncodingRules,
) -> Iterator[tuple[Record, Encoded]]:
    """Yields records with documents of a completion after its prompt, followed by the prompt again
    with the completion of the previous record in its split. The splits' first records come last.

    Args:
      encoded: records with a document per labelled completion, or why they are dropped.
      is_held_out: whether a record is in the split held_out.
      rules: what may be cut, and what a row holds once.
    """
    first: dict[bool, tuple[Record, Encoded]] = {}
    before: dict[bool, Sequence[TokenDocument]] = {}
    for record, found in encoded:
        if found.drop_reason is not None:
            yield record, found
            continue
        split = is_held_out(record)
        if split in first:
            yield record, _joined(found, before[split], rules)
        else:
            first[split] = (record, found)
        before[split] = found.documents
    for split, (record, found) in first.items():
        if before[split] is found.documents:
            yield record, Encoded([], drop_reason=ALONE)
        else:
            yield record, _joined(found, before[split], rules)


def _joined(encoded: Encoded, others: Sequence[TokenDocument], rules: EncodingRules) -> Encoded:
    """Returns a record's documents, each with one of the other record's completions."""
    notes, documents = set(encoded.changes), []
    for number, document in enumerate(encoded.documents):
        joined = _with_completion(document, others[number % len(others)], rules)
        if joined is None:
            return Encoded([], drop_reason=LONG_TWICE)
        documents.append(joined[0])
        notes |= joined[1]
    return replace(encoded, documents=documents, changes=frozenset(notes))


def _with_completion(
    document: TokenDocument, other: TokenDocument, rules: EncodingRules
) -> tuple[TokenDocument, set[str]] | None:
    """Returns a document followed by its prompt again with another document's completion, and what
    was cut. None if it does not fit."""
    notes = set()
    prompt, start = int(document.loss_mask.argmax()), int(other.loss_mask.argmax())
    shared = shared_tokens(document, document) if rules.share_prompts else 0
    excess = len(document.tokens) + prompt + 1 - shared - rules.context_length
    if excess > 0:
        cut = prompt_cut(excess, shared)
        if not rules.cut_prompts or cut >= prompt:
            return None
        document = document.cut(cut)
        prompt, shared = prompt - cut, max(shared - cut, 0)
        notes.add(CUT_PROMPT)
    end = start + rules.context_length - len(document.tokens) - prompt + shared
    if end < len(other.tokens):
        notes.add(CUT_COMPLETION)
    parts = (document, document, other)
    pieces = (slice(None), slice(prompt), slice(start, end))
    tokens, masks = (
        np.concatenate([part[:2][field][piece] for part, piece in zip(parts, pieces, strict=True)])
        for field in (0, 1)
    )
    return TokenDocument(tokens, masks, len(document.tokens), document.label, shared), notes
