"""Data: from files of records to packed rows of token ids."""

from data import errors

errors.install_signal_hooks()
