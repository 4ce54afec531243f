"""New weights from the training engine to vLLM: whole or as changes, by shared memory or between GPUs."""
