"""Checks before a run. One file per topic: each measures, judges what it measured, and words the result."""
