"""Scenes of coloured shapes: their prompts, a detector without a model, and the rewards `shapes`, `shapes_exact` and `shapes_edit`."""
