"""Turns saved as web pages, as scrapes of chats hold them, back to the markdown that they were shown from."""

import re
import warnings
from functools import lru_cache

# The wrapper that the chat's own page put around an answer, or a turn that opens with a block of prose and closes one.
# What is merely *about* HTML (a page in a code fence, an answer that is an HTML file) stays as it was written.
_PAGE = re.compile(
    r"""<div\b[^>]*\bclass=["'][^"']*\b(?:markdown|prose|whitespace-pre-wrap)\b
    |   <(?P<tag>p|[ou]l|h[1-6]|pre|blockquote|table)\b[^>]*>.*</(?:p|[ou]l|h[1-6]|pre|blockquote|table|div)>\s*\Z""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|&(?:[a-zA-Z]+|#\d+);")
# What the page's buttons leave in its text: "2 / 3" between answers, "Copy1234 chars / 56 words".
_BUTTONS = re.compile(r"\A\d+ / \d+\s*\n|Copy\d+ chars / \d+ words")


def is_page(text: str) -> bool:
    """Whether a turn (without white space at its ends) is HTML as a whole; markdown that holds some HTML is not."""
    return text.startswith("<") and "```" not in text and _PAGE.match(text) is not None


def has_tags(text: str) -> bool:
    """Whether there is any tag or character entity in the text."""
    return _TAG.search(text) is not None


def to_markdown(text: str) -> str:
    """The markdown of a page, by `markdownify`: code fenced with its language, formulas as `$tex$`, buttons left out.

    Raises ValueError for what its parser refuses, or tags in tags in tags beyond Python's recursion.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its parser's advice is to programmers: "this looks like XML", "like a URL"
            markdown = _converter().convert(text)
    except (RecursionError, AssertionError, ValueError) as error:
        raise ValueError(f"HTML that cannot be read ({type(error).__name__})") from None
    return _BUTTONS.sub("", markdown.strip()).strip()


@lru_cache(maxsize=1)
def _converter():
    from markdownify import MarkdownConverter

    class Converter(MarkdownConverter):
        """Chats' pages: a code block is <pre> of a bar (language, button "Copy code") and <code class="language-x">."""

        def convert_button(self, element, text, parent_tags):
            return ""

        def convert_pre(self, element, text, parent_tags):
            code = element.find("code") or element
            language = next((name[9:] for name in code.get("class", []) if name.startswith("language-")), "")
            return f"\n\n```{language}\n{code.get_text().strip(chr(10))}\n```\n\n"

        def convert_span(self, element, text, parent_tags):
            # KaTeX writes a formula three times over; its own source is the one to learn.
            if "katex" not in element.get("class", []):
                return text
            source = element.find("annotation")
            return f"${source.get_text()}$" if source else text

    # Underscores and stars are text to a model, not markup to guard against.
    return Converter(
        heading_style="ATX", bullets="-", escape_asterisks=False, escape_underscores=False, escape_misc=False
    )
