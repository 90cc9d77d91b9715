"""Runs all checks; slow ones run in parallel child processes. Of other hosts, checks what `--hosts` needs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

from axon_nb._version import __version__
from axon_nb.cluster.launch.placement import plan_layout
from axon_nb.cluster.launch.schedulers import K8sOption, RayOption
from axon_nb.doctor import installation
from axon_nb.doctor.clusters import FoundCluster, clusters, find_clusters, rank_names
from axon_nb.doctor.machine import NVML, gpus, host, limits, network
from axon_nb.doctor.report import Finding, Report, Section
from axon_nb.errors import AxonError, UsageError

_SELF_TEST_TIMEOUT_S = 120.0
_TORCH_TIMEOUT_S = 120.0
_NVML_TIMEOUT_S = 30.0
_SAME = ("python", "torch", "axon_nb")


def examine(hosts: str | None = None) -> Report:
    """Check this machine and installation, as seen by this process.

    Takes as long as importing torch twice and FSDP once; on the first run with a torch build the self-test adds some
    seconds.

    Args:
        hosts: The option `--hosts` of a start, ``ray`` or ``k8s``, of which alone the nodes are checked.

    Raises:
        UsageError: it is another.
    """
    title = f"axon_nb {__version__} doctor, {time.strftime('%Y-%m-%d %H:%M %Z')}"
    if hosts is not None:
        return Report(title, (k8s(hosts) if hosts.partition(":")[0] == "k8s" else ray(hosts),))
    with contextlib.ExitStack() as children:

        def child(arguments: tuple[str, ...], timeout_s: float) -> installation.Child:
            made = installation.Child(arguments, timeout_s=timeout_s)
            children.callback(made.close)
            return made

        tested, built, driver = (
            child(installation.SELF_TEST, _SELF_TEST_TIMEOUT_S),
            child(installation.TORCH_BUILD, _TORCH_TIMEOUT_S),
            child(NVML, _NVML_TIMEOUT_S),
        )
        entries: list[FoundCluster] = []

        def cluster_section() -> Section:
            entries.extend(find_clusters())
            return clusters(entries)

        layout = functools.cache(lambda: plan_layout(None))  # queries the driver, which may be slow
        host_sections = [
            _try("host", lambda: host(layout())),
            _try("limits", lambda: limits(layout().num_ranks)),
            _try("network", network),
            _try("environment", installation.environment),
        ]
        running = _try("clusters", cluster_section)
        cards, build, verdict = driver.answer(), built.answer(), tested.answer()
        sections = (
            _try("software", lambda: installation.software(build)),
            _try("self-test", lambda: installation.self_test(verdict)),
            _try("private hooks", lambda: installation.private_hooks(verdict)),
            _try("wrong without an error", lambda: installation.wrong_numbers(build)),
            _try("GPUs", lambda: gpus(cards, build, rank_names(entries))),
            *host_sections,
            running,
        )
    return Report(title, sections)


def _try(name: str, section: Callable[[], Section]) -> Section:
    """Run one check; if it fails unexpectedly, report that without losing the others."""
    try:
        return section()
    except Exception as error:
        finding = Finding(
            name, f"{type(error).__name__}: {error}", "problem", "This check failed.",
            "Report this text as an axon_nb bug.",
        )  # fmt: skip
        return Section(name, (finding,))


# ---- what `--hosts k8s` and `--hosts ray` need -----------------------------------------------------------------------


def k8s(hosts: str) -> Section:
    """Check that Kubernetes is reached, what it permits, what its nodes have, and that it accepts the template.

    Args:
        hosts: The option `--hosts`.
    """
    try:
        found = K8sOption.parse(hosts).check()
    except AxonError as error:
        finding = Finding("connection", str(error), "problem", f"--hosts {hosts} cannot start ranks.", "See above.")
        return Section("Kubernetes", (finding,))
    way = f"directly, at {found['ip']}" if found["ip"] else "through the API server's port-forward"
    findings = [Finding("Kubernetes", f"{found['version']}, namespace {found['namespace']}")]
    findings.append(Finding("way to pods", way))
    if found["denied"]:
        findings.append(
            Finding(
                "permissions", f"not: {', '.join(found['denied'])}", "problem", "Ranks cannot start in pods.",
                "Ask the administrator for the Role of docs/howto/kubernetes.md.",
            )
        )  # fmt: skip
    else:
        findings.append(Finding("permissions", "sufficient"))
        findings.append(
            Finding("template", found["problem"], "problem", "Ranks cannot start in pods.", "Correct the template.")
            if found["problem"]
            else Finding("template", "accepted")
        )
    findings += [Finding(node["name"], f"{node['cpu']} CPUs, {node['gpu']} GPUs") for node in found["nodes"]]
    return Section("Kubernetes", tuple(findings), found)


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
        found = RayOption.parse(hosts).check()
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
