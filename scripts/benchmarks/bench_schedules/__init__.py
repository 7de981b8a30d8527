"""Schedules beside each other: `python -m scripts.benchmarks.bench_schedules TABLE`."""
