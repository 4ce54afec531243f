"""Sandboxes that are pods of Kubernetes, by its client.

create pod, wait until it runs --> exec by WebSocket --> exec --> delete pod
"""

import json
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from workers.errors import ConfigError, describe_error
from workers.sandbox.owners import OWNER, is_left_over, labels
from workers.sandbox.protocol import (
    CommandResult,
    SandboxError,
    SandboxLabel,
    SandboxLimits,
)
from workers.sandbox.shell_sandbox import ShellSandbox

KUBERNETES = "kubernetes"
SANDBOX = "sandbox"
NETWORK = "ballast.network"
POLICY = "ballast-no-network"
START_SECONDS = 600.0  # an image may be pulled
POLL_SECONDS = 0.5
GRACE_SECONDS = 15.0
REQUEST_SECONDS = 30.0
CHUNK = 2**15
ERROR_CHANNEL = 3
# A channel of standard input cannot be closed in every version of the protocol, so its length is given.
WITH_INPUT = (
    'n=$1; shift; if [ "$n" = 0 ]; then exec "$@" < /dev/null; fi; head -c "$n" | "$@"'
)
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
NEEDED = (
    ("create", "pods", ""),
    ("delete", "pods", ""),
    ("list", "pods", ""),
    ("create", "pods", "exec"),
)


class PodSandbox(ShellSandbox):
    """A pod."""

    def __init__(self, limits: SandboxLimits, label: SandboxLabel, *, image: str) -> None:
        super().__init__(limits, label)
        self._image = image
        self._name = f"ballast-{uuid.uuid4().hex[:16]}"
        self._state = "call start first"
        self._namespace = ""

    def start(self) -> None:
        self._namespace = load_cluster()
        core = _make_api("CoreV1Api")
        self._state = ""
        if not self.limits.network:
            _ensure_policy(self._namespace)
        _call(core.create_namespaced_pod, self._namespace, self._pod())
        deadline = time.monotonic() + START_SECONDS
        while (status := self._status(core)).phase == "Pending":
            if time.monotonic() > deadline:
                raise SandboxError(f"pod {self._name} does not start: {_reason(status)}")
            time.sleep(POLL_SECONDS)
        if status.phase != "Running":
            raise SandboxError(f"pod {self._name} ended at its start: {_reason(status)}")

    def execute(
        self, arguments: Sequence[str], stdin: bytes, seconds: float, longest: int
    ) -> CommandResult:
        if self._state:
            raise SandboxError(f"the sandbox is not running: {self._state}")
        from kubernetes.stream import stream

        command = ["sh", "-c", WITH_INPUT, "sh", str(len(stdin)), *arguments]
        options = {
            "stdin": bool(stdin),
            "stdout": True,
            "stderr": True,
            "tty": False,
            "binary": True,
        }
        # The client's stream replaces a method of its API object meanwhile, so each call has its own.
        execute = _make_api("CoreV1Api").connect_get_namespaced_pod_exec
        client = _call(
            stream,
            execute,
            self._name,
            self._namespace,
            container=SANDBOX,
            command=command,
            _preload_content=False,
            **options,
        )
        Thread(target=_send, args=(client, stdin), daemon=True).start()
        output = bytearray()
        total = 0
        status = b""
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        try:
            while client.is_open():
                client.update(timeout=1)
                # Before read_all, which drops it.
                status += client.read_channel(ERROR_CHANNEL) or b""
                part = client.read_all()
                total += len(part)
                output += part[: longest - len(output)]
                if time.monotonic() > deadline:
                    self.stop()
                    raise SandboxError(
                        f"the sandbox ended: it did not answer in {seconds + GRACE_SECONDS:g} s"
                    )
        except OSError as error:
            raise SandboxError(f"the sandbox ended: {describe_error(error)}") from None
        finally:
            client.close()
        return CommandResult(bytes(output), _exit_code(status), total > len(output))

    def end_commands(self) -> None:
        """Do nothing: a pod that is started anew loses its files."""

    def stop(self) -> None:
        if self._state:
            return
        self._state = "it was stopped"
        _delete(_make_api("CoreV1Api"), self._name, self._namespace)

    def _status(self, core: Any) -> Any:
        return _call(core.read_namespaced_pod, self._name, self._namespace).status

    def _pod(self) -> dict[str, Any]:
        limits = self.limits
        amounts = {
            "cpu": f"{limits.cpus * 1000:.0f}m",
            "memory": f"{limits.memory_mib}Mi",
            "ephemeral-storage": f"{limits.disk_mib}Mi",
        }
        container = {
            "name": SANDBOX,
            "image": self._image,
            "command": ["sh", "-c", f"sleep {limits.lifetime_s:.0f}"],
            "resources": {"limits": amounts, "requests": amounts},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "capabilities": {"drop": ["NET_RAW"]},
            },
        }
        network = {NETWORK: "on" if limits.network else "off"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self._name, "labels": {**labels(self.label), **network}},
            "spec": {
                "restartPolicy": "Never",
                "activeDeadlineSeconds": int(limits.lifetime_s),
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "containers": [container],
            },
        }


