"""Ray's part of `--hosts`: what the option means, which hosts Ray has room for, and the process that places them there.

Each host of the cluster is a bundle of a placement group.
"""

from __future__ import annotations

import getpass
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Self

from axon_nb.cluster.launch.placement import Layout, address_towards
from axon_nb.cluster.launch.program import SchedulerOption, SchedulerProgram
from axon_nb.errors import StartError, UsageError

if TYPE_CHECKING:
    from axon_nb.cluster.launch.connection import Connection

PLACEMENTS = ("pack", "spread")


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
