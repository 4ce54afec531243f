"""Select the network interface of collectives: the one with the address by which Ray knows this node.

Left alone, gloo uses the address of the host name, often 127.0.1.1, and NCCL the first interface that is up.
Ranks on two nodes would then wait for each other until they time out.
"""

import ipaddress
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def use_rays_interface() -> None:
    """Set gloo's and NCCL's interface before the first process group starts, unless the user has."""
    import psutil
    import ray

    interfaces = {}
    for name, addresses in psutil.net_if_addrs().items():
        interfaces[name] = [address.address for address in addresses]
    user_variables = {*os.environ, *variables_in(nccl_files(os.environ))}
    os.environ.update(
        socket_variables(ray.util.get_node_ip_address(), interfaces, user_variables)
    )


def socket_variables(
    address: str, interfaces: Mapping[str, Iterable[str]], user_variables: Container[str]
) -> dict[str, str]:
    """Return the variables to set, except those in `user_variables`. Behind a NAT no interface has the
    address: none.
    """
    name = interface_of(address, interfaces)
    if name is None:
        return {}
    variables = {GLOO: name, NCCL: f"={name}"}  # without "=" NCCL would match eth10, too
    return {
        variable: value
        for variable, value in variables.items()
        if variable not in user_variables
    }


def interface_of(address: str, interfaces: Mapping[str, Iterable[str]]) -> str | None:
    wanted = _parse(address)
    if wanted is None:
        return None
    for name, addresses in interfaces.items():
        ip_addresses = [parsed for parsed in map(_parse, addresses) if parsed is not None]
        if wanted in ip_addresses or (
            wanted.is_loopback and any(address.is_loopback for address in ip_addresses)
        ):
            return name
    return None


def nccl_files(environment: Mapping[str, str]) -> list[Path]:
    user_file = environment.get("NCCL_CONF_FILE")
    return [
        Path(user_file) if user_file else Path.home() / ".nccl.conf",
        Path("/etc/nccl.conf"),
    ]


def variables_in(files: Iterable[Path]) -> set[str]:
    """Return the names that files with lines NAME=value set. Missing files set none."""
    lines = [
        line for file in files if file.is_file() for line in file.read_text().splitlines()
    ]
    return {
        line.partition("=")[0].strip()
        for line in lines
        if "=" in line and not line.lstrip().startswith("#")
    }


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
