"""A file to which each answer is appended at once, so an interrupted evaluation can continue."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.folders import lock
from data.untrusted_files import check_within, parse_json, read_bytes

JOURNAL = "answers.jsonl"


@dataclasses.dataclass(frozen=True)
class Answer:
    """The generated text, and the number of tokens of its prompt."""

    generated: str
    prompt_tokens: int


class Journal:
    """The answers so far, in a file; ignores a last line cut off by a crash.

    Raises:
      UserError: the file holds answers of another model or with other settings; names the first
        difference.
      TransientError: another process evaluates into it.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        check_within(path.parent, path)  # refuses a pipe too
        self._file = open(path, "a+b")  # noqa: SIM115 - open as long as the evaluation
        try:
            lock(self._file, path.parent, "evaluates into it")
            self.answers = self._read(about)
        except BaseException:
            self.close()
            raise

    def _read(self, about: dict[str, Any]) -> dict[str, Answer]:
        """Returns the answers in the file, and removes what follows them; errors as above."""
        content = read_bytes(self.path, self.path.parent)
        rows, offset = _whole_lines(content)
        answers = _answers(self.path, rows, about) if rows else {}
        if not rows and not json.dumps(about).encode().startswith(content):
            raise UserError(
                f"{self.path}: not an evaluation's answers, so it is not overwritten; "
                "another --output, or removing this file, would work"
            )
        self._file.truncate(offset)
        if not rows:
            self._write(about)
        return answers

    def add(self, key: str, answer: Answer) -> None:
        """Adds an answer."""
        self.answers[key] = answer
        self._write({"key": key, **dataclasses.asdict(answer)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _whole_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Returns a journal's lines up to the first incomplete one, and their bytes."""
    lines, offset = [], 0
    for line in content.splitlines(keepends=True):
        try:
            value = parse_json(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(value, dict):
            break
        lines.append(value)
        offset += len(line)
    return lines, offset


def _answers(path: Path, lines: list[dict[str, Any]], about: dict[str, Any]) -> dict[str, Answer]:
    """Returns the answers in a journal's lines; errors as in `Journal`."""
    for name in {**about, **lines[0]}:
        if lines[0].get(name) != about.get(name):
            raise UserError(
                f"{path}: has answers with {name} = {lines[0].get(name)!r}, now it is "
                f"{about.get(name)!r}; another --output, or removing this file, would work"
            )
    try:
        return {line["key"]: Answer(line["generated"], line["prompt_tokens"]) for line in lines[1:]}
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path}: an answer has no {error}; another --output, or removing this file, would work"
        ) from None
