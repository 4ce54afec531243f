"""Commands that predict speed before GPUs are rented: `layout` and `whatif`. See docs/planning-a-run.md."""
