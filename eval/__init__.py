"""What the model can do now: line retrieval and its report."""
from data import errors

errors.install_ctrl_c_hook()
