"""Evaluation of long contexts: line retrieval, needles, RULER, co-reference, lm-eval's tasks, in-context reinforcement
learning, and reports."""

from data import errors

errors.install_ctrl_c_hook()
