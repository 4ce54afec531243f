"""What the gateway adds to vLLM's own route of chats, as ratios within one run on a CPU.

    python -m tests.benchmarks.gateway [--repeats 5] [--output docs/gateway-benchmark.md]               or make bench

Three ways take turns: vLLM's application over the engine, the same over an engine that gives log-probs which
nobody reads, and the gateway, which keeps ids, log-probs and versions of each turn. All sample the same
texts. Times are the least of the repeats, by call: by the clock, in CPU time of the actor, and of its event
loop, which serves HTTP.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import ray

from tests.benchmarks.command import read_options, write_page
from tests.workers.rollout import agent_model
from tests.workers.rollout.gateway_actor import GatewayActor
from workers.config.roles import ModelConfig, RolloutConfig
from workers.engine.requests import turn_seed

HEADER = """# Gateway benchmark

Written by `python -m tests.benchmarks.gateway`: [agents'](agents.md) requests to a tiny model on CPU, in milliseconds a
call, the least of the repeats. Each case is measured by the clock, in CPU time of the engine's process, and in that of
its event loop, which serves HTTP. All ways sample the same texts. Training needs log-probs, which vLLM's own route does
not ask for. The next column is the same route over an engine that gives them, without their JSON. Read the ratios,
because absolute times drift with the machine.

| case | measure | vLLM's route | with log-probs | gateway | over vLLM's route | over that with log-probs |
| --- | --- | --- | --- | --- | --- | --- |
"""
GOALS = """
Goals: at most 1 ms a call at one token, and at most 10 % at 48 tokens and 16 sessions. Log-probs are vLLM's own work,
in its sampler and for each token in its event loop. Two runs on a quiet machine differ by up to a fifth.
"""
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
}
MESSAGES = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What is 3 plus 5?"}],
}
CASES: dict[
    str, tuple[int, int, int, dict[str, Any]]
] = {  # sessions, calls, tokens, options
    "1 token, 1 session": (1, 60, 1, {}),
    "1 token, 1 session, tools": (1, 60, 1, TOOLS),
    "48 tokens, 16 sessions": (16, 64, 48, {}),
    "48 tokens, 16 sessions, tools": (16, 64, 48, TOOLS),
    "48 tokens, 16 sessions, stream": (16, 64, 48, {"stream": True}),
    "48 tokens, 16 sessions, tools, stream": (16, 64, 48, TOOLS | {"stream": True}),
}
LOG_PROBS = "log_probs"  # asks the engine for them, without the route's knowledge
WAYS: dict[str, dict[str, Any]] = {
    "vLLM": {},
    "with log-probs": {"vllm_xargs": {LOG_PROBS: 1}},
    "gateway": {},
}
MEASURES = ("clock", "CPU", "event loop")


class MeasuredActor(GatewayActor):
    async def serve_plain(self) -> str:
        """Serve vLLM's own application, with the parsers that the gateway finds."""
        from workers.agents.routes import application
        from workers.episodes.parsing import TurnParser

        generate = self.engine.generate

        def with_log_probs(
            prompt: Any, parameters: Any, *more: Any, **named: Any
        ) -> AsyncIterator[Any]:
            if LOG_PROBS in (parameters.extra_args or {}):
                parameters.logprobs, parameters.flat_logprobs = 0, True
            return generate(prompt, parameters, *more, **named)

        self.engine.generate = with_log_probs  # type: ignore[method-assign, assignment]
        tokenizer = await asyncio.to_thread(self._load_tokenizer)
        app = await application(
            self.engine, self.model.path, *TurnParser(tokenizer, "", "", {}).names
        )
        self.plain = type(self.gateway)(self.engine, self.model, self.config)
        await self.plain.listen(app)
        return self.plain.url

    async def spent(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()


class Bench:
    def __init__(self, folder: Path) -> None:
        remote = ray.remote(MeasuredActor).options(num_cpus=1, max_concurrency=100).remote
        rollout = RolloutConfig(threads=1, cpu_kv_cache_gib=0.125)
        settings = {
            "index": 0,
            "placement": "shared_memory",
            "max_model_tokens": 1024,
            "seed": 0,
        }
        self.actor = remote(
            ModelConfig(path=str(agent_model.save(folder / "model"))), rollout, **settings
        )
        for method in ("start", "serve", "serve_plain"):
            self.url = self.call(method)
        self.rounds = 0

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*arguments, **named))

    async def measure(
        self, way: str, sessions: int, calls: int, tokens: int, options: dict[str, Any]
    ) -> list[float]:
        """Milliseconds a call, by MEASURES."""
        self.rounds += 1
        limits, urls = (
            {"max_new_tokens": tokens, "min_new_tokens": tokens, "max_turns": 10_000},
            [self.url + "/v1"],
        )
        keys, body = ["none"], MESSAGES | {"max_tokens": tokens} | WAYS[way] | options
        if way == "gateway":
            found = [
                self.call("open", f"{self.rounds}.{number}", **limits)
                for number in range(sessions)
            ]
            urls, keys = [each.base_url for each in found], [each.key for each in found]
        else:
            body["min_tokens"] = tokens
        turns = asyncio.Semaphore(sessions)
        async with httpx.AsyncClient(timeout=60) as client:

            async def post(number: int) -> None:
                place = number % len(urls)
                async with turns:
                    one, key = (
                        body | {"user": str(number)},
                        {"authorization": f"Bearer {keys[place]}"},
                    )
                    if way != "gateway":
                        # So all ways sample the same texts.
                        one["seed"] = turn_seed(7, number // sessions)
                    answer = await client.post(
                        f"{urls[place]}/chat/completions", json=one, headers=key
                    )
                    assert answer.status_code == 200, answer.text

            await post(-1)
            before = self.call("spent")
            await asyncio.gather(*[post(number) for number in range(calls)])
            after = self.call("spent")
        return [
            1000 * (end - begin) / calls for begin, end in zip(before, after, strict=True)
        ]


async def rows(bench: Bench, repeats: int) -> list[str]:
    found = []
    for case, settings in CASES.items():
        times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way, taken in times.items():
                taken.append(await bench.measure(way, *settings))
        for place, measure in enumerate(MEASURES):
            plain, probed, ours = (
                min(each[place] for each in taken) for taken in times.values()
            )
            columns = [
                f"{value:.2f}"
                for value in (plain, probed, ours, ours / plain, ours / probed)
            ]
            found.append(f"| {case} | {measure} | {' | '.join(columns)} |")
            print(found[-1], flush=True)
    return found


def main() -> None:
    arguments = read_options(__doc__, repeats=5, output=None)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        table = asyncio.run(rows(Bench(Path(folder)), arguments.repeats))
    ray.shutdown()
    write_page(arguments.output, HEADER + "\n".join(table) + "\n" + GOALS)


if __name__ == "__main__":
    main()
