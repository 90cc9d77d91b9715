"""Network interfaces: loopback, which Gloo needs, and those usable with `--interface`."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import psutil

from axon_nb.cluster.launch.placement import LOOPBACK, interface_ip
from axon_nb.doctor.report import Finding, Section


def network() -> Section:
    """Check loopback, and list interfaces with an IPv4 address that other hosts may reach."""
    interfaces, usual = _interfaces(), _outgoing_ip()
    findings = [_loopback()]
    for entry in interfaces:
        route = ", the default route" if entry["ip"] == usual else ""
        state = "up" if entry["up"] else "down"
        use = f"; for ranks on other hosts use `--interface {entry['name']}`" if entry["up"] else ""
        findings.append(Finding(str(entry["name"]), f"{entry['ip']}, {state}{route}{use}"))
    if not interfaces:
        findings.append(Finding("others", "none; ranks on other hosts cannot reach this host"))
    return Section("network", tuple(findings), {"host": socket.gethostname(), "interfaces": interfaces})


def _interfaces() -> list[dict[str, Any]]:
    stats = psutil.net_if_stats()
    interfaces = []
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET for address in addresses):
            ip = interface_ip(name)
            if not ipaddress.ip_address(ip).is_loopback:
                up = name in stats and bool(stats[name].isup)
                interfaces.append({"name": name, "ip": ip, "up": up})
    return interfaces


def _loopback() -> Finding:
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.socket() as client:
            client.settimeout(2.0)
            client.connect(server.getsockname())
    except OSError as error:
        return Finding(
            "loopback", f"{LOOPBACK} does not work: {error}", "problem",
            "Ranks on Gloo or NCCL cannot communicate, and launchers other than `axon` cannot start ranks.",
            "Run `ip link set lo up` as root.",
        )  # fmt: skip
    return Finding("loopback", f"{LOOPBACK} works; ranks on one host that use Gloo or NCCL need it")


def _outgoing_ip() -> str:
    """This host's default source address; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return ""
