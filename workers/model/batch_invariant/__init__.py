"""Compute a dense Qwen3 by the batch-invariant kernels of the engine, so that both give the same bits.

    model.batch_invariant: true
        engine   VLLM_BATCH_INVARIANT=1, Triton attention, no compiled layers      workers.engine
        trainer  modules' forward passes --> operators --> kernels of vLLM, borrowed by name

    kernels     functions of the installed vLLM, and what they are called with
    operators   matrix product, norms, gate, rotation: forward by vLLM, backward by ordinary kernels
    paged_row   attention of a packed row, whose keys lie in blocks as in an engine
    qwen3       which module of transformers computes what
    log_probs   log-probs of targets by the kernels of vLLM's sampler

The folder can be removed as a whole. It imports vLLM only when a kernel is called.
"""
