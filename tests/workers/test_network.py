"""Collectives use the interface that has Ray's address of the node, or what the user says."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.network import (
    GLOO,
    NCCL,
    interface_of,
    nccl_files,
    socket_variables,
    use_rays_interface,
    variables_in,
)

NODE = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "docker0": ["172.17.0.1", "02:42:5e:1a:00:01"],
    "eth0": ["192.168.1.7", "fe80::1%eth0", "0c:42:a1:00:00:01"],
    "eth1": ["10.0.0.7", "fd00::7", "fe80::2%eth1"],
    "eth10": ["10.1.0.7"],
    "ib0": ["00:00:10:29:fe:80"],
}


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.0.0.7", "eth1"),
        ("192.168.1.7", "eth0"),
        ("fd00::7", "eth1"),
        ("fd00:0:0::0007", "eth1"),
        ("fe80::2%eth1", "eth1"),
        ("fe80::1", "eth0"),
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("::1", "lo"),
        ("203.0.113.9", None),
        ("10.0.0", None),
        ("head.cluster", None),
    ],
)
def test_the_interface_is_the_one_with_the_address(
    address: str, interface: str | None
) -> None:
    assert interface_of(address, NODE) == interface


@pytest.mark.parametrize(
    ("address", "given", "told"),
    [
        ("10.0.0.7", {}, {GLOO: "eth1", NCCL: "=eth1"}),
        ("127.0.0.1", {}, {GLOO: "lo", NCCL: "=lo"}),
        ("10.0.0.7", {NCCL: "ib0"}, {GLOO: "eth1"}),
        ("10.0.0.7", {GLOO: "", NCCL: "ib0"}, {}),
        ("203.0.113.9", {}, {}),
    ],
)
def test_both_libraries_are_told_one_exact_interface_unless_the_user_has(
    address, given, told
) -> None:
    assert socket_variables(address, NODE, given) == told


def test_nccls_files_count_as_set(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("# NCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME==ens1f0\n\nNCCL_IB_HCA = mlx5\n")
    assert variables_in([file, tmp_path / "absent"]) == {NCCL, "NCCL_IB_HCA"}
    assert nccl_files({"NCCL_CONF_FILE": str(file)})[0] == file
    assert nccl_files({})[-1] == Path("/etc/nccl.conf")


def test_a_process_takes_rays_address_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {name: [SimpleNamespace(address=each) for each in NODE[name]] for name in NODE}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: node)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.1.0.7")
    monkeypatch.setattr("workers.network.nccl_files", lambda environment: [])
    environment = {"PATH": "/bin"}
    monkeypatch.setattr("os.environ", environment)
    use_rays_interface()
    assert environment == {"PATH": "/bin", GLOO: "eth10", NCCL: "=eth10"}
