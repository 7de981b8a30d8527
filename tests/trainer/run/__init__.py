"""Tests of trainer/run."""
