"""Runs `python -m scripts.plan`, which compares schedules with --hardware or --compare, under an old name of it."""
import runpy

if __name__ == "__main__":
    runpy.run_module("scripts.plan", run_name="__main__", alter_sys=True)
