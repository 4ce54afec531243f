"""Batches: `DataProto` where tokens are, `RemoteBatch` on the driver, and how calls of workers split them.

`metrics` are reduced over micro-batches and ranks. `score` is the reward of a sample.
"""
