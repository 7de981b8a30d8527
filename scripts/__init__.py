"""The project's commands: python -m scripts.NAME."""

from data import errors

errors.install_signal_hooks()
