"""Mixtures of experts: expert parallelism, adapters, router losses, router replay."""
