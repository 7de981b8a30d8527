"""Trajectories: from episodes of a simulator to rows of tokens."""
