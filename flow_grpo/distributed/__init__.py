"""Processes that share a run: starting them, ending them, communication, sharded weights."""
