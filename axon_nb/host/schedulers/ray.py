"""What `--hosts ray` does in Ray, in a process of its own, so that a notebook can use Ray as it likes.

``look`` finds out how many ranks each node has room for, ``check`` what `axon-nb doctor` reports, and ``place``
reserves a placement group and has the agent of each host join. An actor on Ray's head does the work. It is detached,
so it outlives the notebook, and ends itself when no agent is left. With it Ray ends what it owns: the placement group
and the actor in each bundle.

Run as ``__main__``, the classes here reach Ray's nodes by value: Ray's head needs no axon_nb.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from axon_nb.host.schedulers.serving import Refused, serve

NAMESPACE = "axon_nb"
_ON_HEAD: dict[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
_POLL_S = 0.05
_RETURN_S = 5.0
"""For Ray to return what a cluster that has just been stopped had reserved."""
_AGENT = (
    "import sys; from axon_nb.host.children import set_parent_death_signal; set_parent_death_signal(15); "
    "from axon_nb.cli import main; sys.exit(main())"
)
_PACKAGES = ("axon_nb", "torch", "ray")


class Host:
    """An actor in one bundle: it runs the host's agent as a process that ends with it."""

    def join(self, address: str, name: str, key: str) -> dict[str, str]:
        """Start the agent; return facts of this node once it has joined, or why it cannot as `failure`."""
        import subprocess

        env = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}  # Ray's own debugger
        command = [sys.executable, "-P", "-c", _AGENT, "host", "--join", address, "--read-key", "--name", name]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:  # if it has exited, its output says why
            stdin.write(key + "\n")
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith("Joined "):
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return _facts()
            lines += [line.strip()] if line.strip() else []
        reason = next((line for line in lines if line.startswith("axon-nb: ")), lines[-1] if lines else "no output")
        return {**_facts(), "failure": reason.removeprefix("axon-nb: ")}

    def wait(self) -> int:
        """Return the agent's exit code."""
        return self._process.wait()


class Keeper:
    """A detached actor on Ray's head that owns the placement group and the hosts' actors.

    Args:
        name: Name of the placement group.
        bundles: What each host gets, such as ``{"CPU": 2, "GPU": 2}``.
        strategy: Of the placement group.
        patience_s: How long it waits for a host to join before it gives up; seconds.
    """

    def __init__(self, name: str, bundles: Sequence[Mapping[str, float]], strategy: str, patience_s: float) -> None:
        from ray.util.placement_group import placement_group

        self._bundles, self._patience_s = bundles, patience_s
        self._group = placement_group([dict(one) for one in bundles], strategy=strategy, name=name)
        self._lock = threading.Condition()
        self._running, self._idle_since = 0, time.monotonic()
        self._hosts: dict[int, Any] = {}
        self._facts: dict[str, dict[str, str]] = {}
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def placed(self) -> bool:
        """Whether all bundles have a node; Ray places those of a node that died again."""
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self._group)["state"] == "CREATED")

    def run(self, index: int, address: str, name: str, key: str) -> None:
        """Run the agent of a host in its bundle until it exits; the last one ends this actor."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        with self._lock:
            self._running += 1
        try:
            if index in self._hosts:  # an agent that cannot be reached any more
                ray.kill(self._hosts[index])
            amounts, end = self._bundles[index], time.monotonic() + self._patience_s
            facts = None
            while facts is None:
                host = self._hosts[index] = (
                    ray.remote(Host)
                    .options(
                        num_cpus=amounts["CPU"],
                        num_gpus=amounts.get("GPU", 0),
                        scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                    )
                    .remote()
                )
                try:
                    facts = ray.get(host.join.remote(address, name, key), timeout=max(1.0, end - time.monotonic()))
                except Exception as error:
                    died = isinstance(error, ray.exceptions.ActorDiedError)
                    if died and time.monotonic() < end:  # Ray has not noticed yet that the bundle's node is dead
                        time.sleep(1.0)
                    else:
                        facts = {"failure": str(error).strip().splitlines()[-1]}
            with self._lock:
                self._facts[name] = facts
                self._lock.notify_all()
            if "failure" in facts:
                ray.kill(host)
                time.sleep(_RETURN_S)  # for `place` to ask why
            else:
                with contextlib.suppress(Exception):  # its node died
                    ray.get(host.wait.remote())
        finally:
            with self._lock:
                self._running, self._idle_since = self._running - 1, time.monotonic()
                if not self._running:
                    self._end()

    def facts(self, wait_s: float) -> dict[str, dict[str, str]]:
        """Return, once, the facts of those hosts that have joined, or failed to; if there are none, wait for some."""
        with self._lock:
            self._lock.wait_for(lambda: self._facts, wait_s)
            found, self._facts = self._facts, {}
        return found

    def _end_when_idle(self) -> None:
        while self._running or time.monotonic() - self._idle_since < self._patience_s:
            time.sleep(1.0)
        self._end()

    def _end(self) -> None:
        import ray

        ray.kill(ray.get_runtime_context().current_actor)


def _facts() -> dict[str, str]:
    """Name, address and versions of this node."""
    import platform
    from importlib import metadata

    import ray

    versions = {name: next((one.version for one in metadata.distributions(name=name)), "") for name in _PACKAGES}
    here = {"node": socket.gethostname(), "ip": ray.util.get_node_ip_address(), "python": platform.python_version()}
    return {**here, **versions}


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
    # Of Ray's import, jsonschema's check of international addresses would be three quarters; Ray checks none.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    import ray

    address: str = request["address"]
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for a minute
            socket.create_connection((host.rpartition("/")[2], int(port)), 5.0).close()
        ray.init(address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = address or "the address of RAY_ADDRESS or of this machine"
        raise Refused(
            f"Cannot connect to Ray at {where} ({reason.rstrip('.')}). Run `ray status` where Ray runs, and name its "
            "address, such as `--hosts ray:10.0.0.1:6379`."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def look(ray: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many ranks each host gets, how many GPUs each rank, and the address of a node."""
    end = time.monotonic() + _RETURN_S
    while True:
        survey, gpus = _survey(ray), request["gpus_per_rank"]
        if gpus is None:
            gpus = int(any(node["total"]["GPU"] for node in survey["nodes"]))
        counts = fit(survey["nodes"], request["num_ranks"], gpus, request["placement"])
        if counts:
            return {"counts": counts, "gpus_per_rank": gpus, "ip": survey["nodes"][0]["ip"]}
        if time.monotonic() > end:
            raise Refused(missing(survey, request["num_ranks"], gpus))
        time.sleep(10 * _POLL_S)


