"""The driver's half of generation: which engine answers which request, and what happens when one is lost.

    requests --rounds: Rollouts--> engines: actors of `workers.rollout` --> light results, references of token blocks
                     |                |
      router: who takes what        fleet: who may be asked          both decide only; no I/O, no Ray

Read `rounds` first. A step's requests are made in `controller.collector`, what came back is put together in
`controller.samples`.
"""
