"""Tests of generated texts."""
