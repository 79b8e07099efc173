"""Prompts and images on disk."""
