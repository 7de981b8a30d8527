"""Runs `python -m scripts.inspect_data` under its old name, `python -m data.inspect`."""
import runpy

if __name__ == "__main__":
    runpy.run_module("scripts.inspect_data", run_name="__main__", alter_sys=True)
