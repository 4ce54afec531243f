"""Commands that sample without training: `evaluate` and `generate`. See docs/evaluate.md."""
