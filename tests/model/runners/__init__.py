"""Tests of model/runners."""
