"""Thin commands over the product: python -m scripts.NAME."""

from data import errors

errors.install_ctrl_c_hook()
