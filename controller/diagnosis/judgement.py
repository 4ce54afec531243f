"""Judgement of a machine's facts: pure functions, each of which gives one line of the report.

NodeFacts, Expected --node_findings--> versions, driver, GPUs, peer access, IPC, /dev/shm, limits, memory, network, disk
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement

from controller.diagnosis.findings import Finding, fail, ok, warn
from controller.diagnosis.node import GIB, UNLIMITED, NodeFacts
from workers.tolerance import TOLERANCE

DRIVERS = {13: 580, 12: 525, 11: 450}
"""The oldest NVIDIA driver branch that runs builds of a major version of CUDA (NVIDIA, CUDA compatibility)."""
FEW_FILES = 8192  # Ray, vLLM and gloo open some hundreds of files and sockets a process
SMALL_SHM_GIB = 1.0  # NCCL wants some tens of MiB for each GPU, and a container has 64 MiB by default
LITTLE_MEMORY_GIB, NO_MEMORY_GIB = 4.0, 1.0
LITTLE_DISK_GIB = 10.0
OTHERS_SHARE = 0.1  # of a GPU's memory, in other hands


@dataclass(frozen=True)
class Expected:
    """Requirements of a run on a node. requirements: as in pyproject.toml. nodes: of the cluster. object_store_gib: of
    this node, by Ray."""

    device: str
    placement: str
    requirements: tuple[str, ...]
    nodes: int = 1
    object_store_gib: float = 0.0

    @property
    def on_gpus(self) -> bool:
        """Whether models run on GPUs."""
        return self.device == "cuda"


def node_findings(facts: NodeFacts, expected: Expected) -> list[Finding]:
    """Every line about a machine."""
    return [
        packages(facts, expected),
        driver(facts, expected),
        gpus(facts, expected),
        peer_access(facts),
        sharing(facts, expected),
        shared_memory(facts, expected),
        open_files(facts),
        locked_memory(facts),
        memory(facts),
        network(facts, expected),
        *disk(facts),
        *models(facts),
    ]


def packages(facts: NodeFacts, expected: Expected) -> Finding:
    """Installed versions against those asked for; of vLLM one of two builds."""
    wrong, found = [], []
    for requirement in map(Requirement, expected.requirements):
        version = facts.versions.get(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
        else:
            found.append(f"{requirement.name} {version}")
    if wrong:
        wanted = " ".join(f"'{requirement}'" for requirement in expected.requirements)
        return fail("versions", ", ".join(wrong), f"pip install {wanted}")
    return ok("versions", ", ".join(found))


def driver(facts: NodeFacts, expected: Expected) -> Finding:
    """NVIDIA's driver against the CUDA that torch was built with."""
    name, judge = "driver", fail if expected.on_gpus else warn
    if not facts.cuda and not facts.driver:
        text = "no NVIDIA driver, and torch is a CPU build"
        advice = "take a node with GPUs, or set resources.device=cpu"
        return fail(name, text, advice) if expected.on_gpus else ok(name, text)
    if not facts.cuda:
        text = f"NVIDIA driver {facts.driver}, but torch is a CPU build"
        return judge(name, text, "install torch and vllm from the registry (pip install -e .[vllm]) to use the GPUs")
    if not facts.driver:
        text = f"torch is built for CUDA {facts.cuda}, and no NVIDIA driver answers"
        return judge(name, text, "install the driver; start a container with --gpus all")
    major, oldest = int(facts.driver.split(".")[0]), DRIVERS.get(int(facts.cuda.split(".")[0]), 0)
    if major < oldest:
        text = f"NVIDIA driver {facts.driver} is too old for torch's CUDA {facts.cuda}"
        return judge(name, text, f"install driver {oldest} or newer")
    return ok(name, f"NVIDIA {facts.driver}, torch is built for CUDA {facts.cuda}")


def gpus(facts: NodeFacts, expected: Expected) -> Finding:
    """GPUs that torch sees, and whether other processes use them."""
    if not facts.gpus:
        advice = "look at the driver's line, CUDA_VISIBLE_DEVICES and the container's --gpus"
        return fail("GPUs", "torch sees none", advice) if expected.on_gpus else ok("GPUs", "none, models run on CPUs")
    least = min(facts.gpus, key=lambda each: each.free_gib)
    text = f"{len(facts.gpus)} x {facts.gpus[0].name}, {least.free_gib:.1f} of {least.total_gib:.1f} GiB free"
    if least.free_gib < (1 - OTHERS_SHARE) * least.total_gib:
        return warn("GPUs", text, "end the processes that nvidia-smi shows on them")
    return ok("GPUs", text)


