"""An actor whose engine can be broken. Nothing else is imported, as in any rollout actor: see `engine_thread`."""

from workers.rollout.worker import RolloutWorker


class Breakable(RolloutWorker):
    """An engine, a thread of this actor, whose next step but `steps` raises."""

    async def break_after(self, steps: int) -> None:
        core = self.engine.engine_core._core  # type: ignore[attr-defined]
        step, left = core.step_fn, iter(range(steps))

        def step_or_break():
            if next(left, None) is None:
                raise RuntimeError("out of luck")
            return step()

        core.step_fn = step_or_break
