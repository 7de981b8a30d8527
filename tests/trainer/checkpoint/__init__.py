"""Tests of trainer/checkpoint."""
