"""Tolerance for two computations of the same log-probs, shared by model loading, runs and the doctor.

This module imports nothing, so the driver can read it.
"""

TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 1e-1}
"""Mean difference of a token's log-prob, nats, by the type that both sides compute in.

float32: exact models reach 1e-6 within one process and 3e-5 between engine and trainer. bfloat16 keeps 8 bits: means of
0.01 to 0.1 are usual, the larger ones for mixtures of experts, where rounding sends a token to another expert.
"""
