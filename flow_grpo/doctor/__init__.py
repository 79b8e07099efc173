"""Checks before a run. Each file measures and judges one topic."""
