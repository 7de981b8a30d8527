"""Tests of Longstripe; they mirror the tree."""
