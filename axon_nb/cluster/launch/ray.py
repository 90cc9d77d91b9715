"""Ray's part of `--hosts`: what the option means, which hosts Ray has room for, and the process that places them there.

Each host of the cluster is a bundle of a placement group, and called after its number: a bundle that Ray places again
after its node died keeps its name.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from axon_nb.cluster.launch.placement import Layout
from axon_nb.errors import StartError, UsageError

PLACEMENTS = ("pack", "spread")
_PREFIX = "ray-"
_PROGRAM = (sys.executable, "-P", "-m", "axon_nb.host.ray")
_LOOK_TIMEOUT_S = 120.0
_INSTALL = "install it in the image or the runtime environment that Ray uses"


class RayOption(Struct, frozen=True):
    """What `--hosts ray` asks for, and what it got."""

    address: str = ""
    """Of Ray; empty: that of RAY_ADDRESS, or of the Ray of this machine."""
    gpus_per_rank: int | None = None
    """0 or 1; None: 1 if Ray has GPUs."""
    placement: str = "pack"
    bundles: tuple[int, ...] = ()
    """How many ranks each host gets; empty until Ray was asked."""
    program: RayProgram | None = None
    """What has asked it."""

    @property
    def text(self) -> str:
        """The option, with all that a restart or a repair needs."""
        values = {"gpus_per_rank": self.gpus_per_rank, "placement": self.placement}
        values["bundles"] = ".".join(map(str, self.bundles))
        return f"ray:{self.address}?{urllib.parse.urlencode({key: one for key, one in values.items() if one != ''})}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return tuple(f"{_PREFIX}{index}" for index in range(len(self.bundles)))


def parse_ray(text: str) -> RayOption:
    """Parse ``ray``, ``ray:ADDRESS`` or `RayOption.text`.

    Raises:
        UsageError: Ray is not installed here, or a value is none that is possible.
    """
    address, _, query = text.partition(":")[2].partition("?")
    values = dict(urllib.parse.parse_qsl(query))
    gpus, placement = values.get("gpus_per_rank", "None"), values.get("placement", "pack")
    if gpus not in ("None", "0", "1"):
        raise UsageError(f"--gpus-per-rank must be 0 or 1, as a rank uses one device; got {gpus}.")
    if placement not in PLACEMENTS:
        raise UsageError(f"--placement must be pack or spread; got {placement}.")
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--hosts ray needs Ray in this environment, in the cluster's version: run `pip install ray`.")
    bundles = tuple(int(count) for count in values.get("bundles", "").split(".") if count)
    return RayOption(address, None if gpus == "None" else int(gpus), placement, bundles)


def find_room(option: RayOption, layout: Layout, *, cpu: bool, backend: str) -> tuple[RayOption, Layout, str]:
    """Ask Ray how many ranks each of its nodes has room for.

    Args:
        option: What was asked for.
        layout: What was planned.
        cpu: Whether ranks are to use CPUs only.
        backend: The backend that was asked for, or ``auto``.

    Returns:
        The option and the layout with what was found, and the address of one of the nodes.

    Raises:
        StartError: Ray cannot be reached, or has no room; the message says what is missing.
    """
    if cpu and option.gpus_per_rank:
        raise UsageError("--gpus-per-rank 1 and --devices cpu exclude each other.")
    program = RayProgram()
    found = program.ask(
        "look",
        address=option.address,
        num_ranks=layout.num_ranks,
        gpus_per_rank=0 if cpu else option.gpus_per_rank,
        placement=option.placement,
    )
    gpus = found["gpus_per_rank"]
    option = replace(option, gpus_per_rank=gpus, bundles=tuple(found["counts"]), program=program)
    kind, usual, visible = ("cuda:0", "nccl", None) if gpus else ("cpu", "gloo", "")
    chosen = usual if backend == "auto" else backend
    layout = replace(layout, devices=(kind,) * layout.num_ranks, backend=chosen, visible=visible)
    return option, layout, str(found["ip"])


class RayProgram:
    """The process in which Ray is used, for one start, repair or check."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._unread = b""
        self._option = RayOption()
        self._hosts: tuple[str, ...] = ()
        self._placed: dict[str, Any] | None = None
        pipe = subprocess.PIPE
        # Not in the kernel's process group, which Jupyter's stop button signals.
        self.process = subprocess.Popen(_PROGRAM, stdin=pipe, stdout=pipe, stderr=self._errors, start_new_session=True)

    def ask(self, command: str, **request: object) -> dict[str, Any]:
        """Have it run a function of `axon_nb.host.ray`, and return what that returns.

        Raises:
            StartError: it failed; the message says why.
        """
        try:
            self._send(command, **request)
            answer = self._answer(_LOOK_TIMEOUT_S)
            if answer is None:
                raise StartError(f"Ray did not respond within {_LOOK_TIMEOUT_S:.0f} s: see `ray status`.")
        except BaseException:
            self.process.terminate()
            self.leave()
            raise
        return answer

    def _send(self, command: str, **request: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # if it has exited, what it wrote says why
            self.process.stdin.write(json.dumps({"command": command, **request}).encode() + b"\n")
            self.process.stdin.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        end = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            if not (data := os.read(self.process.stdout.fileno(), 1 << 16)):
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no output"]
                raise StartError(f"The process that uses Ray has exited: {lines[-1]}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise StartError(answer["refused"])
        return answer

    def place(
        self, option: RayOption, hosts: tuple[str, ...], cluster: str, address: str, *, key: bytes, timeout_s: float
    ) -> None:
        """Begin to place hosts in Ray, whose agents then join; `placed` says where.

        Args:
            option: What Ray has room for.
            hosts: Those that get an agent.
            cluster: A name for the cluster that no other one has.
            address: Where agents join, ``ip:port``.
            key: The cluster's key.
            timeout_s: How long Ray may take for its part.
        """
        self._option, self._hosts = option, hosts
        bundle = [{"CPU": count, **({"GPU": count} if option.gpus_per_rank else {})} for count in option.bundles]
        self._send(
            "place",
            address=option.address,
            name=f"axon_nb-{cluster}",
            title=f"axon_nb of {getpass.getuser()}, {cluster}",
            bundles=bundle,
            strategy=option.placement.upper(),
            hosts={host: int(host.removeprefix(_PREFIX)) for host in hosts},
            join=address,
            key=key.decode(),
            timeout_s=timeout_s,
        )

    def raise_if_failed(self, timeout_s: float = 0.0) -> None:
        """Raise if a host cannot be placed, or not join.

        Raises:
            StartError: why, and what to do.
        """
        try:
            self._placed = self._placed or self._answer(timeout_s)
        except StartError as error:
            names = ", ".join(self._hosts)
            who = f"One of the hosts {names}" if len(self._hosts) > 1 else f"The host {names!r}"
            fix = f": {_INSTALL}." if "No module named" in str(error) and "axon_nb" in str(error) else ""
            raise StartError(f"{who} cannot join: {error}{fix}") from None

    def placed(self, timeout_s: float) -> list[str]:
        """Say where Ray has placed the hosts, and which of them have other versions than this one.

        Raises:
            StartError: it has not, or not within `timeout_s` seconds.
        """
        from importlib import metadata

        self.raise_if_failed(timeout_s)
        if self._placed is None:
            raise StartError(f"Ray did not say within {timeout_s:.0f} s where it has placed the hosts.")
        own = {"python": ".".join(map(str, sys.version_info[:3])), "torch": metadata.version("torch")}
        lines = []
        for host, facts in self._placed.items():
            count = self._option.bundles[int(host.removeprefix(_PREFIX))]
            lines.append(f"Ray placed {host} ({count} rank{'s' * (count != 1)}) on {facts['node']} ({facts['ip']}).")
            lines += [
                f"{host} has {package} {facts[package] or 'not installed'}, the notebook {version}: what is pushed or "
                "pulled may not load there. Use the same version."
                for package, version in own.items()
                if facts[package] != version
            ]
        return lines

    def leave(self) -> None:
        """Have it end when it is done; a thread reaps it, so that a long-lived kernel keeps no zombie."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        threading.Thread(target=self.process.wait, name="axon_nb-host-reaper", daemon=True).start()


def check_ray(address: str) -> dict[str, Any]:
    """Return what there is in Ray, and for each node its versions and whether it reaches this host.

    Raises:
        StartError: Ray cannot be reached; the message says why.
    """
    program = RayProgram()
    found = program.ask("check", address=address)
    program.leave()
    return found


def raise_if_unreserved(text: str, num_ranks: int) -> None:
    """Refuse more ranks than Ray has reserved resources for.

    Args:
        text: The option `--hosts` with which the cluster was started.
        num_ranks: The ranks that there are to be.

    Raises:
        UsageError: there would be more.
    """
    if num_ranks <= (reserved := sum(parse_ray(text).bundles)):
        return
    raise UsageError(
        f"Ray has reserved resources for {reserved} ranks, and a placement group cannot grow. Save a checkpoint, run "
        f"`%distributed stop` and `%distributed start -n {num_ranks} --hosts ray`, then load it."
    )
