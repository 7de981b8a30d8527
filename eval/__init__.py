"""Evaluation of long contexts: retrieval tests, lm-eval's tasks, in-context RL, reports."""

from data import errors

errors.install_signal_hooks()
