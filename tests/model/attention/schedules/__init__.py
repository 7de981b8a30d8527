"""Tests of model/attention/schedules."""
