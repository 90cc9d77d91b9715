"""Runs all checks; slow ones run in parallel child processes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

from axon_nb._version import __version__
from axon_nb.cluster.launch.placement import plan_layout
from axon_nb.doctor import installation
from axon_nb.doctor.clusters import FoundCluster, clusters, find_clusters, rank_names
from axon_nb.doctor.k8s import k8s
from axon_nb.doctor.machine import NVML, gpus, host, limits, network
from axon_nb.doctor.ray import ray
from axon_nb.doctor.report import Finding, Report, Section

_SELF_TEST_TIMEOUT_S = 120.0
_TORCH_TIMEOUT_S = 120.0
_NVML_TIMEOUT_S = 30.0


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
