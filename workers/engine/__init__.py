"""vLLM as Ballast uses it: options and requests in, responses out, and what CPUs and adapters need.

Read `vllm_interface` first. `engine_thread` runs the engine inside the actor `workers.rollout.engine_actor`.
"""
