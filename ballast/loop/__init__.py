"""The calls of a training loop, for a loop that a user writes: `ballast.open`. See docs/primitives.md."""
