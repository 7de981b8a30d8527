"""Tests of trainer/config."""
