"""How it is learned: configuration, mesh, step, optimizer, checkpoints, metrics, loop."""
