"""Encodes records as token documents that fit a row, in several processes if there are many."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from data.clean import CleanConfig
from data.conversation import (
    Conversation,
    Labelled,
    Message,
    Preference,
    Record,
    Text,
    prompt_of,
    with_last_answer_trained,
)
from data.errors import TransientError, UserError
from data.folders import named_errors, scratch_folder
from data.reasons import SPLIT
from data.sources import Source
from data.splitting import split
from data.templates import TemplateError, encode_conversation, encode_prompt
from data.templates.encoder import encode, find_controls
from data.templates.loss import GUESSED
from data.templates.rendering import Rendered
from data.tokenizer import Tokenizer

NO_TARGET = "no trained token"
LONG_PAIR = "a pair longer than context_length"
NOT_PAIRED = "a completion with a `label`, which only preference.loss kto learns from"
CUT_PROMPT = "longer than context_length, cut at the prompt's beginning"
FOREIGN_ID = "an id that the tokenizer does not have"
CUT = "longer than context_length, cut"
# Followed by the token, which the source's `control_tokens` would let a text contain.
TYPED_IN_TEXT = (
    "control token in a text, encoded as plain text (the source's `control_tokens` is false): "
)
# As TRL warns.
OTHER_PROMPT = (
    "a prompt that the template writes differently before its completion than alone: the loss "
    "begins where they part"
)
BATCH = 64  # records that a process receives at a time


@dataclass(frozen=True)
class EncodingRules:
    """How records become documents. All fields are part of a prepared folder's name."""

    context_length: int
    """The most tokens of a document."""
    _: KW_ONLY
    clean: CleanConfig = CleanConfig()
    """How conversations are cleaned before they are encoded, and whether long ones are split."""
    train_on: Literal["all", "last", "everything"] = "all"
    """The assistant turns to train on: `all` of a conversation or only the `last`; parts without
    one are dropped. `everything` trains on the other turns and the template's text too, except a
    prompt and what precedes it."""
    cut_prompts: bool = False
    """Whether a preference pair that is too long loses the beginning of its prompt, or is
    dropped."""
    unpaired: bool = False
    """Whether each completion of a preference is a separate document, with a label and another
    record's completion after the same prompt, as KTO needs."""
    share_prompts: bool = False
    """Whether a row holds the prompt of two completions once, which affects what fits."""

    def __post_init__(self) -> None:
        if self.context_length < 2:
            raise UserError(
                f"data.context_length: found {self.context_length}, which leaves no token to "
                "predict; 2 or more would work"
            )


class TokenDocument(NamedTuple):
    """Token ids, and which of them are trained on."""

    tokens: Int32[np.ndarray, " n"]
    loss_mask: UInt8[np.ndarray, " n"]
    """1 where token i is trained on as a target."""
    chosen: int = 0
    """Of two completions, each after its prompt, the number of tokens of the first, the chosen
    one."""
    label: int = -1
    """1 for a desirable completion, 0 for an undesirable one, -1 for what has no label."""
    shared: int = 0
    """Tokens at the beginning of both completions' documents that a row holds only once."""

    def cut(self, start: int, stop: int | None = None) -> "TokenDocument":
        """Returns some consecutive tokens."""
        return self._replace(tokens=self.tokens[start:stop], loss_mask=self.loss_mask[start:stop])


