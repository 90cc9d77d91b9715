"""Checks what `--hosts k8s` needs, before anything starts."""

from __future__ import annotations

from axon_nb.cluster.launch.k8s import K8sOption, K8sProgram
from axon_nb.doctor.report import Finding, Section
from axon_nb.errors import AxonError


def k8s(hosts: str) -> Section:
    """Check that Kubernetes is reached, what it permits, what its nodes have, and that it accepts the template.

    Args:
        hosts: The option `--hosts`.
    """
    try:
        namespace = K8sOption.parse(hosts).where.partition("=")[0]
        program = K8sProgram()
        found = program.ask("check", namespace=namespace)
        program.leave()
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
