"""Rules for scraped web chats: HTML becomes markdown, a service's error ends a conversation."""

import re
from typing import Literal

from data import html
from data.conversation import Message
from data.reasons import BAD_HTML, CUT_AT_RATE_LIMIT, FROM_HTML, RATE_LIMITED, Drop

# Replies that are a service's messages, not the model's; from real dumps.
_BUSY = re.compile(
    r"!?\s*(?:too many requests in 1 hour|network error"
    r"|(?:chatgpt|the (?:model|server)) is (?:at capacity|overloaded)"
    r"|something went wrong|an error occurred\. (?:either|if)"
    r"|there was an error generating a response"
    r"|only one message at a time|our systems are a bit busy"
    r"|you['’]ve reached (?:the|our) (?:current )?(?:usage|rate)"
    r"|the server (?:experienced|had) an error|error in (?:body|message) stream"
    r"|rate limit (?:reached|exceeded))",
    re.IGNORECASE,
)
_BUSY_MAX_LENGTH = 400  # characters; a longer reply that begins like this is *about* such a message


def from_html(content: str, which: Literal["detect", "always", "never"], changes: set[str]) -> str:
    """Returns a turn's text, as markdown if it is HTML of the kind `which`.

    Raises:
      Drop: the HTML cannot be read.
    """
    if which == "never" or not (
        html.has_tags(content) if which == "always" else html.is_page(content)
    ):
        return content
    try:
        markdown = html.to_markdown(content)
    except ValueError:
        raise Drop(BAD_HTML) from None
    changes.add(FROM_HTML)
    return markdown


def before_rate_limit(messages: list[Message], changes: set[str]) -> list[Message]:
    """Returns the turns up to the last answer before a service's error message.

    Raises:
      Drop: there is no answer before it.
    """
    for index, message in enumerate(messages):
        if (
            message.role == "assistant"
            and len(message.content) <= _BUSY_MAX_LENGTH
            and _BUSY.match(message.content)
        ):
            changes.add(CUT_AT_RATE_LIMIT)
            answers = [number for number in range(index) if messages[number].role == "assistant"]
            if not answers:
                raise Drop(RATE_LIMITED)
            return messages[: answers[-1] + 1]
    return messages
