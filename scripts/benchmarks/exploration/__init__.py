"""In-context reinforcement learning on exploration: `python -m scripts.benchmarks.exploration`."""
