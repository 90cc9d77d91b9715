"""`--hosts ray` and `--hosts k8s`: what the options mean, and the process that uses the scheduler's client.

Hosts are called after their number: one that is placed again keeps its name. In Kubernetes each is a Job, in Ray a
bundle of a placement group.
"""

from __future__ import annotations

import contextlib
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

from axon_nb.cluster.launch.placement import LOOPBACK, Layout
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

    name: ClassVar[str]
    """What `--hosts` calls the scheduler."""
    title: ClassVar[str]
    """What messages call it."""
    cannot_grow: ClassVar[str]
    """A sentence that says why there can be no more ranks than reserved."""
    install: ClassVar[str]
    """What to do where axon_nb is missing."""

    where: str = ""
    """What follows the name."""
    gpus_per_rank: int | None = None
    """0 or 1; None: 1 if there are GPUs."""
    placement: str = "pack"
    bundles: tuple[int, ...] = ()
    """How many ranks each host gets; empty until the scheduler was asked."""
    group: str = ""
    """What Ray calls that which it has reserved."""
    program: Any = None
    """What has asked it."""

    @property
    def text(self) -> str:
        """The option, with all that a restart or a repair needs."""
        values = {"gpus_per_rank": self.gpus_per_rank, "placement": self.placement, "group": self.group}
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
        placement, group = values.get("placement", "pack"), values.get("group", "")
        option = cls(where, None if gpus == "None" else int(gpus), placement, bundles, group)
        option.raise_if_wrong()
        return option

    def raise_if_wrong(self) -> None:
        """Raise if a value is none that is possible, or the scheduler's client is missing."""
        raise NotImplementedError

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return tuple(f"{self.name}-{index}" for index in range(len(self.bundles)))

    def find_room(self, layout: Layout, ip: str | None, *, cpu: bool, backend: str) -> tuple[Self, Layout, str]:
        """Ask the scheduler which hosts there can be; Ray reserves them.

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
        program, gpus, size = SchedulerProgram(self), 0 if cpu else self.gpus_per_rank, layout.num_ranks
        wanted = {"num_ranks": size, "gpus_per_rank": gpus, "placement": self.placement}
        found = program.ask("look", where=self.where, ip=ip, **wanted)
        own_ip, bundles = found.pop("ip"), tuple(found.pop("bundles"))
        kind, usual, visible = ("cuda:0", "nccl", None) if found["gpus_per_rank"] else ("cpu", "gloo", "")
        chosen = usual if backend == "auto" else backend
        layout = replace(layout, devices=(kind,) * size, backend=chosen, visible=visible)
        return replace(self, program=program, bundles=bundles, **found), layout, ip or own_ip or LOOPBACK

    def place(self, hosts: tuple[str, ...], connection: Connection, address: str, timeout_s: float) -> SchedulerProgram:
        """Begin to place hosts, whose agents then join; `SchedulerProgram.placed` says where.

        Args:
            hosts: Those that get an agent.
            connection: The cluster's connection.
            address: Where agents join, ``ip:port``.
            timeout_s: How long it may take until they have.
        """
        program = self.program or SchedulerProgram(self)
        program.hosts = hosts
        program.send(
            "place",
            where=self.where,
            group=self.group,
            gpus_per_rank=self.gpus_per_rank,
            hosts={host: self.bundles[self.hosts.index(host)] for host in hosts},
            folder=str(connection.run_dir.path),
            join=address,
            ports=self.ports(connection, address),
            key=connection.client.session.key.decode(),
            timeout_s=timeout_s,
        )
        return program

    def ports(self, connection: Connection, address: str) -> list[int]:
        """Return the ports of this host that a tunnel leads hosts to; empty: they reach it."""
        return []

    def check(self) -> dict[str, Any]:
        """Return what `axon-nb doctor` reports.

        Raises:
            StartError: the scheduler cannot be reached; the message says why.
        """
        program = SchedulerProgram(self)
        found = program.ask("check", where=self.where)
        program.leave()
        return found

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


class RayOption(SchedulerOption, frozen=True):
    """What `--hosts ray` asks for, and what it got; `where` is Ray's address, empty: that of RAY_ADDRESS, or here."""

    name = "ray"
    title = "Ray"
    cannot_grow = "Ray has reserved resources for {reserved} ranks, and a placement group cannot grow."
    install = "install it in the image or the runtime environment that Ray uses"

    def raise_if_wrong(self) -> None:
        """Raise if a value is none that is possible, or Ray is not installed here."""
        if self.placement not in PLACEMENTS:
            raise UsageError(f"--placement must be pack or spread; got {self.placement}.")
        if importlib.util.find_spec("ray") is None:
            raise UsageError(
                "--hosts ray needs Ray in this environment, in the cluster's version: run `pip install ray`."
            )


