"""Tests of planning/compiled."""
