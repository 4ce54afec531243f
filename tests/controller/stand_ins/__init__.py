"""What a run has at its edges, replaced: Ray by calls in this process, GPUs by a ledger, models by the calls
they get.

controller, WorkerGroup, PolicyWorker, VllmEngineActor, ...     the real ones Ray
local_ray: every call is made at once vLLM, the training engine, the sender of weights              gpus: they
compute nothing, and own memory in a ledger
"""
