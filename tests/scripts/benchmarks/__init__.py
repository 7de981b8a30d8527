"""Tests of scripts/benchmarks."""
