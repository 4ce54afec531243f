"""Decisions of the algorithm, without I/O: advantages, the check of log-probs, validation metrics."""
