"""Data: from files of records to packed rows of token ids."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the Python that was called may be older than ours
    # Every command imports this package first; the next one has syntax that older Pythons lack.
    found = ".".join(map(str, sys.version_info[:3]))
    sys.stderr.write(
        f"error: Python 3.11 or newer is needed, and {sys.executable} is {found}; . "
        ".venv/bin/activate uses the environment that make install PYTHON=python3.12 creates\n"
    )
    sys.exit(2)

from data import errors

errors.install_signal_hooks()
