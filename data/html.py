"""Converts turns saved as HTML by scrapers back to the displayed markdown."""

import re
import warnings
from functools import lru_cache

# The <div> that wraps an answer on a chat's web page, or a turn that begins and ends with block
# elements of prose. A turn *about* HTML (a page in a code fence, an HTML file as answer) does not
# match and is left unchanged.
_PAGE = re.compile(
    r"""<div\b[^>]*\bclass=["'][^"']*\b(?:markdown|prose|whitespace-pre-wrap)\b
    |   <(?P<tag>p|[ou]l|h[1-6]|pre|blockquote|table)\b[^>]*>.*
        </(?:p|[ou]l|h[1-6]|pre|blockquote|table|div)>\s*\Z""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|&(?:[a-zA-Z]+|#\d+);")
# Labels of the page's buttons: "2 / 3" to choose between answers, "Copy1234 chars / 56 words".
_BUTTONS = re.compile(r"\A\d+ / \d+\s*\n|Copy\d+ chars / \d+ words")


def is_page(text: str) -> bool:
    """Returns whether a stripped turn is entirely HTML, not markdown with some HTML in it."""
    return text.startswith("<") and "```" not in text and _PAGE.match(text) is not None


def has_tags(text: str) -> bool:
    """Returns whether the text contains any tag or character entity."""
    return _TAG.search(text) is not None


def to_markdown(text: str) -> str:
    """Converts HTML to markdown: code in fences, formulas as `$tex$`, without the page's buttons.

    Raises:
      ValueError: the parser refuses the HTML, or its nesting exceeds Python's recursion limit.
    """
    try:
        with warnings.catch_warnings():
            # The parser warns programmers: "looks like XML", "looks like a URL".
            warnings.simplefilter("ignore")
            markdown = _converter().convert(text)
    except (RecursionError, AssertionError, ValueError) as error:
        raise ValueError(f"HTML that cannot be read ({type(error).__name__})") from None
    return _BUTTONS.sub("", markdown.strip()).strip()


@lru_cache(maxsize=1)
def _converter():
    from markdownify import MarkdownConverter

    class Converter(MarkdownConverter):
        """Converts pages of chats, with code as a <pre> of a title, <code class="language-x">."""

        def convert_button(self, element, text: str, parent_tags) -> str:
            return ""

        def convert_pre(self, element, text: str, parent_tags) -> str:
            code = element.find("code") or element
            language = next(
                (name[9:] for name in code.get("class", []) if name.startswith("language-")), ""
            )
            return f"\n\n```{language}\n{code.get_text().strip(chr(10))}\n```\n\n"

        def convert_span(self, element, text: str, parent_tags) -> str:
            # KaTeX writes each formula three times; the <annotation> holds its TeX source.
            if "katex" not in element.get("class", []):
                return text
            tex = element.find("annotation")
            return f"${tex.get_text()}$" if tex else text

    # Underscores and asterisks stay unescaped: a model reads the text, not a markdown parser.
    return Converter(
        heading_style="ATX",
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        escape_misc=False,
    )
