"""What is learned from: sources, templates, tokenizers, packing, loader."""
from data import errors

errors.one_line_for_ctrl_c()
