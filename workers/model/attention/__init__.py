"""Attention over packed rows: kernels, shared prefixes, sinks, and ranks that share sequences."""
