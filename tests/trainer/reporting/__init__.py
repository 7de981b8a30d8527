"""Tests of trainer/reporting."""
