"""The driver's half of generation: routing of requests to engines, and replacement of lost engines.

    requests --rounds: Rollouts--> engines: actors of `workers.rollout` --> light results, references of token blocks
                     |                |
      router: assigns requests      fleet: states of engines         both decide only; no I/O, no Ray

Read `rounds` first. A step's requests are made in `controller.collector`, what came back is put together in
`controller.samples`.
"""
