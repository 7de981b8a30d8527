"""The project's commands: python -m scripts.NAME."""

from data import errors

errors.install_ctrl_c_hook()
