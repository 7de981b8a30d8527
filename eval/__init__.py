"""What the model can do now: line retrieval and its report."""
from data import errors

errors.one_line_for_ctrl_c()
