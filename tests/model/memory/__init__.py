"""Tests of model/memory."""
