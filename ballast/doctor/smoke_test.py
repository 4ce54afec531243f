"""Smoke tests with a run's own code: a timed all-reduce, and two steps with one engine and one rank.

all_reduce         a bundle per rank --WorkerGroup--> process group --> median seconds, and the sum
train_two_steps    sample, compare log-probs, update --new weights--> sample, compare log-probs
                   (`controller.fit`)
"""

import json
import string
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

import rich.console
import torch
import torch.distributed as dist

from ballast.doctor.report import Finding, Report, fail, ok, warn
from controller.actors.layout import Pool
from controller.actors.resources import reserve
from controller.actors.worker_group import Share, WorkerGroup
from controller.config import Config, load
from controller.fit import read_inputs, training
from controller.observability.console import Console
from controller.step import step
from controller.training_loop import train
from workers.batch.dispatch import Split, dispatch
from workers.roles.base import Worker

REDUCED_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
REPEATS = 5
SLOW_GB_PER_S = 5.0  # bytes of an all-reduce over GPUs
# Vocabulary of the tiny model.
TOKENS = ("<pad>", "<eos>", "<unk>", *string.ascii_letters, *string.digits)
SETTINGS = (
    *("run.name=doctor", "run.steps=2", "run.checkpoint_every=0", "run.max_restarts=0"),
    *("tracking.tensorboard=false", "tracking.timeline=false"),
    *(
        "batch.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "reward.workers=1",
        "rollout.replicas=1",
    ),
    *(
        "data.max_prompt_tokens=64",
        "rollout.sampling.max_new_tokens=32",
        "policy.max_tokens_per_micro_batch=2048",
    ),
    "policy.optimizer.learning_rate=1e-3",  # large enough to change every log-prob in a step
)
ENGINE = {
    "cpu": ("rollout.cpu_kv_cache_gib=0.125",),
    "cuda": ("rollout.gpu_memory_utilization=0.3", "rollout.enforce_eager=true"),
}
REWARD = """\
import zlib


def reward(response):
    return float(zlib.crc32(response.encode()) % 2)
"""


