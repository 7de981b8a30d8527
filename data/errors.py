"""Errors a user can mend: every entry point shows their message without a traceback."""


class UserError(Exception):
    """Something the user gave is wrong; the message says what was found, where, and what would be right."""
