"""Tests of eval_room."""