class LinkWorker(Worker):
    """A rank without a model."""

    @dispatch(Split.ALL)
    def time_all_reduce(self, byte_count: int, repeats: int) -> tuple[float, float]:
        """Return (median seconds of an all-reduce, largest sum of a tensor of ones)."""
        durations = []
        largest = 0.0
        for _ in range(1 + repeats):
            numbers = torch.ones(byte_count // 4, device=self.device)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(numbers)
            # On a GPU this waits for the result.
            largest = max(largest, float(numbers.max()))
            durations.append(time.perf_counter() - start)
        return median(durations[1:]), largest


def all_reduce(config: Config, nodes: int, gpus: int) -> Finding:
    """Time an all-reduce over all GPUs, or on CPUs over one rank per node and at least two. Raises as
    WorkerGroup.
    """
    ranks = gpus if config.uses_gpus else max(2, nodes)
    if ranks == 1:
        return ok("all-reduce", "one GPU, no other rank")
    resources = config.resources
    share = Share(config.resources.cpus_per_worker, float(config.uses_gpus))
    bundle = {"CPU": share.cpus} | ({"GPU": share.gpus} if share.gpus else {})
    with ExitStack() as stack:
        bundles = reserve(
            Pool("doctor", (bundle,) * ranks, "SPREAD"), resources.placement_timeout_s
        )
        stack.callback(bundles.release)
        group = WorkerGroup(
            "link",
            LinkWorker,
            bundles,
            share,
            dp=ranks,
            arguments={"device": config.device, "threads": 1},
            timeout_s=resources.start_timeout_s,
            collective_timeout_s=resources.collective_timeout_s,
        )
        stack.callback(group.stop)
        calls = group.time_all_reduce.remote(REDUCED_BYTES[config.device], REPEATS)
        return judge_all_reduce(calls.result(resources.collective_timeout_s), config.device)


def judge_all_reduce(measured: list[tuple[float, float]], device: str) -> Finding:
    """Report the slowest rank's rate, or a wrong sum. Each of n ranks sends and receives 2 (n - 1) / n of its
    bytes.
    """
    ranks = len(measured)
    size = REDUCED_BYTES[device]
    for rank, (_, total) in enumerate(measured):
        if total != ranks:
            text = f"rank {rank} got {total:g} where {ranks} ones add up to {ranks}"
            return fail(
                "all-reduce",
                text,
                "the network or a GPU corrupts data. Test the node of that rank",
            )
    seconds = max(seconds for seconds, _ in measured)
    rate = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    backend = "nccl" if device == "cuda" else "gloo"
    text = (
        f"{size / 2**20:.0f} MiB over {ranks} ranks by {backend} in "
        f"{seconds * 1e3:.1f} ms, {rate:.2f} GB/s"
    )
    if device == "cuda" and rate < SLOW_GB_PER_S:
        advice = (
            "NCCL takes a slow path: NCCL_DEBUG=INFO says which. See nvidia-smi topo -m and "
            "NCCL_SOCKET_IFNAME"
        )
        return warn("all-reduce", text, advice)
    return ok("all-reduce", text)


def tiny_model(folder: Path) -> str:
    """Save a random Qwen2 with 250,000 parameters and a tokenizer in Hugging Face format."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a megabyte needs no progress bar
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 64, which every attention kernel takes
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.1,  # large enough that an update moves log-probs
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokens = Tokenizer(
        models.WordLevel(
            {token: index for index, token in enumerate(TOKENS)}, unk_token="<unk>"
        )
    )
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    return str(folder)


class _Complete(Exception):  # noqa: N818 - ends the run after its last step, before saving a model
    pass


def settings_for(run_config: Config, model: str, folder: Path) -> Config:
    """Write data and reward into `folder`, and return settings of a run with one rank, one engine and
    `model`.

    Devices, placement and dtype follow `run_config`.
    """
    prompts = [{"prompt": string.ascii_letters[row : row + 16]} for row in range(8)]
    (folder / "train.jsonl").write_text(
        "".join(f"{json.dumps(prompt)}\n" for prompt in prompts)
    )
    (folder / "reward.py").write_text(REWARD)
    files = (
        f"run.dir={folder}",
        f"data.train={folder}/train.jsonl",
        f"reward.function={folder}/reward.py:reward",
    )
    config = load(
        None, [*SETTINGS, *ENGINE[run_config.device], *files, f"model.path={model}"]
    )
    config.resources = run_config.resources
    config.rollout.placement, config.model.dtype = (
        run_config.rollout.placement,
        run_config.model.dtype,
    )
    return config


def train_two_steps(config: Config, report: Report) -> None:
    """Add a finding per step. Raises a run's errors: MismatchError if log-probs differ."""
    steps: list[dict[str, float]] = []

    def keep(number: int, metrics: dict[str, float]) -> None:
        steps.append(dict(metrics))
        if number == config.run.steps:
            raise _Complete

    start = time.monotonic()
    quiet = Console(rich.console.Console(quiet=True))
    with (
        training(config, read_inputs(config, quiet.note), quiet) as run,
        suppress(_Complete),
    ):
        report.add(
            ok(
                "engine and rank",
                f"started in {time.monotonic() - start:.0f} s, {config.rollout_placement}",
            )
        )
        train(run, step, [keep])
    metrics_before, metrics_after = steps
    report.add(ok("log-probs before an update", _difference(metrics_before, config)))
    text = (
        f"{_difference(metrics_after, config)}; weights were sent in "
        f"{metrics_before['time/weights_s']:.2f} s"
    )
    if metrics_before["policy/grad_norm"] > 0:
        report.add(ok("log-probs after it", text))
    else:
        report.add(
            warn(
                "log-probs after it",
                text,
                "the update changed nothing to compare. Take another --model",
            )
        )


def _difference(metrics: dict[str, float], config: Config) -> str:
    mean, largest = (metrics[f"policy/rollout_mismatch_{name}"] for name in ("mean", "max"))
    return (
        f"engine and rank differ by {mean:.1e} nats a token, at most "
        f"{largest:.1e}, in {config.compute_dtype}"
    )
