"""Checks what `--hosts ray` needs, before anything starts."""

from __future__ import annotations

from typing import Any

from axon_nb.cluster.launch.ray import RayOption, check_ray
from axon_nb.doctor.report import Finding, Section
from axon_nb.errors import AxonError, UsageError

_SAME = ("python", "torch", "axon_nb")


def ray(hosts: str) -> Section:
    """Check that Ray is reached, what its nodes have, and that each has the same versions and reaches this host.

    Args:
        hosts: The option `--hosts`.

    Raises:
        UsageError: it is not about Ray.
    """
    if hosts.partition(":")[0] != "ray":
        raise UsageError(f"`doctor --hosts` checks ray, ray:ADDRESS, k8s or k8s:NAMESPACE; got {hosts}.")
    try:
        found = check_ray(RayOption.parse(hosts).where)
    except AxonError as error:
        finding = Finding("connection", str(error), "problem", f"--hosts {hosts} cannot start ranks.", "See above.")
        return Section("Ray", (finding,))
    nodes, own = found["nodes"], found["own"]
    held = ", ".join(f"{name!r}: {cpus:g} CPUs, {gpus:g} GPUs" for name, (cpus, gpus) in found["groups"].items())
    findings = [Finding("Ray", f"{own['ray']}, {len(nodes)} nodes"), Finding("reserved by", held or "nobody")]
    findings += [_node(node, own) for node in nodes if node["total"]["CPU"]]  # on others no rank is placed
    return Section("Ray", tuple(findings), found)


def _node(node: dict[str, Any], own: dict[str, str]) -> Finding:
    free = ", ".join(f"{node['free'][kind]:g} of {node['total'][kind]:g} {kind}s free" for kind in ("CPU", "GPU"))
    label = f"{node['name']} ({node['ip']})"
    if unreached := node.get("unreached"):
        return Finding(
            label, f"{free}; {unreached}", "problem", "Ranks on this node cannot join a cluster of this notebook.",
            "Let this node connect to that address, or name another with `--interface`.",
        )  # fmt: skip
    if others := [f"{name} {node[name] or 'missing'}" for name in _SAME if node[name] != own[name]]:
        here = ", ".join(f"{name} {own[name]}" for name in _SAME if node[name] != own[name])
        return Finding(
            label, f"{free}; {', '.join(others)}", "problem", f"This notebook has {here}.",
            "Install the same versions in the image or the runtime environment that Ray uses.",
        )  # fmt: skip
    return Finding(label, f"{free}; same versions; reaches this host")
