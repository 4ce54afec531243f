"""Replace what a run has at its edges: Ray by calls in this process, GPUs by a ledger, models by stand-ins.

controller, WorkerGroup, PolicyWorker, VllmEngineActor, ...   the real ones
Ray                                                           local_ray: every call is made at once
vLLM, the training engine, the sender of weights              gpus: no computation, memory in a ledger
"""
