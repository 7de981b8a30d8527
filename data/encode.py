"""Records to token documents that fit a row: rendered, split or cut; by several processes where there is much to do."""

import contextlib
import multiprocessing
import signal
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from data.clean import SPLIT, split
from data.conversation import Conversation, Message, Text
from data.sources import Item
from data.templates import TemplateError, render
from data.tokenizer import Tokenizer

NO_TARGET = "no trained token"
FOREIGN_ID = "an id that the tokenizer does not have"
CUT = "longer than context_length, cut"
TYPED = "typed in a turn, kept as letters: "  # of a control token; data.text_tokens could take it as a token
BATCH = 64  # records that go to a process at a time

Whole = tuple[np.ndarray, np.ndarray]  # tokens int32 [n], loss mask uint8 [n]


@dataclass(frozen=True)
class Encoded:
    """documents: each of at most context_length tokens and with a target; changes: what had to be done to it."""

    documents: list[Whole]
    changes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Encoder:
    """templates: of each source, by its number in the recipe; split: conversations on whole exchanges; train_on: `all`
    assistant turns of a conversation or only its `last` one (of the whole conversation: parts without it are left out)."""

    templates: tuple[str, ...]
    tokenizer: Tokenizer
    context_length: int
    split: bool = True
    train_on: str = "all"

    def encode(self, item: Item) -> Encoded | str:
        """The documents of one record, or the reason why there are none."""
        changes = set()
        if isinstance(item, Conversation):
            changes = {TYPED + token for message in item.messages for token in self.tokenizer.typed(message.content)}
            try:
                wholes = self._conversation(item.messages, self.templates[item.source])
            except TemplateError as error:
                return str(error)
        elif isinstance(item, Text):
            wholes = [self._text(item.text)]
        elif item.tokens.min() < 0 or item.tokens.max() >= self.tokenizer.vocab_size:
            return FOREIGN_ID
        else:
            wholes = [(item.tokens, item.loss_mask.astype(np.uint8))]
        pieces = [
            (tokens[start : start + self.context_length], mask[start : start + self.context_length])
            for tokens, mask in wholes
            for start in range(0, len(tokens), self.context_length)
        ]
        # The first token is nobody's target.
        documents = [(tokens, mask) for tokens, mask in pieces if mask[1:].any()]
        if not documents:
            return NO_TARGET
        if len(wholes) > 1 or len(wholes[0][0]) > self.context_length:
            changes.add(SPLIT if len(wholes) > 1 else CUT)
        return Encoded(documents, frozenset(changes))

    def _conversation(self, messages: Sequence[Message], template: str) -> list[Whole]:
        if self.train_on == "last":
            last = max(place for place, message in enumerate(messages) if message.role == "assistant")
            messages = [replace(message, train=message.train and place == last) for place, message in enumerate(messages)]
        if not self.split:
            return [self._render(messages, template)]
        render = partial(self._render, template=template)
        return list(split(messages, render, lambda whole: len(whole[0]), self.context_length))

    def _render(self, messages: Sequence[Message], template: str) -> Whole:
        segments = render(messages, template, self.tokenizer)
        tokens = np.fromiter((token for s in segments for token in s.ids), np.int32)
        return tokens, np.repeat([s.train for s in segments], [len(s.ids) for s in segments]).astype(np.uint8)

    def _text(self, text: str) -> Whole:
        """A text between BOS and EOS, as far as the tokenizer has them, all of it trained on."""
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(text), self.tokenizer.eos_id]
        tokens = np.fromiter((token for token in ids if token is not None), np.int32)
        return tokens, np.ones(len(tokens), np.uint8)


def encode_all(encoder: Encoder, items: Iterable[Item], processes: int = 1) -> Iterator[tuple[Item, Encoded | str]]:
    """(item, what became of it) in the items' order, whatever the number of processes; reads only a little ahead."""
    if processes < 2:
        yield from ((item, encoder.encode(item)) for item in items)
        return
    items, waiting = iter(items), deque()
    # Spawned: a fork of a process in which JAX's threads run may hang.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="longstripe-tokenizer-") as folder:
        encoder.tokenizer.save(folder)  # its libraries' objects cannot all be pickled
        begin = (replace(encoder, tokenizer=None), folder, encoder.tokenizer.text_tokens)
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_begin, initargs=begin) as pool:
            try:
                while batch := list(islice(items, BATCH)):
                    with _deaf_to_ctrl_c():  # the first batches start the processes
                        waiting.append((batch, pool.submit(_encode_batch, batch)))
                    if len(waiting) > 2 * processes:
                        done, future = waiting.popleft()
                        yield from zip(done, future.result(), strict=True)
                for done, future in waiting:
                    yield from zip(done, future.result(), strict=True)
            finally:
                pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that are started here never hear a terminal's Ctrl-C, not even as they import: their parent does, and ends
    them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_encoder: Encoder | None = None  # of a process of encode_all's


def _begin(encoder: Encoder, folder: str, text_tokens: tuple[str, ...]) -> None:
    global _encoder
    _encoder = replace(encoder, tokenizer=Tokenizer.load(folder).with_text_tokens(text_tokens))


def _encode_batch(batch: list[Item]) -> list[Encoded | str]:
    return [_encoder.encode(item) for item in batch]
