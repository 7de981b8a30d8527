"""How every command ends, in one line, where there is nothing to mend in the program: by an error that its user can mend, by
Ctrl-C."""
import os
import signal
import sys


class UserError(Exception):
    """Something the user gave is wrong; the message says what was found, where, and what would be right."""


def one_line_for_ctrl_c() -> None:
    """Ctrl-C that nobody catches, as while a command imports, is `stopped` and 130. The packages of commands call it first; it
    does nothing but for `python -m`, which has not put the command's name in sys.argv by then."""
    if sys.argv[:1] == ["-m"]:
        sys.excepthook = _unhandled


def _unhandled(kind: type[BaseException], error: BaseException, traceback) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    print("stopped", file=sys.stderr)
    sys.stdout.flush()
    os._exit(128 + signal.SIGINT)
