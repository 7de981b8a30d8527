"""What is learned from: sources, templates, tokenizers, packing, loader."""
