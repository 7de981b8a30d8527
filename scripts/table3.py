"""Runs `python -m scripts.benchmarks.table3` under its old name, `python -m scripts.table3`."""
import runpy

if __name__ == "__main__":
    runpy.run_module("scripts.benchmarks.table3", run_name="__main__", alter_sys=True)
