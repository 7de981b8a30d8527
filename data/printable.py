"""Text that is not ours, as a terminal may be given it."""
import unicodedata

# Marks that reorder the text around them, with which a line can be made to read as another; and ends of lines that are not \n.
_REORDERING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_REPLACED = frozenset(_REORDERING + "\u2028\u2029")


def printable(text: str) -> str:
    """Returns a text with U+FFFD in place of every character that a terminal would obey rather than show.

    These are control characters other than line ends and tabs (escape sequences begin with one), marks that change the
    direction of writing, and halves of surrogate pairs, which cannot be written at all. Everything that is printed and is not
    ours goes through this function: data, names of files and fields, a hub's messages, what another process says.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        "\ufffd" if character in _REPLACED or (character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs"))
        else character
        for character in text
    )