def check(ray: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what there is, and for each node its versions and whether it reaches this host."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def visit(ip: str, port: int) -> dict[str, str]:
        try:
            socket.create_connection((ip, port), 5.0).close()
        except OSError as error:
            return {**_facts(), "unreached": f"{ip}: {error}"}
        return _facts()

    with socket.create_server(("", 0)) as server:
        found = _survey(ray)
        for node in found["nodes"]:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((node["ip"], 9))  # sends nothing
                ip = probe.getsockname()[0]
            there = NodeAffinitySchedulingStrategy(node["id"], soft=False)
            task = ray.remote(visit).options(num_cpus=0, scheduling_strategy=there)
            try:
                node.update(ray.get(task.remote(ip, server.getsockname()[1]), timeout=60))
            except Exception as error:
                node["unreached"] = str(error).strip().splitlines()[-1]
        return {**found, "own": _facts()}


def place(ray: Any, request: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Reserve what the hosts need, unless that is done, have their agents join, and return facts of their nodes."""
    hosts: dict[str, int] = request["hosts"]
    keeper, created, end = _find_keeper(ray, request["name"]), False, time.monotonic() + request["timeout_s"]
    if keeper is None:
        options = {**_ON_HEAD, "name": request["name"], "lifetime": "detached", "max_concurrency": 1000}
        arguments = request["bundles"], request["strategy"], 2 * request["timeout_s"]
        keeper, created = ray.remote(Keeper).options(**options).remote(request["title"], *arguments), True
    try:
        while not ray.get(keeper.placed.remote()):
            if time.monotonic() > end:
                wanted = [request["bundles"][index] for index in hosts.values()]
                raise Refused(missing(_survey(ray), sum(one["CPU"] for one in wanted), int("GPU" in wanted[0])))
            time.sleep(_POLL_S)
        ray.get(keeper.facts.remote(0.0))  # of an earlier attempt
        for name, index in hosts.items():
            keeper.run.remote(index, request["join"], name, request["key"])
        facts: dict[str, dict[str, str]] = {}
        while len(facts) < len(hosts):
            facts |= ray.get(keeper.facts.remote(1.0))
            for one in facts.values():
                if "failure" in one:
                    where = f"node {one['node']} ({one['ip']}): " if "node" in one else ""
                    raise Refused(f"{where}{one['failure']}")
        return facts
    except BaseException:
        if created:
            ray.kill(keeper)
        raise


def _find_keeper(ray: Any, name: str) -> Any:
    with contextlib.suppress(Exception):  # there is none, or it is ending
        keeper = ray.get_actor(name)
        ray.get(keeper.placed.remote(), timeout=10)
        return keeper
    return None


if __name__ == "__main__":
    commands = {"look": look, "check": check, "place": place}
    sys.exit(serve(_connected, {name: lambda *given, run=run: [run(*given)] for name, run in commands.items()}))
