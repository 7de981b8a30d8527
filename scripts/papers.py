"""Runs `python -m scripts.benchmarks.papers` under its old name, `python -m scripts.papers`."""
import runpy

if __name__ == "__main__":
    runpy.run_module("scripts.benchmarks.papers", run_name="__main__", alter_sys=True)
