"""What `--hosts ray` does in Ray, in a process of its own, so that a notebook can use Ray as it likes.

``look`` finds out how many ranks each node has room for and reserves it, ``check`` what `axon-nb doctor` reports, and
``place`` has the agent of each host join. The process that has reserved a placement group stays as long as the
notebook's agent. When it ends, however that is, Ray removes the group, and with it the actor in each bundle.

Run as ``__main__``, the class here reaches Ray's nodes by value.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from axon_nb.host.run_dir import RunDir
from axon_nb.host.schedulers.serving import Refused, serve

NAMESPACE = "axon_nb"
_ON_HEAD: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
_POLL_S = 0.5
_RETURN_S = 5.0
"""For Ray to return what a cluster that has just been stopped had reserved."""
_AGENT = (
    "import sys; from axon_nb.host.children import set_parent_death_signal; set_parent_death_signal(15); "
    "from axon_nb.cli import main; sys.exit(main())"
)
_PACKAGES = ("axon_nb", "torch", "ray")


class Host:
    """An actor in one bundle: it runs the host's agent as a process that ends with it."""

    _agent: Any = None

    def join(self, address: str, name: str, key: str) -> dict[str, str]:
        """Start the agent; return facts of this node once it has joined, or why it cannot as `failure`."""
        import subprocess

        if self._agent is not None:  # it cannot be reached any more
            self._agent.kill()
        env = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}  # Ray's own debugger
        command = [sys.executable, "-P", "-c", _AGENT, "host", "--join", address, "--read-key", "--name", name]
        pipe = subprocess.PIPE
        agent = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self._agent = agent
        assert agent.stdin is not None
        assert agent.stdout is not None
        with contextlib.suppress(OSError), agent.stdin as stdin:  # if it has exited, its output says why
            stdin.write(key + "\n")
        lines: list[str] = []
        for line in agent.stdout:
            if line.startswith("Joined "):
                threading.Thread(target=agent.stdout.read, daemon=True).start()
                return _facts()
            lines += [line.strip()] if line.strip() else []
        reason = next((line for line in lines if line.startswith("axon-nb: ")), lines[-1] if lines else "no output")
        return {**_facts(), "failure": reason.removeprefix("axon-nb: ")}


def _facts() -> dict[str, str]:
    """Name, address and versions of this node."""
    import platform
    from importlib import metadata

    import ray

    versions = {name: next((one.version for one in metadata.distributions(name=name)), "") for name in _PACKAGES}
    here = {"node": socket.gethostname(), "ip": ray.util.get_node_ip_address(), "python": platform.python_version()}
    return {**here, **versions}


def _visit(ip: str, port: int) -> dict[str, str]:
    """Facts of this node, and why it cannot connect there, if so."""
    try:
        socket.create_connection((ip, port), 5.0).close()
    except OSError as error:
        return {**_facts(), "unreached": f"{ip}: {error}"}
    return _facts()


def _survey(ray: Any) -> dict[str, Any]:
    """What Ray's nodes have, what is free there, and which placement groups hold the rest."""
    if ray.util.client.ray.is_connected():  # a client has no view of the nodes
        found: dict[str, Any] = ray.get(ray.remote(_survey_here).options(**_ON_HEAD).remote())
        return found
    return _survey_here()


