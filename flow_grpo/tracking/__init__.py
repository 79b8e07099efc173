"""Console, metrics, plots and outside tracking services."""