class K8sOption(SchedulerOption, frozen=True):
    """What `--hosts k8s` asks for, and what it got; `where` is the namespace, and after a ``=`` the ranks of a pod."""

    name = "k8s"
    title = "Kubernetes"
    cannot_grow = "The pods were made for {reserved} ranks."
    install = "install it in the image that the template names"

    def raise_if_wrong(self) -> None:
        """Raise if the namespace cannot be one, or Kubernetes' client is not installed here."""
        if not _WHERE.fullmatch(self.where):
            raise UsageError(
                f"--hosts k8s needs a namespace and maybe the ranks of each pod, such as k8s:team=4; got {self.where}."
            )
        if importlib.util.find_spec("kubernetes") is None:
            raise UsageError("--hosts k8s needs Kubernetes' client in this environment: run `pip install kubernetes`.")

    def ports(self, connection: Connection, address: str) -> list[int]:
        """Return the ports of this host that a tunnel leads pods to; empty: they reach it."""
        if connection.ip != LOOPBACK:
            return []
        key = store_key(connection.client.session.key).hex()
        controller = json.loads(connection.run_dir.engine_file.read_text())
        own = [connection.agent.call(ServeStore(connection.ip, key)).port, int(address.rpartition(":")[2])]
        return [*(port for port in controller.values() if isinstance(port, int)), *controller["broadcast"], *own]


class SchedulerProgram:
    """A process that uses the client of a scheduler, for one start, repair or check; Ray's stays as long as the ranks.

    Args:
        option: Which scheduler.
    """

    def __init__(self, option: SchedulerOption) -> None:
        self.option = option
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._unread = b""
        self._placed: dict[str, Any] | None = None
        self.hosts: tuple[str, ...] = ()
        """Those that it places."""
        pipe, command = subprocess.PIPE, (sys.executable, "-P", "-m", f"axon_nb.host.schedulers.{option.name}")
        # Not in the kernel's process group, which Jupyter's stop button signals.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, start_new_session=True)

    def ask(self, command: str, **request: object) -> dict[str, Any]:
        """Have it run one of the module's functions, and return what that answers.

        Raises:
            StartError: it failed; the message says why.
        """
        try:
            self.send(command, **request)
            answer = self.answer(_ANSWER_TIMEOUT_S)
            if answer is None:
                raise StartError(f"{self.option.title} did not respond within {_ANSWER_TIMEOUT_S:.0f} s.")
        except BaseException:
            self.end()
            raise
        return answer

    def send(self, command: str, **request: object) -> None:
        """Begin to run one of the module's functions."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # if it has exited, what it wrote says why
            self.process.stdin.write(json.dumps({"command": command, **request}).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return its next answer, and print what it notes before; None if there is none within `timeout_s` seconds.

        Raises:
            StartError: it refuses, or has exited.
        """
        assert self.process.stdout is not None
        end = time.monotonic() + timeout_s
        while True:
            while b"\n" not in self._unread:
                if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                    return None
                if not (data := os.read(self.process.stdout.fileno(), 1 << 16)):
                    self._errors.seek(0)
                    lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no output"]
                    raise StartError(f"The process that uses {self.option.title} has exited: {lines[-1]}")
                self._unread += data
            line, _, self._unread = self._unread.partition(b"\n")
            answer: dict[str, Any] = json.loads(line)
            if "refused" in answer:
                raise StartError(answer["refused"])
            if "note" not in answer:
                return answer
            print(answer["note"], flush=True)

    def raise_if_failed(self, timeout_s: float = 0.0) -> None:
        """Raise if a host cannot be placed, or not join: a pod may also fail after all have begun to run.

        Raises:
            StartError: why, and what to do.
        """
        try:
            self._placed = self.answer(0.0 if self._placed else timeout_s) or self._placed
        except StartError as error:
            names = ", ".join(self.hosts)
            who = f"One of the hosts {names}" if len(self.hosts) > 1 else f"The host {names!r}"
            fix = f": {self.option.install}." if "No module named" in str(error) and "axon_nb" in str(error) else ""
            raise StartError(f"{who} cannot join: {error}{fix}") from None

    def placed(self, timeout_s: float) -> list[str]:
        """Say where the hosts are.

        Raises:
            StartError: one cannot join, or it is not known within `timeout_s` seconds.
        """
        self.raise_if_failed(timeout_s)
        if self._placed is None:
            raise StartError(f"{self.option.title} did not say within {timeout_s:.0f} s where it has placed the hosts.")
        return list(self._placed["placed"])

    def end(self) -> None:
        """Have it end now: Ray takes back what it has reserved."""
        self.process.terminate()
        self.leave()

    def leave(self) -> None:
        """Have it end when it is done; a thread reaps it, so that a long-lived kernel keeps no zombie."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        threading.Thread(target=self._reap, name="axon_nb-host-reaper", daemon=True).start()

    def _reap(self) -> None:
        with self.process, self._errors:  # closes them
            self.process.wait()
