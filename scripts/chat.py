"""Chats with a checkpoint, optionally about a long text.

    python -m scripts.chat CHECKPOINT [--document FILE] [--sequence 8] [--question TEXT ...]

The text is read once: its keys and values stay in device memory for all questions about it. Answers
are printed as they are generated. An empty line or Ctrl-D ends the chat; /new forgets all turns
except the text. With --question the questions come from the command line. The chat template is the
model's, or --template.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from data.conversation import Message
from data.errors import UserError
from data.printable import printable
from data.within import read_text
from eval import runner
from trainer import entry
from trainer.options import FreeText, StorePath, Tokens, option, parser_of

if TYPE_CHECKING:
    from model.decode import Generator

LENGTH = 8192  # tokens of a conversation without a document
DOCUMENT = "Here is a text. Answer the questions about it.\n\n{text}\n\n{question}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    checkpoint: StorePath = option(
        "checkpoint, run folder, Hugging Face folder or org/name", positional=True
    )
    document: str | None = option("the text to talk about", None, metavar="FILE")
    question: tuple[FreeText, ...] = option(
        "ask these questions instead of reading from the terminal", (), metavar="TEXT"
    )
    length: Tokens | None = option(
        f"tokens of the longest conversation (default: {LENGTH:,}, or enough for the document and "
        "eight turns)",
        None,
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the command's options, including those shared by question-answering commands."""
    parser = parser_of(Options)
    runner.add_flags(parser, new_tokens=256, evaluation=False)
    return runner.parse(parser, argv)


def read_document(path: str | None) -> str | None:
    """Returns the text of a file, or None without one.

    Raises:
      UserError: the file cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        text = read_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--document: {path} cannot be read ({getattr(error, 'strerror', None) or error}); "
            "expected a UTF-8 text"
        ) from None
    if not text:
        raise UserError(f"--document: {path} is empty")
    return text


class Talk:
    """A conversation with a model.

    Attributes:
      turns: the messages so far.
      generator: generates the answers, and keeps keys and values.
    """

    def __init__(
        self, opened: runner.LoadedModel, document: str | None, length: int | None, new_tokens: int
    ) -> None:
        """Compiles for conversations of at most `length` tokens.

        Raises:
          UserError: the model has no chat template, or the document does not fit.
        """
        self.opened, self.document, self.new_tokens = opened, document, new_tokens
        self.respondent = opened.respondent
        if not self.respondent.template:
            raise UserError(
                f"{opened.about['checkpoint']}: its tokenizer has no chat template; pass the one "
                "it was trained with, such as --template vicuna_v1.1"
            )
        self.turns: list[Message] = []
        needed = len(self._ids([self._user("")])) + 8 * (new_tokens + 64)
        capacity = length or max(needed, LENGTH)
        if needed - 7 * (new_tokens + 64) > capacity:
            raise UserError(
                f"--length: found {length}; the document with a question and an answer takes about "
                f"{needed - 7 * (new_tokens + 64)} tokens"
            )
        if capacity > self.respondent.trained_length:
            print(
                f"note: conversations of more than {self.respondent.trained_length:,} tokens are "
                "beyond the trained length"
            )
        self.generator: Generator = self.respondent.generator(
            opened.params, capacity, new_tokens, capacity - new_tokens
        )

    def _user(self, question: str) -> Message:
        """Returns the user's turn; the first turn includes the document."""
        if self.document is None or self.turns:
            return Message("user", question)
        return Message("user", DOCUMENT.format(text=self.document, question=question))

    def _ids(self, turns: list[Message]) -> list[int]:
        return self.respondent.ids(runner.Prompt(tuple(turns), self.new_tokens))

    def ask(self, question: str, show: Callable[[str], object] = lambda piece: None) -> str:
        """Returns the answer, and appends question and answer to the turns.

        Args:
          show: called with each piece of the answer as soon as it is generated.

        Raises:
          UserError: the conversation is too long.
        """
        turns = [*self.turns, self._user(question)]
        ids = self._ids(turns)
        longest = self.generator.capacity - self.new_tokens
        if len(ids) > longest:
            raise UserError(
                f"the conversation has {len(ids):,} tokens, and {longest:,} fit; /new starts a "
                "new one, --length makes room for longer ones"
            )
        generated: list[int] = []

        def recorded() -> Iterator[int]:
            for token in self.generator.stream(self.opened.params, ids):
                generated.append(token)
                yield token

        for piece in pieces(recorded(), self.respondent.tokenizer.decode):
            show(piece)
        answer = self.respondent.tokenizer.decode(generated).strip()
        self.turns = [*turns, Message("assistant", answer)]
        return answer

    def forget(self) -> None:
        """Starts a new conversation about the same document."""
        self.turns = []


def pieces(ids: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Yields the text of tokens as they arrive, without surrounding white space.

    Trailing white space is held back until more text follows, as is U+FFFD, which stands for a
    character whose first bytes alone have arrived.
    """
    generated: list[int] = []
    yielded = ""
    for token in ids:
        generated.append(token)
        text = decode(generated).lstrip().rstrip("\ufffd").rstrip()
        if text.startswith(yielded) and text != yielded:
            yield text[len(yielded) :]
            yielded = text
    text = decode(generated).strip()
    # A later token has changed the text of earlier ones.
    if not text.startswith(yielded):
        yield f"\n{text}"
    elif text != yielded:
        yield text[len(yielded) :]


def questions(args: argparse.Namespace) -> Iterator[str]:
    """Yields the questions from the command line, or typed questions."""
    if args.question:
        yield from args.question
        return
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def talk(args: argparse.Namespace) -> None:
    """Asks and prints."""
    args.rows = args.fsdp
    document = read_document(args.document)
    conversation = Talk(runner.open_respondent(args), document, args.length, args.max_new_tokens)
    for question in questions(args):
        if question == "/new":
            conversation.forget()
            continue
        before = conversation.generator.prefilled
        try:
            conversation.ask(question, lambda piece: print(printable(piece), end="", flush=True))
            print(flush=True)
        except UserError as error:
            print(f"note: {error}", file=sys.stderr)
            continue
        if sys.stderr.isatty():
            print(
                f"({conversation.generator.prefilled - before:,} new tokens were read)",
                file=sys.stderr,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = parse(argv)
    return entry.run(lambda: talk(args))


if __name__ == "__main__":
    entry.leave(main())
