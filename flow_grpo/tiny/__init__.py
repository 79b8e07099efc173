"""The embedded models: their world, architecture, recipe and weights."""
