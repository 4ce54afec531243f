"""Mixtures of experts: expert parallelism, router losses, router replay."""
