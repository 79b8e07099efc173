"""Several configs on one budget."""
