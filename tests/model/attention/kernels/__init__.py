"""Tests of model/attention/kernels."""
