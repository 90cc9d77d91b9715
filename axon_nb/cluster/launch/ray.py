"""Ray's part of `--hosts`: what the option means, which hosts Ray has room for, and the program that places them there.

Each host of the cluster is a bundle of a placement group, and called after its number: a bundle that Ray places again
after its node died keeps its name.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from axon_nb.cluster.launch.placement import Layout
from axon_nb.errors import StartError, UsageError

PLACEMENTS = ("pack", "spread")
_PREFIX = "ray-"
_PROGRAM = (sys.executable, "-P", "-m", "axon_nb.host.ray")
_LOOK_TIMEOUT_S = 120.0


class RayOption(Struct, frozen=True):
    """What `--hosts ray` asks for, and what it got."""

    address: str = ""
    """Of Ray; empty: that of RAY_ADDRESS, or of the Ray of this machine."""
    gpus_per_rank: int | None = None
    """0 or 1; None: 1 if Ray has GPUs."""
    placement: str = "pack"
    bundles: tuple[int, ...] = ()
    """How many ranks each host gets; empty until Ray was asked."""

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
    found = ask_ray(
        "look",
        address=option.address,
        num_ranks=layout.num_ranks,
        gpus_per_rank=0 if cpu else option.gpus_per_rank,
        placement=option.placement,
    )
    gpus = found["gpus_per_rank"]
    option = replace(option, gpus_per_rank=gpus, bundles=tuple(found["counts"]))
    kind, usual, visible = ("cuda:0", "nccl", None) if gpus else ("cpu", "gloo", "")
    chosen = usual if backend == "auto" else backend
    layout = replace(layout, devices=(kind,) * layout.num_ranks, backend=chosen, visible=visible)
    return option, layout, str(found["ip"])


def ask_ray(command: str, **request: object) -> dict[str, Any]:
    """Run a command of `axon_nb.host.ray` and return its answer.

    Raises:
        StartError: it failed; the message says why.
    """
    try:
        done = subprocess.run(
            [*_PROGRAM, command, json.dumps(request)],
            capture_output=True,
            text=True,
            timeout=_LOOK_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"Ray did not respond within {_LOOK_TIMEOUT_S:.0f} s: see `ray status`.") from None
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    if done.returncode:
        raise StartError(lines[-1].removeprefix("axon-nb: "))
    return dict(json.loads(lines[-1]))


def place_command(option: RayOption, hosts: Sequence[str], cluster: str, address: str, timeout_s: float) -> list[str]:
    """Return the command line that places hosts in Ray and has their agents join.

    Args:
        option: What Ray has room for.
        hosts: Those that get an agent.
        cluster: A name for the cluster that no other one has.
        address: Where agents join, ``ip:port``.
        timeout_s: How long Ray may take for its part.
    """
    bundle = [{"CPU": count, **({"GPU": count} if option.gpus_per_rank else {})} for count in option.bundles]
    request = {
        "address": option.address,
        "name": f"axon_nb-{cluster}",
        "title": f"axon_nb of {getpass.getuser()}, {cluster}",
        "bundles": bundle,
        "strategy": option.placement.upper(),
        "hosts": {host: int(host.removeprefix(_PREFIX)) for host in hosts},
        "join": address,
        "timeout_s": timeout_s,
    }
    return [*_PROGRAM, "place", json.dumps(request)]


def describe_placed(output: str, option: RayOption) -> list[str]:
    """Say where Ray has placed the hosts, and which of them have other versions than this one.

    Args:
        output: What the program of `place_command` printed.
        option: What Ray had room for.
    """
    from importlib import metadata

    placed: Mapping[str, Mapping[str, str]] = json.loads(output.strip().splitlines()[-1])
    own = {"python": ".".join(map(str, sys.version_info[:3])), "torch": metadata.version("torch")}
    lines = []
    for host, facts in placed.items():
        count = option.bundles[int(host.removeprefix(_PREFIX))]
        lines.append(f"Ray placed {host} ({count} rank{'s' * (count != 1)}) on {facts['node']} ({facts['ip']}).")
        lines += [
            f"{host} has {package} {facts[package] or 'not installed'}, the notebook {version}: what is pushed or "
            "pulled may not load there. Use the same version."
            for package, version in own.items()
            if facts[package] != version
        ]
    return lines


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
