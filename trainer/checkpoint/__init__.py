"""Checkpoints: saving, verifying and restoring arrays and assets."""
