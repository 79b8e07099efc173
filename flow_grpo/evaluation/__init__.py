"""Held-out images: generated, measured and compared."""
