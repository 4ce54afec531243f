"""Which rank computes which sequence when: `planner` plans, `cost_model_fitting` fits its costs to measured times."""
