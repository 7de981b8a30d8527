"""Training: configuration, mesh, step, optimizer, checkpoints, metrics, loop."""
