"""`python -m data.inspect`, the old name of `python -m scripts.inspect_data`."""
import runpy

if __name__ == "__main__":
    runpy.run_module("scripts.inspect_data", run_name="__main__", alter_sys=True)
