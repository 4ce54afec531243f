"""Predict seconds of a training step before a GPU is rented.

config.json --> ModelShape --+
Layout, Workload ------------+--> step_time --> StepTime: seconds by phase, step, idle shares, limit
Machine, Efficiency ---------+
"""

from balancing.time_model.inputs import Layout, ModelShape, Workload
from balancing.time_model.machine import MACHINES, Efficiency, Machine, machine_named
from balancing.time_model.step_time import Interval, StepTime, step_time

__all__ = [
    "MACHINES",
    "Efficiency",
    "Interval",
    "Layout",
    "Machine",
    "ModelShape",
    "StepTime",
    "Workload",
    "machine_named",
    "step_time",
]
