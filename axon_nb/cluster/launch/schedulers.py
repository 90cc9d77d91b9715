"""`--hosts ray` and `--hosts k8s`: what the options mean, and the process that uses the scheduler's client.

Hosts are called after their number: one that is placed again keeps its name. In Kubernetes each is a Job, in Ray a
bundle of a placement group.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec import Struct
from msgspec.structs import replace

from axon_nb.cluster.launch.placement import LOOPBACK, Layout, address_towards
from axon_nb.errors import StartError, UsageError
from axon_nb.host.connections import store_key
from axon_nb.records.protocol.agent import ServeStore

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection

_ANSWER_TIMEOUT_S = 120.0
_WHERE = re.compile(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?(=[1-9][0-9]{0,3})?")
PLACEMENTS = ("pack", "spread")


class SchedulerOption(Struct, frozen=True):
    """What `--hosts` asks for, and what it got."""

    name: ClassVar[str] = ""
    """What `--hosts` calls the scheduler."""
    cannot_grow: ClassVar[str] = ""
    """The end of a sentence: why there can be no more ranks than reserved."""

    where: str = ""
    """What follows the name."""
    gpus_per_rank: int | None = None
    """0 or 1; None: 1 if there are GPUs."""
    placement: str = "pack"
    bundles: tuple[int, ...] = ()
    """How many ranks each host gets; empty until the scheduler was asked."""
    program: Any = None
    """What has asked it."""

    @property
    def text(self) -> str:
        """The option, with all that a restart or a repair needs."""
        values = {"gpus_per_rank": self.gpus_per_rank, "placement": self.placement}
        values["bundles"] = ".".join(map(str, self.bundles))
        return (
            f"{self.name}:{self.where}?{urllib.parse.urlencode({key: one for key, one in values.items() if one != ''})}"
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``ray``, ``ray:WHERE`` or `text`.

        Raises:
            UsageError: a value is none that is possible, or the scheduler's client is missing.
        """
        where, _, query = text.partition(":")[2].partition("?")
        values = dict(urllib.parse.parse_qsl(query))
        gpus = values.get("gpus_per_rank", "None")
        if gpus not in ("None", "0", "1"):
            raise UsageError(f"--gpus-per-rank must be 0 or 1, as a rank uses one device; got {gpus}.")
        bundles = tuple(int(count) for count in values.get("bundles", "").split(".") if count)
        option = cls(where, None if gpus == "None" else int(gpus), values.get("placement", "pack"), bundles)
        option.raise_if_wrong()
        return option

    def raise_if_wrong(self) -> None:
        """Raise if a value is none that is possible, or the scheduler's client is missing."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return tuple(f"{self.name}-{index}" for index in range(len(self.bundles)))

    def find_room(self, layout: Layout, ip: str | None, *, cpu: bool, backend: str) -> tuple[Self, Layout, str]:
        """Ask the scheduler which hosts there can be.

        Args:
            layout: What was planned.
            ip: The address that `--interface` names; None: it was not given.
            cpu: Whether ranks are to use CPUs only.
            backend: The backend that was asked for, or ``auto``.

        Returns:
            The option and the layout with what was found, and the address on which hosts reach this one.

        Raises:
            StartError: it cannot be reached, or not do that; the message says why.
        """
        raise NotImplementedError

    def with_found(
        self, layout: Layout, program: SchedulerProgram, *, gpus: int, bundles: tuple[int, ...], backend: str
    ) -> tuple[Self, Layout]:
        """Return the option and the layout with what was found."""
        kind, usual, visible = ("cuda:0", "nccl", None) if gpus else ("cpu", "gloo", "")
        chosen = usual if backend == "auto" else backend
        layout = replace(layout, devices=(kind,) * layout.num_ranks, backend=chosen, visible=visible)
        return replace(self, gpus_per_rank=gpus, bundles=bundles, program=program), layout

    def place(self, hosts: tuple[str, ...], connection: Connection, address: str, timeout_s: float) -> SchedulerProgram:
        """Begin to place hosts, whose agents then join.

        Args:
            hosts: Those that get an agent.
            connection: The cluster's connection.
            address: Where agents join, ``ip:port``.
            timeout_s: How long it may take until they have.
        """
        raise NotImplementedError

    def raise_if_unreserved(self, num_ranks: int) -> None:
        """Refuse more ranks than the scheduler has reserved resources for.

        Raises:
            UsageError: there would be more.
        """
        if num_ranks > (reserved := sum(self.bundles)):
            raise UsageError(
                f"{self.cannot_grow.format(reserved=reserved)} Save a checkpoint, run `%distributed stop` and "
                f"`%distributed start -n {num_ranks} --hosts {self.name}`, then load it."
            )


class SchedulerProgram:
    """A process for one start, repair or check.

    Args:
        module: Which of `axon_nb.host.schedulers` it runs.
        name: What the scheduler is called.
    """

    install = ""
    """What to do where axon_nb is missing."""

    def __init__(self, module: str, name: str) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._unread = b""
        self.hosts: tuple[str, ...] = ()
        """Those that it places."""
        self.facts: dict[str, Any] | None = None
        """Of each host, once it is placed."""
        pipe, command = subprocess.PIPE, (sys.executable, "-P", "-m", f"axon_nb.host.schedulers.{module}")
        # Not in the kernel's process group, which Jupyter's stop button signals.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, start_new_session=True)

    def ask(self, command: str, **request: object) -> dict[str, Any]:
        """Have it run one of the module's functions, and return what that returns.

        Raises:
            StartError: it failed; the message says why.
        """
        try:
            self.send(command, **request)
            answer = self.answer(_ANSWER_TIMEOUT_S)
            if answer is None:
                raise StartError(f"{self.name} did not respond within {_ANSWER_TIMEOUT_S:.0f} s.")
        except BaseException:
            self.process.terminate()
            self.leave()
            raise
        return answer

    def send(self, command: str, **request: object) -> None:
        """Begin to run one of the module's functions."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # if it has exited, what it wrote says why
            self.process.stdin.write(json.dumps({"command": command, **request}).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return its next answer; None if there is none within `timeout_s` seconds.

        Raises:
            StartError: it refuses, or has exited.
        """
        assert self.process.stdout is not None
        end = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            if not (data := os.read(self.process.stdout.fileno(), 1 << 16)):
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no output"]
                raise StartError(f"The process that uses {self.name} has exited: {lines[-1]}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise StartError(answer["refused"])
        return answer

    def raise_if_failed(self, timeout_s: float = 0.0) -> None:
        """Raise if a host cannot be placed, or not join.

        Raises:
            StartError: why, and what to do.
        """
        try:
            self.facts = self.facts or self.answer(timeout_s)
        except StartError as error:
            names = ", ".join(self.hosts)
            who = f"One of the hosts {names}" if len(self.hosts) > 1 else f"The host {names!r}"
            fix = f": {self.install}." if "No module named" in str(error) and "axon_nb" in str(error) else ""
            raise StartError(f"{who} cannot join: {error}{fix}") from None

    def leave(self) -> None:
        """Have it end when it is done; a thread reaps it, so that a long-lived kernel keeps no zombie."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        threading.Thread(target=self._reap, name="axon_nb-host-reaper", daemon=True).start()

    def _reap(self) -> None:
        with self.process, self._errors:  # closes them
            self.process.wait()


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


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


# ---- Ray -------------------------------------------------------------------------------------------------------------


class RayOption(SchedulerOption, frozen=True):
    """What `--hosts ray` asks for, and what it got; `where` is Ray's address, empty: that of RAY_ADDRESS, or here."""

    name = "ray"
    cannot_grow = "Ray has reserved resources for {reserved} ranks, and a placement group cannot grow."

    def raise_if_wrong(self) -> None:
        """Raise if a value is none that is possible, or Ray is not installed here."""
        if self.placement not in PLACEMENTS:
            raise UsageError(f"--placement must be pack or spread; got {self.placement}.")
        if importlib.util.find_spec("ray") is None:
            raise UsageError(
                "--hosts ray needs Ray in this environment, in the cluster's version: run `pip install ray`."
            )

    def find_room(self, layout: Layout, ip: str | None, *, cpu: bool, backend: str) -> tuple[Self, Layout, str]:
        """Ask Ray how many ranks each of its nodes has room for.

        Raises:
            StartError: Ray cannot be reached, or has no room; the message says what is missing.
        """
        program = RayProgram()
        found = program.ask(
            "look",
            address=self.where,
            num_ranks=layout.num_ranks,
            gpus_per_rank=0 if cpu else self.gpus_per_rank,
            placement=self.placement,
        )
        gpus, bundles = found["gpus_per_rank"], tuple(found["counts"])
        option, layout = self.with_found(layout, program, gpus=gpus, bundles=bundles, backend=backend)
        return option, layout, ip or address_towards(found["ip"], option.text)

    def place(self, hosts: tuple[str, ...], connection: Connection, address: str, timeout_s: float) -> SchedulerProgram:
        """Begin to place hosts in Ray, whose agents then join; `RayProgram.placed` says where."""
        program = self.program or RayProgram()
        program.hosts, program.bundles, cluster = hosts, self.bundles, connection.run_dir.path.name
        program.send(
            "place",
            address=self.where,
            name=f"axon_nb-{cluster}",
            title=f"axon_nb of {getpass.getuser()}, {cluster}",
            bundles=[{"CPU": count, **({"GPU": count} if self.gpus_per_rank else {})} for count in self.bundles],
            strategy=self.placement.upper(),
            hosts={host: self.hosts.index(host) for host in hosts},
            join=address,
            key=connection.client.session.key.decode(),
            timeout_s=timeout_s / 2,
        )
        return program


class RayProgram(SchedulerProgram):
    """The process in which Ray is used, for one start, repair or check."""

    install = "install it in the image or the runtime environment that Ray uses"
    bundles: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__("ray", "Ray")

    def placed(self, timeout_s: float) -> list[str]:
        """Say where Ray has placed the hosts, and which of them have other versions than this one.

        Raises:
            StartError: it has not, or not within `timeout_s` seconds.
        """
        from importlib import metadata

        self.raise_if_failed(timeout_s)
        if self.facts is None:
            raise StartError(f"Ray did not say within {timeout_s:.0f} s where it has placed the hosts.")
        own = {"python": ".".join(map(str, sys.version_info[:3])), "torch": metadata.version("torch")}
        lines = []
        for host, facts in self.facts.items():
            count = self.bundles[int(host.rpartition("-")[2])]
            lines.append(f"Ray placed {host} ({count} rank{'s' * (count != 1)}) on {facts['node']} ({facts['ip']}).")
            lines += [
                f"{host} has {package} {facts[package] or 'not installed'}, the notebook {version}: what is pushed or "
                "pulled may not load there. Use the same version."
                for package, version in own.items()
                if facts[package] != version
            ]
        return lines


def check_ray(address: str) -> dict[str, Any]:
    """Return what there is in Ray, and for each node its versions and whether it reaches this host.

    Raises:
        StartError: Ray cannot be reached; the message says why.
    """
    program = RayProgram()
    found = program.ask("check", address=address)
    program.leave()
    return found
