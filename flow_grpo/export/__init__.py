"""Trained weights for others, with a model card."""
