"""Thin commands over the product: python -m scripts.NAME."""
