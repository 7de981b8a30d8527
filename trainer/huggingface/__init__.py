"""Hugging Face folders: reading and writing models in the format of `transformers`."""