def check_cluster(key: str, image: str) -> None:
    """Raise ConfigError if the client, the cluster or a right in it is missing."""
    setting = f"{key}={KUBERNETES}:{image}"
    if not image:
        raise ConfigError(f"{key}={KUBERNETES}: it names no image. Set {KUBERNETES}:IMAGE.")
    if find_spec("kubernetes") is None:
        raise ConfigError(
            f"{setting}: the package kubernetes is not installed. Install it: `pip install "
            '"ballast-rl[kubernetes]"`.'
        )
    try:
        namespace = load_cluster()
        needed = [*NEEDED, ("create", "networkpolicies", "")]
        refused = [right for right in needed if not _is_allowed(namespace, *right)]
    except SandboxError as error:
        raise ConfigError(
            f"{setting}: {error}. Check `kubectl get pods` on this machine."
        ) from None
    if refused:
        rights = ", ".join(" ".join(filter(None, right)) for right in refused)
        raise ConfigError(
            f"{setting}: this user may not {rights} in namespace {namespace}. Grant these rights."
        )


@cache
def load_cluster() -> str:
    """Find the cluster, by kubeconfig or as one of its pods. Returns the namespace. Raises SandboxError."""
    from kubernetes import config

    try:
        config.load_incluster_config()
        return Path(NAMESPACE_FILE).read_text().strip()
    except config.ConfigException:
        pass
    try:
        config.load_kube_config()
        _, context = config.list_kube_config_contexts()
    except config.ConfigException as error:
        raise SandboxError(f"no cluster is configured: {describe_error(error)}") from None
    return str(context["context"].get("namespace", "default"))


def remove_left_over_pods() -> int:
    """Delete the pods of processes of this machine that have ended. Returns how many."""
    namespace = load_cluster()
    core = _make_api("CoreV1Api")
    pods = _call(core.list_namespaced_pod, namespace, label_selector=OWNER).items
    names = [pod.metadata.name for pod in pods if is_left_over(pod.metadata.labels[OWNER])]
    for name in names:
        _delete(core, name, namespace)
    return len(names)


def _ensure_policy(namespace: str) -> None:
    """Close the network of sandboxes. Without the right network plugin, a cluster ignores policies."""
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK: "off"}},
            "policyTypes": ["Ingress", "Egress"],
        },
    }
    try:
        _call(
            _make_api("NetworkingV1Api").create_namespaced_network_policy, namespace, policy
        )
    except SandboxError as error:
        if "409" not in str(error):
            raise


def _is_allowed(namespace: str, verb: str, resource: str, subresource: str) -> bool:
    attributes = {
        "namespace": namespace,
        "verb": verb,
        "resource": resource,
        "subresource": subresource,
    }
    if resource == "networkpolicies":
        attributes["group"] = "networking.k8s.io"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    api = _make_api("AuthorizationV1Api")
    return bool(_call(api.create_self_subject_access_review, review).status.allowed)


def _make_api(name: str) -> Any:
    from kubernetes import client

    return getattr(client, name)(client.ApiClient())


def _call(method: Any, *arguments: Any, **options: Any) -> Any:
    """Call the API. Raises SandboxError."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return method(*arguments, _request_timeout=REQUEST_SECONDS, **options)
    except ApiException as error:
        reason = error.reason
        if error.body:
            with suppress(ValueError):
                reason = json.loads(error.body).get("message", reason)
        raise SandboxError(f"Kubernetes answers {error.status}: {reason}") from None
    except (HTTPError, OSError) as error:
        raise SandboxError(f"Kubernetes does not answer: {describe_error(error)}") from None


def _delete(core: Any, name: str, namespace: str) -> None:
    try:
        _call(core.delete_namespaced_pod, name, namespace, grace_period_seconds=0)
    except SandboxError as error:
        if "404" not in str(error):  # it ended by itself
            raise


def _send(client: Any, content: bytes) -> None:
    with suppress(Exception):  # the other side has closed: its status says why
        for start in range(0, len(content), CHUNK):
            client.write_stdin(content[start : start + CHUNK])


def _exit_code(status: bytes) -> int:
    """Return the exit code that the API gives at the end of a command. Raises SandboxError if there is
    none.
    """
    try:
        answer = json.loads(status)
        if answer["status"] == "Success":
            return 0
        causes = {
            cause.get("reason"): cause["message"] for cause in answer["details"]["causes"]
        }
        return int(causes["ExitCode"])
    except (ValueError, KeyError, TypeError):
        message = status.decode(errors="replace") or "the connection was cut"
        raise SandboxError(f"the sandbox ended: {message}") from None


def _reason(status: Any) -> str:
    """Return why a pod does not run, as far as it says so."""
    states = [container.state for container in status.container_statuses or []]
    waiting = [state.waiting or state.terminated for state in states if state]
    reasons = [f"{state.reason}: {state.message}" for state in waiting if state]
    return "; ".join(reasons) or status.message or status.phase
