"""A diffusers pipeline as a trainable velocity function."""
