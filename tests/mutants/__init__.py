"""Puts plausible faults into important files, one at a time: do the tests that CI runs for them
fail?"""
