"""Fixtures, fakes and functions that several test files use."""
