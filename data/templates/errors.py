"""Errors of conversations that do not fit their template."""

from data.errors import UserError


class TemplateError(UserError):
    """A conversation does not fit a template, such as one with a tool turn; `prepare` drops it."""
