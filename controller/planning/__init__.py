"""Assign sequences to ranks: `planner` plans, `cost_model_fitting` fits its costs to measured times."""
