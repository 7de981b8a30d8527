"""Tests of planning/costs."""
