"""Runs `python -m scripts.benchmarks.bench_kernels` under its old name, `python -m scripts.bench_kernels`."""
import runpy

if __name__ == "__main__":
    runpy.run_module("scripts.benchmarks.bench_kernels", run_name="__main__", alter_sys=True)
