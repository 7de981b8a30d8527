"""How the stack of decoder layers runs: one runner for each way to save memory or time."""