def _survey_here() -> dict[str, Any]:
    import ray
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group_table

    free = available_resources_per_node()
    nodes = [
        {
            "id": node["NodeID"],
            "name": node["NodeManagerHostname"],
            "ip": node["NodeManagerAddress"],
            "total": {kind: node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU")},
            "free": {kind: free.get(node["NodeID"], {}).get(kind, 0.0) for kind in ("CPU", "GPU")},
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    groups = {}
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            held = [sum(bundle.get(kind, 0) for bundle in group["bundles"].values()) for kind in ("CPU", "GPU")]
            groups[group["name"] or group["placement_group_id"][:8]] = held
    return {"nodes": nodes, "groups": groups}


def fit(nodes: Sequence[Mapping[str, Any]], num_ranks: int, gpus_per_rank: int, placement: str) -> list[int]:
    """Return how many ranks each host gets, one CPU each: on few nodes (``pack``) or evenly on all (``spread``).

    Empty if there is no room.
    """
    rooms = []
    for node in nodes:
        room = int(node["free"]["CPU"])
        rooms.append(min(room, int(node["free"]["GPU"]) // gpus_per_rank) if gpus_per_rank else room)
    rooms.sort(reverse=True)
    if sum(rooms) < num_ranks:
        return []
    counts = [0] * len(rooms)
    for _ in range(num_ranks):
        usable = [index for index, room in enumerate(rooms) if counts[index] < room]
        counts[usable[0] if placement == "pack" else min(usable, key=counts.__getitem__)] += 1
    return [count for count in counts if count]


def missing(survey: Mapping[str, Any], num_ranks: int, gpus_per_rank: int) -> str:
    """Say which room is missing for that many ranks, and which placement groups hold it."""
    each = f"1 CPU{f' and {gpus_per_rank} GPU' if gpus_per_rank else ''}"
    kinds = ("CPU", "GPU") if gpus_per_rank else ("CPU",)
    free = ", ".join(
        f"{node['name']} ({node['ip']}) {' and '.join(_of(node, kind) for kind in kinds)}"
        for node in survey["nodes"]
        if node["total"]["CPU"]
    )
    held = ", ".join(f"{name!r} {cpus:g} CPUs, {gpus:g} GPUs" for name, (cpus, gpus) in survey["groups"].items())
    return (
        f"Ray has no room for {num_ranks} rank{'s' * (num_ranks != 1)} with {each} each. Free: {free or 'no node'}. "
        f"Placement groups: {held or 'none'}. Use a smaller `-n`, or wait for room."
    )


def _of(node: Mapping[str, Any], kind: str) -> str:
    return f"{node['free'][kind]:g} of {node['total'][kind]:g} {kind}s"


@contextlib.contextmanager
def _connected(request: Mapping[str, Any]) -> Iterator[Any]:
    # Of Ray's import, jsonschema's checks of addresses would be three quarters; Ray needs none of them.
    sys.modules |= dict.fromkeys(("rfc3987_syntax", "rfc3986_validator"))  # type: ignore[arg-type]
    import ray

    address: str = request["where"]
    address = f"ray:{address}" if address.startswith("//") else address  # a Ray client's
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for a minute
            socket.create_connection((host.rpartition("/")[2], int(port)), 5.0).close()
        ray.init(address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[-1 if "Traceback" in str(error) else 0]
        where = address or "the address of RAY_ADDRESS or of this machine"
        raise Refused(
            f"Cannot connect to Ray at {where} ({reason.rstrip('.')}). Run `ray status` where Ray runs, and name its "
            "address, such as `--hosts ray:10.0.0.1:6379`."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def look(ray: Any, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Reserve room; say how many ranks each host gets, how many GPUs each rank, and the address of a node."""
    from ray.util.placement_group import placement_group

    num_ranks, gpus, end = request["num_ranks"], request["gpus_per_rank"], time.monotonic() + _RETURN_S
    survey = _survey(ray)
    ip = request["ip"] or _own_ip(survey["nodes"][0]["ip"])
    if ray.util.client.ray.is_connected():
        _raise_if_unreached(ray, ip)
    if gpus is None:
        gpus = int(any(node["total"]["GPU"] for node in survey["nodes"]))
    while not (counts := fit(survey["nodes"], num_ranks, gpus, request["placement"])) and time.monotonic() < end:
        time.sleep(_POLL_S)
        survey = _survey(ray)
    name = _group_name(ray)
    bundles = [{"CPU": count, **({"GPU": count} if gpus else {})} for count in counts]
    if not counts or not placement_group(bundles, request["placement"].upper(), name).wait(_RETURN_S):
        raise Refused(missing(_survey(ray), num_ranks, gpus))
    yield {"bundles": counts, "gpus_per_rank": gpus, "ip": ip, "group": name}
    for index in range(len(counts)):  # their processes begin while the notebook starts a controller
        _actor(ray, name, index)


def _raise_if_unreached(ray: Any, ip: str) -> None:
    """Refuse a client that is outside of the network of Ray's nodes."""
    with socket.create_server(("", 0)) as server:
        facts = ray.get(ray.remote(_visit).options(**_ON_HEAD).remote(ip, server.getsockname()[1]))
    if "unreached" in facts:
        raise Refused(
            f"Ray's nodes cannot connect to this host at {facts['unreached']}. Ranks must: name the interface on which "
            "nodes reach it with `--interface`, or run the notebook on a node."
        )


def _group_name(ray: Any) -> str:
    return f"axon_nb of {getpass.getuser()}, job {ray.get_runtime_context().get_job_id()}"


def _actor(ray: Any, group_name: str, index: int) -> Any:
    """Return the actor in a bundle, a new one if there is none or its node died."""
    from ray.util import get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = get_placement_group(group_name)
    amounts = group.bundle_specs[index]
    options = {
        "name": f"{group_name}, host {index}",
        "get_if_exists": True,
        "lifetime": "detached",  # ends with the group, also if a repair has made it
        "max_concurrency": 2,
        "num_cpus": amounts["CPU"],
        "num_gpus": amounts.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
    }
    return ray.remote(Host).options(**options).remote()


def _own_ip(node: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((node, 9))  # sends nothing
        return str(probe.getsockname()[0])


def check(ray: Any, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Say what there is, and for each node its versions and whether it reaches this host."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with socket.create_server(("", 0)) as server:
        found = _survey(ray)
        for node in found["nodes"]:
            there = NodeAffinitySchedulingStrategy(node["id"], soft=False)
            task = ray.remote(_visit).options(num_cpus=0, scheduling_strategy=there)
            try:
                node.update(ray.get(task.remote(_own_ip(node["ip"]), server.getsockname()[1]), timeout=60))
            except Exception as error:
                node["unreached"] = str(error).strip().splitlines()[-1]
        yield {**found, "own": _facts()}


def place(ray: Any, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Have the agents of hosts join, and say where they are; then keep the group, if this process has reserved it."""
    from ray.util import get_placement_group

    counts, timeout_s = request["hosts"], request["timeout_s"] / 2
    facts, end = dict[str, dict[str, str]](), time.monotonic() + timeout_s

    def join(host: str) -> Any:
        actor = _actor(ray, request["group"], int(host.rpartition("-")[2]))
        return actor.join.remote(request["join"], host, request["key"])

    calls = {join(host): host for host in counts}
    while calls:
        done, _ = ray.wait([*calls], timeout=max(1.0, end - time.monotonic()))
        if not done:
            if get_placement_group(request["group"]).wait(1):
                raise Refused(f"Ray has not started {', '.join(calls.values())} within {timeout_s:.0f} s.")
            raise Refused(missing(_survey(ray), sum(counts[host] for host in calls.values()), request["gpus_per_rank"]))
        host = calls.pop(done[0])
        try:
            found = ray.get(done[0])
        except ray.exceptions.RayError as error:
            if time.monotonic() > end or not isinstance(error, ray.exceptions.RayActorError):
                raise Refused(str(error).strip().splitlines()[-1]) from None
            time.sleep(_POLL_S)  # Ray has not noticed yet that the bundle's node is dead
            calls[join(host)] = host
            continue
        if "failure" in found:
            raise Refused(f"node {found['node']} ({found['ip']}): {found['failure']}")
        facts[host] = found
    yield {"placed": [line for host in counts for line in _describe(host, counts[host], facts[host])]}
    if request["group"] == _group_name(ray):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as agent:
            agent.connect(str(RunDir(Path(request["folder"])).agent_socket))
            agent.recv(1)  # until it ends


def _describe(host: str, count: int, facts: Mapping[str, str]) -> Iterator[str]:
    yield f"Ray placed {host} ({count} rank{'s' * (count != 1)}) on {facts['node']} ({facts['ip']})."
    own = _facts()
    for package in ("python", "torch"):
        if facts[package] != own[package]:
            yield (
                f"{host} has {package} {facts[package] or 'not installed'}, the notebook {own[package]}: what is "
                "pushed or pulled may not load there. Use the same version."
            )


if __name__ == "__main__":
    sys.exit(serve(_connected, {"look": look, "check": check, "place": place}))
