"""What `--hosts ray` and `--hosts k8s` have in common: the option, and the process that uses a scheduler's client.

Hosts are called after their number: one that is placed again keeps its name.
"""

from __future__ import annotations

import contextlib
import json
import os
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

from axon_nb.cluster.launch.placement import Layout
from axon_nb.errors import StartError, UsageError

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection

_ANSWER_TIMEOUT_S = 120.0


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
