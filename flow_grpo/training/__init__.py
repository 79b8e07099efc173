"""The parts of a training step."""
