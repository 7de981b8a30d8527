"""What commands accept on their command line: the types of options, and a parser with one-line
errors."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from typing import Any, NoReturn

from data.errors import UserError
from data.lengths import FORM, tokens_of
from data.printable import printable_output
from data.untrusted_files import parse_json


def at_least_one(text: str) -> int:
    """The argparse type of a whole number of at least 1, such as devices or rows."""
    return _whole_number(text, least=1)


def at_least_zero(text: str) -> int:
    """The argparse type of a whole number of at least 0, such as a seed."""
    return _whole_number(text, least=0)


def _whole_number(text: str, least: int) -> int:
    try:
        if (number := int(text)) >= least:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"found {text}; a whole number, at least {least}, is needed")


def above_zero(text: str) -> float:
    """The argparse type of a number above 0, such as a price."""
    if (number := _finite(text)) > 0:
        return number
    raise argparse.ArgumentTypeError(f"found {text}; a number above 0 is needed")


def not_negative(text: str) -> float:
    """The argparse type of a number of at least 0, such as an amount of memory."""
    if (number := _finite(text)) >= 0:
        return number
    raise argparse.ArgumentTypeError(f"found {text}; a number, at least 0, is needed")


def finite(text: str) -> float:
    """The argparse type of a number that may be below 0, such as a return."""
    if not math.isnan(number := _finite(text)):
        return number
    raise argparse.ArgumentTypeError(f"found {text}; a finite number is needed")


def _finite(text: str) -> float:
    """Returns the number in a text; NaN if it is not a finite number."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def store_path(text: str) -> str:
    """The argparse type of a path that may be in a store, such as gs://."""
    return text


def free_text(text: str) -> str:
    """The argparse type of a text that may look like a path, such as a question."""
    return text


def json_object(text: str) -> dict[str, Any]:
    """The argparse type of a JSON object, such as '{"enable_thinking": false}'."""
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    raise argparse.ArgumentTypeError(
        f"found {text}; a JSON object such as '{{\"enable_thinking\": false}}' is needed"
    )


def tokens(text: str, least: int = 1) -> int:
    """The argparse type of a positive number of tokens, such as 4096, 64K or 1M."""
    try:
        if (number := tokens_of(text)) >= least:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"found {text}; write {FORM}")


def tokens_or_0(text: str) -> int:
    """The argparse type of a number of tokens that may be 0."""
    return tokens(text, least=0)


class NoDownload(argparse.Action):
    """The argparse action of --no-download: the hub's models are read only from its cache."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        options.setdefault(
            "help", "use only models and data in the local hub cache, like HF_HUB_OFFLINE=1"
        )
        super().__init__(option_strings, dest, nargs=0, default=False, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        """Takes effect at once."""
        from data.hub import no_downloads  # here, since most commands start without it

        no_downloads()
        setattr(namespace, self.dest, True)


class Joined(argparse.Action):
    """The argparse action of a list: an option given again adds its values to the earlier ones."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Adds the values; the first ones replace the default."""
        earlier: Any = getattr(namespace, self.dest, None)
        # argparse has put the default itself there, which no list of given values is.
        joined = [*(() if earlier is self.default else earlier), *values]
        self.check(parser, option_string, joined)
        setattr(namespace, self.dest, joined)

    def check(
        self, parser: argparse.ArgumentParser, option_string: str | None, joined: list[Any]
    ) -> None:
        """Calls `parser.error` if the list cannot be taken."""
        if isinstance(self.nargs, int) and len(joined) > self.nargs:
            parser.error(f"argument {option_string}: given twice; once would work")


class CommandParser(argparse.ArgumentParser):
    """An argument parser with one-line errors that suggest the nearest flag or value.

    A value that names a store, such as gs://bucket/folder, is refused unless the option's type is
    `store_path` or `free_text`: other commands would take it for a local folder named `gs:`.
    """

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        """Like argparse's; raises SystemExit(2) after one line about unknown arguments."""
        known = self._known_options()
        words = list(sys.argv[1:] if args is None else args)
        # A misspelt flag is named before the required one it may replace.
        for word in words[: words.index("--")] if "--" in words else words:
            flag = self._dashed(word, known).partition("=")[0]
            if re.match("--[a-z]", flag) and flag not in known:
                self._refuse(word)
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown[0])
        return parsed

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """Like argparse's; options may be written with - or _."""
        known = self._known_options()
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._dashed(word, known) for word in words], namespace)

    @staticmethod
    def _dashed(word: str, known: set[str]) -> str:
        """A flag in the spelling that the parser knows: --head-dim for --head_dim."""
        flag, equals, value = word.partition("=")
        dashed = flag.replace("_", "-")
        return dashed + equals + value if flag not in known and dashed in known else word

    def _known_options(self) -> set[str]:
        """The option strings of this parser and of its subcommands."""
        inner = [
            parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for parser in action.choices.values()
        ]
        return {*self._option_string_actions}.union(
            *(parser._option_string_actions for parser in inner)
        )

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """One value of an option; refuses a store if the option takes none, and an empty text, such
        as a shell variable that is not set, unless that is free text or the option's default.

        A shell expands the ~ of `--output ~/x`, but not that of `--output=~/x`."""
        if not arg_string and action.type is not free_text and action.default != "":
            raise argparse.ArgumentError(action, "found '', needs a value")
        if action.type is not free_text and (":/" in arg_string or arg_string.startswith("~")):
            from data.paths import expanded, refuse_store

            try:
                if action.type is not store_path:
                    refuse_store(arg_string)
                if arg_string.startswith("~"):
                    arg_string = str(expanded(arg_string))
            except UserError as error:
                raise argparse.ArgumentError(action, str(error)) from None
        return super()._get_value(action, arg_string)  # type: ignore[misc]

    def _refuse(self, word: str) -> NoReturn:
        self.error(
            f"{word.partition('=')[0]} is not an option of this command{self._meant(word)}; "
            "--help lists them"
        )

    def error(self, message: str) -> NoReturn:
        """Prints the message on one line and exits with 2."""
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            choices = [choice.strip(" '") for choice in match[2].split(",")]
            near = difflib.get_close_matches(match[1], choices, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"error: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints help and errors, which may quote the command line."""
        is_help = file is sys.stdout
        with printable_output():
            super()._print_message(message, sys.stdout if is_help else sys.stderr)

    def _meant(self, word: str) -> str:
        from trainer.config.fields import FIELDS
        from trainer.config.other_trainers import MEANT

        name = word.partition("=")[0]
        if not name.startswith("-"):
            return ""
        own = [option for option in self._option_string_actions if option.startswith("--")]
        if name == "--cases" and "--count" in own:  # other tests take a file of cases
            return " (did you mean --count?)"
        field = MEANT.get(name.lstrip("-").replace("-", "_").lower())
        if field and (option := "--" + field.rpartition(".")[2].replace("_", "-")) in own:
            return f" (did you mean {option}?)"
        last = "--" + name.lstrip("-").rpartition(".")[2].replace("_", "-")
        if name.lstrip("-") in FIELDS and last in own:
            return f" (did you mean {last}?)"
        near = difflib.get_close_matches(name.replace("_", "-"), own, n=1)
        return f" (did you mean {near[0]}?)" if near else ""
