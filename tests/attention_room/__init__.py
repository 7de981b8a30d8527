"""Tests of model/attention."""