def peer_access(facts: NodeFacts) -> Finding:
    """Whether the node's GPUs read each other's memory directly."""
    if len(facts.gpus) < 2:
        return ok("peer access", f"{len(facts.gpus) or 'no'} GPU, nothing to reach")
    if facts.without_peer_access:
        pairs = ", ".join(f"{i}-{j}" for i, j in facts.without_peer_access[:8])
        text = f"GPUs {pairs} do not reach each other ({len(facts.without_peer_access)} pairs)"
        advice = "transfers between them go through host memory; see nvidia-smi topo -m, and switch IOMMU or ACS off"
        return warn("peer access", text, advice)
    return ok("peer access", f"all {len(facts.gpus)} GPUs reach each other")


def sharing(facts: NodeFacts, expected: Expected) -> Finding:
    """CUDA IPC, by which colocated engines take new weights."""
    if not facts.gpus:
        return ok("CUDA IPC", "no GPU, weights travel through host memory")
    if not facts.sharing:
        return ok("CUDA IPC", "another process opened GPU memory of this one")
    judge = fail if expected.placement == "colocated" else warn
    return judge("CUDA IPC", facts.sharing, "start containers with --ipc=host, or set rollout.placement=apart")


def shared_memory(facts: NodeFacts, expected: Expected) -> Finding:
    """/dev/shm, where Ray's object store lies and NCCL's processes meet."""
    name, text = "/dev/shm", f"{facts.shm_gib:.1f} GiB"
    advice = "start containers with --shm-size=16g, on Kubernetes mount an emptyDir of medium Memory there"
    if facts.shm_gib < SMALL_SHM_GIB and len(facts.gpus) > 1:
        return fail(name, text, f"NCCL needs it between GPUs; {advice}")
    if facts.shm_gib < max(SMALL_SHM_GIB, expected.object_store_gib):
        store = f", less than Ray's object store of {expected.object_store_gib:.1f} GiB, which goes to disk instead"
        return warn(name, text + store, advice)
    return ok(name, text)


def open_files(facts: NodeFacts) -> Finding:
    """Soft limit on open files of a process."""
    if facts.open_files != UNLIMITED and facts.open_files < FEW_FILES:
        advice = "raise it where Ray is started: ulimit -n 65536"
        return warn("open files", f"at most {facts.open_files:,} a process", advice)
    limit = "no limit" if facts.open_files == UNLIMITED else f"at most {facts.open_files:,} a process"
    return ok("open files", limit)


def locked_memory(facts: NodeFacts) -> Finding:
    """Limit on locked memory, which network cards read and write."""
    limit = "no limit" if facts.locked_memory == UNLIMITED else f"at most {facts.locked_memory / 2**20:,.0f} MiB"
    if facts.infiniband and facts.locked_memory != UNLIMITED:
        advice = "NCCL over InfiniBand wants none: ulimit -l unlimited, docker run --ulimit memlock=-1"
        return warn("locked memory", limit, advice)
    return ok("locked memory", limit if facts.infiniband else f"{limit}, no InfiniBand needs more")


def memory(facts: NodeFacts) -> Finding:
    """Host memory."""
    text = f"{facts.free_memory_gib:.1f} of {facts.memory_gib:.1f} GiB free, {facts.cpus} CPUs"
    if facts.free_memory_gib < NO_MEMORY_GIB:
        return fail("memory", text, "end other processes, or take a larger machine")
    if facts.free_memory_gib < LITTLE_MEMORY_GIB:
        return warn("memory", text, "Ray, a rank and an engine take about 3 GiB before the model")
    return ok("memory", text)


def network(facts: NodeFacts, expected: Expected) -> Finding:
    """The interface that the node's address is on: the one that ranks should use."""
    text = f"{facts.interface or 'no interface'} carries {facts.address}"
    if not facts.interface:
        advice = "start Ray with --node-ip-address of an interface of this node"
        return fail("network", text, advice)
    if expected.nodes > 1 and facts.address.startswith("127."):
        advice = "other nodes cannot reach it; start Ray with --node-ip-address"
        return fail("network", text, advice)
    return ok("network", text)


