"""Weights on disk: loading, checkpoints, export as a Hugging Face folder, adapters."""
