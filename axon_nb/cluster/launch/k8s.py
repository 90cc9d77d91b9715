"""Kubernetes' part of `--hosts`: what the option means, and the process that makes a Job for each host."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from axon_nb.cluster.launch.placement import LOOPBACK, Layout
from axon_nb.cluster.launch.program import SchedulerOption, SchedulerProgram
from axon_nb.errors import UsageError
from axon_nb.host.connections import store_key
from axon_nb.records.protocol.agent import ServeStore

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection

_WHERE = re.compile(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?(=[1-9][0-9]{0,3})?")


class K8sOption(SchedulerOption, frozen=True):
    """What `--hosts k8s` asks for, and what it got; `where` is the namespace, and after a ``=`` the ranks of a pod."""

    name = "k8s"
    cannot_grow = "The pods were made for {reserved} ranks."

    def raise_if_wrong(self) -> None:
        """Raise if the namespace cannot be one, or Kubernetes' client is not installed here."""
        if not _WHERE.fullmatch(self.where):
            raise UsageError(
                f"--hosts k8s needs a namespace and maybe the ranks of each pod, such as k8s:team=4; got {self.where}."
            )
        if importlib.util.find_spec("kubernetes") is None:
            raise UsageError("--hosts k8s needs Kubernetes' client in this environment: run `pip install kubernetes`.")

    def find_room(self, layout: Layout, ip: str | None, *, cpu: bool, backend: str) -> tuple[Self, Layout, str]:
        """Ask whether the cluster would accept the pods, and how they reach this host.

        Raises:
            StartError: it is not reached, or would not; the message says why.
        """
        namespace, _, count = self.where.partition("=")
        size, program = int(count or 1), K8sProgram()
        bundles = tuple(min(size, layout.num_ranks - first) for first in range(0, layout.num_ranks, size))
        gpus = 0 if cpu else self.gpus_per_rank
        found = program.ask("look", namespace=namespace, gpus_per_rank=gpus, ranks=bundles[0])
        option, layout = self.with_found(layout, program, gpus=found["gpus_per_rank"], bundles=bundles, backend=backend)
        return replace(option, where=f"{found['namespace']}={size}"), layout, ip or found["ip"] or LOOPBACK

    def place(self, hosts: tuple[str, ...], connection: Connection, address: str, timeout_s: float) -> SchedulerProgram:
        """Begin to make the Jobs; in each a pod runs the host's agent."""
        program, ports = self.program or K8sProgram(), list[int]()
        if connection.ip == LOOPBACK:
            key = store_key(connection.client.session.key).hex()
            controller = json.loads(connection.run_dir.engine_file.read_text())
            ports = [port for port in controller.values() if isinstance(port, int)] + controller["broadcast"]
            ports += [connection.agent.call(ServeStore(connection.ip, key)).port, int(address.rpartition(":")[2])]
        program.hosts = hosts
        program.send(
            "place",
            namespace=self.where.partition("=")[0],
            gpus_per_rank=self.gpus_per_rank,
            hosts={host: self.bundles[self.hosts.index(host)] for host in hosts},
            folder=str(connection.run_dir.path),
            join=address,
            ports=ports,
            key=connection.client.session.key.decode(),
            timeout_s=timeout_s,
        )
        return program


class K8sProgram(SchedulerProgram):
    """The process in which Kubernetes' client is used, for one start, repair or check."""

    install = "install it in the image that the template names"

    def __init__(self) -> None:
        super().__init__("k8s", "Kubernetes")

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return its next answer, and print what it notes meanwhile; None if there is none in time."""
        while (answer := super().answer(timeout_s)) is not None and "note" in answer:
            print(answer["note"], flush=True)
        return answer

    def raise_if_failed(self, timeout_s: float = 0.0) -> None:
        """Raise if a pod cannot run, or its agent not join: it says so also after all pods have begun to run.

        Raises:
            StartError: why, and what to do.
        """
        before, self.facts = self.facts, None
        super().raise_if_failed(timeout_s if before is None else 0.0)
        if self.facts is None:
            self.facts = before

    def placed(self, timeout_s: float) -> list[str]:
        """Say which pod each host is, and on which node.

        Raises:
            StartError: it is not known within `timeout_s` seconds.
        """
        self.raise_if_failed(timeout_s)
        return [f"{host} is the pod {one['pod']} on {one['node']}." for host, one in (self.facts or {}).items()]
