"""Measure a training engine's peak memory without a GPU: the real engine on tensors without data."""
