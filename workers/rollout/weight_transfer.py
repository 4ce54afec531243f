"""`workers.engine.weights.weight_transfer`, under the name that installations of version 0.3 look for."""

from workers.engine.weights.weight_transfer import register

__all__ = ["register"]
