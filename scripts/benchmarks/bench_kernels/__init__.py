"""Attention kernels beside other libraries': `python -m scripts.benchmarks.bench_kernels`."""
