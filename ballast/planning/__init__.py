"""The command `layout`, which predicts speed before GPUs are rented. See docs/planning-a-run.md."""
