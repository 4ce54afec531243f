"""The driver's half of generation: routing of requests to engines, and replacement of lost engines.

    requests --engine_pool: EnginePool--> actors of `workers.rollout` --> light results, token blocks
                     |                |
      router: assigns requests      fleet: states of engines         decisions, without I/O or Ray
                                elasticity: engines of a range

Read `engine_pool` first. `controller.rollout` makes the requests and puts the results together.
"""
