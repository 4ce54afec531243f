"""vLLM's Triton kernels on a CPU, by Triton's interpreter. Import it before any other of vLLM.

vLLM for CPUs replaces Triton by a stand-in whose kernels cannot run. Kernels that are compiled C++ there run as
they are: `fused_add_rms_norm`, `rotary_embedding` and `silu_and_mul`. The interpreter multiplies bfloat16
wrongly, so tensors are float32.
"""

import os
from importlib import import_module

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_BATCH_INVARIANT"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import triton
import triton.language
import vllm.triton_utils

vllm.triton_utils.triton = triton
vllm.triton_utils.tl = triton.language
vllm.triton_utils.HAS_TRITON = True

PROGRAMS = 3
"""Of the persistent product: fewer than its tiles, so that one program computes several."""
kernels = import_module("vllm.model_executor.determinism.batch_invariant")
kernels.num_compute_units = lambda *_: PROGRAMS
