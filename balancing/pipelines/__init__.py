"""Plan a mini-batch for pipeline stages: how many micro-steps, how heavy each, and in which order.

`pipeline` defines each stage's order of passes. `pipeline_time` simulates it, and `pipeline_plan` searches.
"""
