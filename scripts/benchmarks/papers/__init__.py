"""The papers' numbers beside the cost model's: `python -m scripts.benchmarks.papers`."""
