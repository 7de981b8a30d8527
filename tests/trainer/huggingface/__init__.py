"""Tests of trainer/huggingface."""