class _Slices(Sequence):
    """Consecutive documents of an array; a single remaining token has no target and is dropped."""

    def __init__(self, tokens: np.memmap, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        whole, rest = divmod(len(self._tokens), self._length)
        return whole + (rest > 1)

    def __getitem__(self, number: int) -> TokenDocument:  # type: ignore[override]  # no slices
        if not 0 <= number < len(self):
            raise IndexError(number)
        tokens = self._tokens[number * self._length : (number + 1) * self._length].astype(np.int32)
        return TokenDocument(np.asarray(tokens), np.ones(len(tokens), np.uint8))


@dataclass(frozen=True)
class Encoded:
    """The outcome of encoding a record."""

    documents: Sequence[TokenDocument]
    """Each of at most context_length tokens, with a target; none if the record is dropped."""
    changes: frozenset[str] = frozenset()
    """Changes, as the report counts them."""
    drop_reason: str | None = None
    """Why there are no documents."""


class _Rendered(NamedTuple):
    """A conversation, or a part of one, under its template."""

    document: TokenDocument
    notes: frozenset[str]
    """What the template leaves out, as the report counts it."""


@dataclass(frozen=True)
class Encoder:
    """Encodes the records of a source one at a time."""

    source: Source
    tokenizer: Tokenizer
    rules: EncodingRules

    def encode(self, record: Record) -> Encoded:
        """Returns the documents of one record, or why there are none."""
        changes: set[str] = set()
        if isinstance(record, Preference):
            return self._encode_preference(record)
        if isinstance(record, Labelled):
            return self._encode_labelled(record)
        if isinstance(record, Conversation):
            try:
                parts = self._encode_conversation(record, changes)
            except TemplateError as error:
                return Encoded([], drop_reason=str(error))
        elif isinstance(record, Text):
            parts = [self._encode_text(record, changes)]
        elif record.tokens.min() < 0 or record.tokens.max() >= self.tokenizer.vocab_size:
            return Encoded([], drop_reason=FOREIGN_ID)
        elif isinstance(record.tokens, np.memmap):
            return self._encode_array(record.tokens)
        else:
            parts = [TokenDocument(record.tokens, record.loss_mask.astype(np.uint8))]
        length = self.rules.context_length
        pieces = [
            part.cut(start, start + length)
            for part in parts
            for start in range(0, len(part.tokens), length)
        ]
        # The first token of a document is not a target.
        documents = [piece for piece in pieces if piece.loss_mask[1:].any()]
        if not documents:
            return Encoded([], drop_reason=NO_TARGET)
        if len(parts) > 1 or len(parts[0].tokens) > length:
            changes.add(SPLIT if len(parts) > 1 else CUT)
        return Encoded(documents, frozenset(changes))

    def _encode_array(self, tokens: np.memmap) -> Encoded:
        """Returns the documents of an array that stays on disk; each is read when indexed."""
        length = self.rules.context_length
        documents = _Slices(tokens, length)
        if not len(documents):
            return Encoded([], drop_reason=NO_TARGET)
        return Encoded(documents, frozenset({CUT} if len(tokens) > length else ()))

    def _encode_conversation(self, record: Conversation, changes: set[str]) -> list[TokenDocument]:
        """Returns the conversation, or its parts; a part of one exchange may exceed context_length.

        Adds to `changes` what the template leaves out.
        """
        messages: Sequence[Message] = record.messages
        if self.rules.train_on == "last":
            messages = with_last_answer_trained(messages)
        render, length = partial(self._render, record=record), self.rules.context_length
        whole = render(messages)
        changes |= whole.notes
        if not self.rules.clean.split or len(whole.document.tokens) <= length:
            return [whole.document]
        parts = list(split(messages, render, lambda part: len(part.document.tokens), length, whole))
        changes.update(*(part.notes for part in parts))
        return [part.document for part in parts]

    def _render(self, messages: Sequence[Message], record: Conversation) -> _Rendered:
        """Returns turns of a conversation under the source's template."""
        if self.rules.train_on != "everything":
            return self._tokenize(messages, record)
        prompt = prompt_of(messages)
        # The prompt's turns are left out together with the template's text between them.
        turns = [*(replace(turn, train=True) for turn in prompt), *messages[len(prompt) :]]
        document, notes = self._tokenize(turns, record, train_on_everything=True)
        if not prompt:
            return _Rendered(document, notes)
        (start,), found = self._completion_starts(messages, record, [document])
        if start is None:
            start = _first_trained(self._tokenize(messages, record).document)
        mask = document.loss_mask * _from(start, document)
        return _Rendered(document._replace(loss_mask=mask), notes | found)

    def _tokenize(
        self, messages: Sequence[Message], record: Conversation, **options: bool
    ) -> _Rendered:
        """Returns turns with the mask that options of `encode_conversation` select."""
        segments, notes = encode_conversation(
            messages,
            self.source.template,
            self.tokenizer,
            tools=record.tools,
            template_kwargs=record.template_kwargs,
            **options,
        )
        tokens = np.fromiter(chain.from_iterable(segment.ids for segment in segments), np.int32)
        lengths = [len(segment.ids) for segment in segments]
        mask = np.repeat([segment.train for segment in segments], lengths).astype(np.uint8)
        return _Rendered(TokenDocument(tokens, mask), notes)

    def _completion_starts(
        self, messages: Sequence[Message], record: Conversation, documents: Sequence[TokenDocument]
    ) -> tuple[list[int] | list[None], frozenset[str]]:
        """Returns where the completions of a prompt begin, and what the report counts.

        As in TRL, a completion begins where its document first differs from the prompt followed by
        the generation prompt; both completions of a pair begin where the earlier one does. None if
        the template refuses the prompt alone.
        """
        try:
            prompt = encode_prompt(
                prompt_of(messages),
                self.source.template,
                self.tokenizer,
                record.tools,
                record.template_kwargs,
            )
        except TemplateError:
            return [None] * len(documents), frozenset()
        ids = np.asarray(prompt.ids, np.int32)
        starts = [_common_prefix(ids, document.tokens) for document in documents]
        if not self.rules.unpaired:
            starts = [min(starts)] * len(starts)
        return starts, frozenset({OTHER_PROMPT} if min(starts) < prompt.turns else ())

    def _encode_preference(self, record: Preference) -> Encoded:
        """Returns one document of both conversations, the chosen one first, each with its own
        prompt; or two documents if completions are unpaired."""
        encoded = self._encode_completions(record.chosen, record.rejected)
        if encoded.drop_reason:
            return encoded
        if self.rules.unpaired:
            return _with_labels(encoded, 1, 0)
        notes, parts = set(encoded.changes), list(encoded.documents)
        shared = shared_tokens(*parts) if self.rules.share_prompts else 0
        excess = sum(len(part.tokens) for part in parts) - shared - self.rules.context_length
        if excess > 0:
            cut = prompt_cut(excess, shared)
            # One token of the prompt is left, before which nothing predicts the completion's first.
            touches_completion = any(part.loss_mask[: cut + 1].any() for part in parts)
            if touches_completion or not self.rules.cut_prompts:
                return Encoded([], drop_reason=LONG_PAIR)
            parts = [part.cut(cut) for part in parts]
            shared = max(shared - cut, 0)
            notes.add(CUT_PROMPT)
        tokens, masks = (
            np.concatenate(arrays) for arrays in zip(*(p[:2] for p in parts), strict=True)
        )
        document = TokenDocument(tokens, masks, len(parts[0].tokens), shared=shared)
        return Encoded([document], frozenset(notes))

    def _encode_labelled(self, record: Labelled) -> Encoded:
        """Returns a document of a completion after its prompt."""
        if not self.rules.unpaired:
            return Encoded([], drop_reason=NOT_PAIRED)
        encoded = self._encode_completions(record.conversation)
        return encoded if encoded.drop_reason else _with_labels(encoded, int(record.desirable))

    def _encode_completions(self, *conversations: Conversation) -> Encoded:
        """Returns a document per conversation, with everything after the prompt in the loss,
        including what the template writes after the last turn, as in TRL. A completion with answers
        that a flag excludes has only the others in the loss."""
        encoder = replace(self, tokenizer=self.tokenizer.remembering())
        try:
            rendered = [
                encoder._tokenize(conversation.messages, conversation, reads_blocks=False)
                for conversation in conversations
            ]
        except TemplateError as error:
            return Encoded([], drop_reason=str(error))
        documents = [each.document for each in rendered]
        first = conversations[0]
        starts, found = encoder._completion_starts(first.messages, first, documents)
        notes = found.union(*(each.notes for each in rendered))
        if None not in starts:
            notes -= {GUESSED}
        documents = [
            _with_completion(document, conversation.messages, start)
            for document, conversation, start in zip(documents, conversations, starts, strict=True)
        ]
        if not all(document.loss_mask[1:].any() for document in documents):
            return Encoded([], drop_reason=NO_TARGET)
        return Encoded(documents, notes)

    def _encode_text(self, record: Text, changes: set[str]) -> TokenDocument:
        """Returns a text with BOS and EOS as configured; the loss covers what follows `prompt`
        characters.

        Without a prompt, every token is trained on. Adds to `changes` which control tokens stay
        plain text.
        """
        tokenizer = self.tokenizer
        if self.source.control_tokens:
            tokens, loss_mask = self._encode_rendered(record)
        else:
            changes |= {TYPED_IN_TEXT + token for token in tokenizer.typed(record.text)}
            spans = tokenizer.encode_spans(record.text)
            tokens = spans.ids
            loss_mask = [not record.prompt or end > record.prompt for _, end in spans.offsets]
        # A rendered text may have them already, as transformers and TRL know.
        bos_id = tokenizer.bos_id if self.source.adds_bos(tokenizer) else None
        if bos_id is not None and tokens[:1] != [bos_id]:
            tokens, loss_mask = [bos_id, *tokens], [not record.prompt, *loss_mask]
        if tokenizer.eos_id is not None and not self._ends_with_eos(tokens, record.text):
            tokens, loss_mask = [*tokens, tokenizer.eos_id], [*loss_mask, True]
        return TokenDocument(np.asarray(tokens, np.int32), np.asarray(loss_mask, np.uint8))

    def _ends_with_eos(self, tokens: Sequence[int], text: str) -> bool:
        """Returns whether a text's ids end with EOS; after that of a rendered text there may be
        white space."""
        eos = self.tokenizer.eos_id
        return tokens[-1:] == [eos] or (
            eos in tokens and text.rstrip().endswith(str(self.tokenizer.eos_token))
        )

    def _encode_rendered(self, record: Text) -> tuple[list[int], list[bool]]:
        """Returns the ids of a text with its control tokens, and which of them are trained on."""
        rendered = Rendered(record.text, ((len(record.text), None, 0),), [])
        controls = find_controls(rendered, self.tokenizer).controls
        trained = [(record.prompt, len(record.text))]
        segments = encode(rendered, controls, trained, self.tokenizer)
        ids = [token for segment in segments for token in segment.ids]
        return ids, [segment.train for segment in segments for _ in segment.ids]


def _with_labels(encoded: Encoded, *labels: int) -> Encoded:
    pairs = zip(encoded.documents, labels, strict=True)
    return replace(encoded, documents=[document._replace(label=label) for document, label in pairs])


def shared_tokens(*documents: TokenDocument) -> int:
    """Returns how many tokens two documents share at the beginning of their prompts, without the
    prompt's last token: each completion's first token is predicted from a separate copy.
    """
    prompt = min(int(document.loss_mask.argmax()) for document in documents) - 1
    return _common_prefix(*(document.tokens[: max(prompt, 0)] for document in documents))


def _common_prefix(first: Int32[np.ndarray, " n"], second: Int32[np.ndarray, " m"]) -> int:
    """Returns how many ids two sequences begin with in common."""
    length = min(len(first), len(second))
    return int(np.append(first[:length] == second[:length], False).argmin())


def prompt_cut(excess: int, shared: int) -> int:
    """Returns how many tokens to cut off both prompts so that a row needs `excess` tokens fewer: a
    shared token counts once."""
    return excess if excess <= shared else shared - (shared - excess) // 2


def _with_completion(
    document: TokenDocument, messages: Sequence[Message], start: int | None
) -> TokenDocument:
    """Returns a document with everything from `start` in the loss, or from the first answer's
    beginning if it is None; unchanged if no answer is in it, or a flag excludes one after the
    prompt."""
    completion = messages[len(prompt_of(messages)) :]
    is_flagged = not all(turn.train for turn in completion if turn.role == "assistant")
    if is_flagged or not document.loss_mask.any():
        return document
    start = _first_trained(document) if start is None else start
    return document._replace(loss_mask=_from(start, document))


def _first_trained(document: TokenDocument) -> int:
    """Returns the number of the first token that is trained on, or of all tokens without one."""
    return int(np.append(document.loss_mask, 1).argmax())


def _from(start: int, document: TokenDocument) -> UInt8[np.ndarray, " n"]:
    """Returns a mask of a document's tokens from `start` on."""
    return (np.arange(len(document.tokens)) >= start).astype(np.uint8)


def encode_all(
    encoder: Encoder, records: Iterable[Record], processes: int = 1
) -> Iterator[tuple[Record, Encoded]]:
    """Yields each record with its encoding, in the records' order for any number of processes.

    Reads only a few batches of records ahead.

    Raises:
      TransientError: one of the processes was killed.
    """
    if processes < 2:
        yield from ((record, encoder.encode(record)) for record in records)
        return
    records = iter(records)
    pending: deque[tuple[list[Record], Future[list[Encoded]]]] = deque()
    # Forking a process in which JAX's threads run may deadlock.
    spawn = multiprocessing.get_context("spawn")
    with scratch_folder() as folder:
        # Not all objects of the tokenizer libraries can be pickled.
        with named_errors(folder):
            encoder.tokenizer.save(folder)
        tokenizer = encoder.tokenizer
        arguments = (
            replace(encoder, tokenizer=None),  # type: ignore[arg-type]  # sent as files
            str(folder),
            tokenizer.text_tokens,
            tokenizer.template_date,
            tokenizer.template_kwargs,
        )
        with ProcessPoolExecutor(processes, spawn, _set_up_process, arguments) as pool:
            try:
                while batch := list(islice(records, BATCH)):
                    with _ctrl_c_blocked():  # the first batches start the processes
                        pending.append((batch, pool.submit(_encode_batch, batch)))
                    if len(pending) > 2 * processes:
                        done, future = pending.popleft()
                        yield from zip(done, future.result(), strict=True)
                for done, future in pending:
                    yield from zip(done, future.result(), strict=True)
            except BrokenProcessPool:
                raise TransientError(
                    f"one of {processes} processes that encoded records ended, perhaps killed for "
                    "lack of memory; the same command may work with more memory, or on fewer "
                    "cores, such as under taskset -c 0,1"
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Blocks SIGINT in processes that are started within the context, even while they import.

    A terminal sends Ctrl-C to all processes; the parent receives it and ends the others.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


_process_encoder: Encoder | None = None  # the encoder of a process that encode_all has started


def _set_up_process(
    encoder: Encoder,
    folder: str,
    text_tokens: tuple[str, ...],
    template_date: datetime,
    template_kwargs: Mapping[str, Any],
) -> None:
    global _process_encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tokenizer = (
        Tokenizer.load(folder, as_saved=True)
        .with_text_tokens(text_tokens)
        .with_template_date(template_date)
        .with_template_kwargs(template_kwargs)
    )
    _process_encoder = replace(encoder, tokenizer=tokenizer)


def _end_with_parent() -> None:
    """Ends this process when its parent ends; a killed parent could not do it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_batch(batch: list[Record]) -> list[Encoded]:
    assert _process_encoder is not None
    return [_process_encoder.encode(record) for record in batch]