def disk(facts: NodeFacts) -> list[Finding]:
    """run.dir, if there is a configuration."""
    if facts.folder:
        advice = "put run.dir, as an absolute path, on storage that every node has"
        return [fail("run.dir", facts.folder, advice)]
    if not facts.free_disk_gib:
        return []
    text = f"{facts.free_disk_gib:,.0f} GiB free"
    if facts.free_disk_gib < LITTLE_DISK_GIB:
        return [warn("run.dir", text, "a checkpoint takes 12 bytes a parameter; free some, or set run.dir")]
    return [ok("run.dir", text)]


def models(facts: NodeFacts) -> list[Finding]:
    """Models that cannot be read on the node."""
    return [
        fail(key, problem, "put it where every node finds it, on shared storage or by `hf download` on each")
        for key, problem in facts.models.items()
    ]


def bandwidth(ranks: int, byte_count: int, seconds: float, device: str) -> Finding:
    """Rate of a timed all-reduce, in which each of n ranks sends and receives 2 (n - 1) / n of its bytes."""
    rate = 2 * (ranks - 1) / ranks * byte_count / seconds / 1e9
    backend = "nccl" if device == "cuda" else "gloo"
    text = f"{byte_count / 2**20:.0f} MiB over {ranks} ranks by {backend} in {seconds * 1e3:.1f} ms, {rate:.2f} GB/s"
    if device == "cuda" and rate < 5:
        advice = "NCCL goes a slow way: NCCL_DEBUG=INFO says which; look at peer access and NCCL_SOCKET_IFNAME"
        return warn("all-reduce", text, advice)
    return ok("all-reduce", text)


def log_probs(name: str, mean: float, largest: float, dtype: str) -> Finding:
    """Sampler against trainer, at the same weights."""
    text = f"sampler and trainer differ by {mean:.1e} nats a token, at most {largest:.1e}, in {dtype}"
    if mean <= TOLERANCE[dtype]:
        return ok(name, text)
    advice = "the engine does not compute what the trainer does: set model.dtype=float32 to see whether it is rounding"
    return fail(name, text, advice)


def new_weights(before: float, moved: float, after: float, seconds: float, dtype: str) -> Finding:
    """Whether an update reached the engine, by mean differences in nats a token: `before` at the first weights, `moved`
    of the old engine's against the new weights, `after` of the new engine's against them."""
    text = f"an update moved log-probs by {moved:.1e} nats a token; sent in {seconds:.2f} s, {after:.1e} are left"
    if after > TOLERANCE[dtype] and after > moved / 4:
        return fail("new weights", text, "the engine goes on with weights other than those sent; report it")
    if moved < 4 * max(before, after):
        return warn("new weights", text, "too little to tell old weights from new ones; take another --model")
    return ok("new weights", text)


def checksums(sent: Mapping[str, str], engine: Mapping[str, str]) -> Finding:
    """Compare the trainer's weights, by name, with an engine's, by `RANKS:NAME`, where both have the name."""
    pairs = [(key, sent[name], digest) for key, digest in engine.items() if (name := key.rpartition(":")[2]) in sent]
    differing = [key for key, ours, theirs in pairs if ours != theirs]
    if differing:
        text = f"{len(differing)} of {len(pairs)} differ, {differing[0]} first"
        return fail("checksums", text, "the transfer changes or loses weights; report it")
    if not pairs:
        return warn("checksums", "no weight that engine and trainer keep alike", "the log-probs alone compare them")
    return ok("checksums", f"all {len(pairs)} weights that engine and trainer keep alike are equal to the bit")


def peak_memory(measured: int, estimated: float | None, resident: int) -> Finding:
    """Peak memory of a rank, bytes, against the dry run's estimate in GiB, if there is one."""
    if estimated is None:
        return ok("memory of a rank", f"{resident / GIB:.2f} GiB resident; on CPUs nothing is estimated")
    text = f"{measured / GIB:.2f} GiB of the GPU at its peak, {estimated:.2f} estimated"
    if measured / GIB > estimated:
        return warn("memory of a rank", text, "leave more room than the dry run asks for, and report it")
    return ok("memory of a rank", text)


def requirements_of(declared: Sequence[str], names: Sequence[str], vllm: str) -> tuple[str, ...]:
    """A distribution's declared requirements of `names`, and of `vllm`, the build in use."""
    found = {requirement.name: requirement for requirement in map(Requirement, declared)}
    chosen = [found[name] for name in (*names, vllm) if name in found]
    return tuple(f"{requirement.name}{requirement.specifier}" for requirement in chosen)
