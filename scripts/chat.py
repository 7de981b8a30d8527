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
from data.errors import UserError, first_line
from data.printable import printable
from data.untrusted_files import is_text, read_text
from eval import adapters, runner
from trainer import entry
from trainer.options import FreeText, StorePath, Tokens, option, parser_of

if TYPE_CHECKING:
    from model.decode import Generator

LENGTH = 8192  # tokens of a conversation without a document
QUESTION = 64  # tokens of a usual question
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
    adapters.add_options(parser, several=False)
    runner.add_generation_options(parser, max_new_tokens=256)
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
            f"--document: {path} cannot be read ({first_line(error)}); expected a UTF-8 text"
        ) from None
    if not text:
        raise UserError(f"--document: {path} is empty")
    return text


class Talk:
    """A conversation with a model.

    Attributes:
      length: the most tokens of the conversation, answers included.
      turns: the messages so far.
      tokens: their number of tokens.
      generator: generates the answers, and keeps keys and values.
    """

    def __init__(
        self, opened: runner.LoadedModel, document: str | None, length: int | None, new_tokens: int
    ) -> None:
        """Finds out whether conversations of at most `length` tokens fit in memory.

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
        self.tokens = 0
        given = len(self._ids([self._user("")]))  # the document and the template
        self.length = length or max(given + 8 * (QUESTION + new_tokens), LENGTH)
        self._check_room(given)
        self.generator: Generator = self._generator(self.length)

    def _check_room(self, given: int) -> None:
        """Raises UserError if `length` leaves no room for a question, beside the `given` tokens,
        and its answer."""
        needed = given + QUESTION + self.new_tokens
        if needed <= self.length:
            return
        asked = "a question" if self.document is None else "the document, a question"
        ways_out = [f"--length {needed}"]
        if (room := self.length - given - QUESTION) > 0:
            ways_out.append(f"--max-new-tokens {room}")
        raise UserError(
            f"--length: found {self.length}; {asked} and an answer of --max-new-tokens "
            f"{self.new_tokens} take about {needed} tokens; {' or '.join(ways_out)} would work"
        )

    def _generator(self, tokens: int) -> Generator:
        """Returns the generator for a conversation of `tokens`, the next answer included."""
        return self.respondent.generator(
            self.opened.params,
            self.respondent.capacity_within(tokens, self.length),
            self.new_tokens,
            self.length - self.new_tokens,
        )

    @property
    def prefilled(self) -> int:
        """Tokens of questions and document that were computed so far."""
        return sum(generator.prefilled for generator in self.respondent.generators.values())

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
          UserError: the conversation is too long, or the question is not UTF-8.
        """
        if not is_text(question):
            raise UserError(f"the question was not asked, since it is not UTF-8: {question}")
        turns = [*self.turns, self._user(question)]
        ids = self._ids(turns)
        longest = self.length - self.new_tokens
        if len(ids) > longest:
            raise UserError(
                f"the conversation has {len(ids):,} tokens, and {longest:,} fit; /new starts a "
                "new one, --length makes room for longer ones"
            )
        self._fit(len(ids))
        generated: list[int] = []

        def recorded() -> Iterator[int]:
            for token in self.generator.stream(self.opened.params, ids):
                generated.append(token)
                yield token

        for piece in pieces(recorded(), self.respondent.tokenizer.decode):
            show(piece)
        answer = self.respondent.tokenizer.decode(generated).strip()
        self.turns = [*turns, Message("assistant", answer, generated=True)]
        self.tokens = len(ids) + len(generated)
        return answer

    def _fit(self, prompt_tokens: int) -> None:
        """Replaces the generator if its RoPE would embed a longer or shorter conversation."""
        before, generator = self.generator, self._generator(prompt_tokens + self.new_tokens)
        if generator is before:
            return
        before.free_cache()  # there is memory for only one cache
        generator.answered = before.answered  # it numbers the samples of all answers
        self.generator = generator

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
    runner.check_flags(args)
    document = read_document(args.document)
    conversation = Talk(runner.open_respondent(args), document, args.length, args.max_new_tokens)
    trained_length, noted = conversation.respondent.trained_length, False
    for question in questions(args):
        if question == "/new":
            conversation.forget()
            continue
        before = conversation.prefilled
        try:
            conversation.ask(question, lambda piece: print(printable(piece), end="", flush=True))
            print(flush=True)
        except UserError as error:
            print(f"note: {error}", file=sys.stderr)
            continue
        if sys.stderr.isatty():
            print(f"({conversation.prefilled - before:,} new tokens were read)", file=sys.stderr)
        if conversation.tokens > trained_length and not noted:
            noted = True
            print(
                f"note: conversations of more than {trained_length:,} tokens are beyond the "
                f"trained length; this one has {conversation.tokens:,}",
                file=sys.stderr,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = parse(argv)
    return entry.run(lambda: talk(args))


if __name__ == "__main__":
    entry.leave(main())
