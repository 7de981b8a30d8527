"""What is wrong with a conversation, for the template that it is to be written in."""

from data.errors import UserError


class TemplateError(UserError):
    """A conversation does not fit a template, such as one with a tool turn; `prepare` drops it."""
