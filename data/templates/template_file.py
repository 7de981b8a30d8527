"""Reads a user's own chat template from a file."""

from data.errors import UserError
from data.paths import expanded
from data.templates.sandbox import MAX_SOURCE, compile_template
from data.untrusted_files import read_text


def read_template(path: str) -> str:
    """Returns the Jinja text of a file.

    Raises:
      UserError: it cannot be read, is empty or not Jinja, or uses something not allowed.
    """
    try:
        text = read_text(expanded(path), most=4 * MAX_SOURCE)  # bytes; a character has up to four
    except OSError as error:
        raise UserError(
            f"data.template: {path}: cannot be read ({error.strerror}); a file with a Jinja "
            "template would work, such as a run's assets/chat_template.jinja"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"data.template: {path}: byte {error.start} is not UTF-8 text") from None
    if not text.strip():
        raise UserError(f"data.template: {path}: is empty; a Jinja template would work")
    try:
        compile_template(text)
    except UserError as error:
        reason = str(error).removeprefix("the tokenizer's chat template ")
        raise UserError(f"data.template: {path}: {reason}") from None
    return text
