"""How far two computations of the same log-probs may differ by rounding: one rule for parity, runs and the doctor.

It imports nothing, so that the driver may read it.
"""

TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "bfloat16": 5e-2}
"""Mean difference of a token's log-prob, nats, by the type that both sides compute in.

float32: exact models reach 1e-6 within one process and 3e-5 between engine and trainer; the smallest error ever met
here, a factor on logits, gave 0.1. bfloat16 keeps 8 bits: logits of 10 to 30 are rounded by 0.02 to 0.1, either way.
"""
