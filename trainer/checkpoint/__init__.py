"""Checkpoints: saving, verifying and restoring a run's arrays and assets."""
