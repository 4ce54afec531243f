"""Models of the tests."""

from balancing.cost_model import SEVEN_BILLION
from balancing.time_model import ModelShape

SHAPE = ModelShape.from_model_config(SEVEN_BILLION)
