"""Ring Attention's Table 3 with our step: `python -m scripts.benchmarks.table3`."""
