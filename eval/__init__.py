"""Evaluation of a model's use of long contexts: line retrieval and its report."""
from data import errors

errors.install_ctrl_c_hook()
