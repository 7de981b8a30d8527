"""Encodes a rendered conversation, and says which of its ids are trained on."""

from collections.abc import Sequence

from data.templates.rendering import TemplateText, Written
from data.templates.tools import GUARDED
from data.tokenizer import Tokenizer


class ConversationEncoder:
    """Encodes a conversation from texts of the template and contents of turns.

    All text between two control tokens is encoded at once, because tokens form across the border of template and contents
    ("USER:" + " hello"). The offsets of the tokens then tell which of them are trained on.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[tuple[int, bool]] = []  # (id, is it trained on)
        self._texts: list[tuple[str, bool]] = []  # texts since the last control token; are they trained on
        self._beginning = True
        self._train_end_token = False  # whether the next control token ends an answer that is trained on

    def add_content(self, text: str, train: bool) -> None:
        """Adds the content of a turn."""
        self._add(text, train)
        self._train_end_token = train

    def add_template_text(self, piece: TemplateText, trained_turns: set[int]) -> None:
        """Adds text of the template, of which the parts that the assistant writes in these turns are trained on."""
        text, offset = piece.text, 0
        written = [part for part in piece.written if part.turn in trained_turns]
        for match in self._tokenizer.control_pattern.finditer(text):
            before = text[offset : match.start()]
            self._add_parts(text, offset, match.start(), written)
            self._train_end_token = self._train_end_token and not before.strip()
            if self._train_end_token:
                self._train_text_before_end_token(before)
            self._encode_texts()
            start = match.start(match.lastindex)
            in_call = any(part.start <= start < part.end for part in written if part.is_call)
            self._ids.append((self._tokenizer.controls[match.group(match.lastindex)].id, self._train_end_token or in_call))
            self._train_end_token = False
            offset = match.end()
        self._add_parts(text, offset, len(text), written)
        self._train_end_token = False

    def finish(self) -> list[tuple[int, bool]]:
        """Returns the ids of the conversation, each with whether it is trained on."""
        self._encode_texts()
        return self._ids

    def _add(self, text: str, train: bool) -> None:
        text = text.replace(GUARDED, "")
        if text:
            self._texts.append((text, train))

    def _add_parts(self, text: str, offset: int, end: int, trained: Sequence[Written]) -> None:
        """Adds text[offset:end], of which the given parts, which are in order, are trained on."""
        for part in trained:
            if offset < part.end and part.start < end:
                start = max(part.start, offset)
                self._add(text[offset:start], False)
                offset = min(part.end, end)
                self._add(text[start:offset], True)
        self._add(text[offset:end], False)

    def _train_text_before_end_token(self, text: str) -> None:
        # llama-2 writes a space between the answer and EOS: without it, the model would not get to EOS.
        if text and self._texts and self._texts[-1][0] == text:
            self._texts[-1] = (text, True)

    def _encode_texts(self) -> None:
        """Encodes the texts since the last control token; a token is trained on if any of its characters are."""
        trained_ranges, length = [], 0
        for text, train in self._texts:
            if train:
                trained_ranges.append((length, length + len(text)))
            length += len(text)
        spans = self._tokenizer.encode_spans("".join(text for text, _ in self._texts), self._beginning)
        self._texts, self._beginning = [], False
        index = 0  # of the first range that does not end before the token
        for token, start, end in spans:
            while index < len(trained_ranges) and trained_ranges[index][1] <= start:
                index += 1
            # A token without characters of its own lies where the next one begins.
            last = end if end > start else start + 1
            self._ids.append((token, index < len(trained_ranges) and trained_ranges[index][0] < last))
