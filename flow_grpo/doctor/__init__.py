"""Checks before a run. One file per topic: functions that measure, then functions that evaluate what was measured."""
