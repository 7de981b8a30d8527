"""Thin commands over the product: python -m scripts.NAME."""
from data import errors

errors.one_line_for_ctrl_c()
