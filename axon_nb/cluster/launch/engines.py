"""Launching one engine a rank with an ipyparallel launcher, and waiting until all are registered."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from concurrent.futures import Future
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import psutil
from ipyparallel.cluster.launcher import LocalEngineSetLauncher
from IPython.paths import get_ipython_dir
from traitlets.config import Config
from traitlets.config.loader import ConfigFileNotFound, PyFileConfigLoader
from traitlets.utils.importstring import import_item

from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.launchers import AgentControllerLauncher, ForkedEngineSetLauncher
from axon_nb.cluster.launch.placement import LOOPBACK, Layout
from axon_nb.cluster.rpc.client import RankClient
from axon_nb.errors import StartError, UsageError
from axon_nb.records.protocol.agent import Exit

__all__ = ["launch_engines", "launcher_class", "rank_environment", "shut_down_foreign", "stop_engines"]

_ON_THIS_HOST = ("axon", "local")
_SHUTDOWN_S = 30.0
"""Seconds for the engines to end before their controller does.

ipyparallel's nanny of an engine never ends when the controller goes while an answer is on its way to it
(its control socket lingers without limit; seen with 9.1), so a busy machine gets time.
"""


def launch_engines(connection: Connection, layout: Layout, *, engines: str, timeout_s: float) -> ipp.Cluster:
    """Launch one engine a rank with the ipyparallel launcher called `engines`, and wait until all are registered.

    Raises:
        StartError: one ended or did not register within `timeout_s` seconds; the message has its last lines.
    """
    run_dir = connection.run_dir
    cluster = ipp.Cluster(
        engines=launcher_class(engines),
        controller=AgentControllerLauncher,
        profile_dir=str(run_dir.profile),
        cluster_id="",
        cluster_file="",
        load_profile=False,
        shutdown_atexit=False,
        delay=0.0,
        log=logging.getLogger("axon_nb.ipyparallel"),
        parent=None,
        config=launcher_config() if engines not in _ON_THIS_HOST else Config(),
    )
    cluster.start_controller_sync()
    options: dict[str, Any] = {"engine_set_id": "ranks"}
    env = rank_environment(layout)
    if engines == "axon":
        options |= {"agent": connection.agent, "rank_env": env}
    else:
        if connection.ip != LOOPBACK:
            env.pop("OMP_NUM_THREADS")  # each host has its own number of cores; torch is told when the rank joins
        options |= {"environment": env}
        _precreate_logs(connection, layout.num_ranks)
    deaths: dict[int, int] = {}
    connection.agent.on_event(lambda event: deaths.update({event.rank: event.code} if isinstance(event, Exit) else {}))
    end = time.monotonic() + timeout_s
    try:
        _start_engines(cluster, layout.num_ranks, options, name=engines, timeout_s=timeout_s)
        timeout_s = max(1.0, end - time.monotonic())
        _await_engines(connection, cluster, set(range(layout.num_ranks)), deaths=deaths, timeout_s=timeout_s)
    except BaseException:
        stop_engines(cluster, engines)
        raise
    return cluster


def _start_engines(
    cluster: ipp.Cluster, num_ranks: int, options: dict[str, Any], *, name: str, timeout_s: float
) -> None:
    # ssh and the like block for as long as another host pleases: in a thread, which is left behind when it is too long.
    launched: Future[Any] = Future()

    def start() -> None:
        try:
            launched.set_result(cluster.start_engines_sync(num_ranks, **options))
        except BaseException as error:
            launched.set_exception(error)

    if name in _ON_THIS_HOST:
        start()
    else:
        threading.Thread(target=start, name="axon_nb-launch", daemon=True).start()
    try:
        launched.result(timeout_s)
    except TimeoutError:
        raise StartError(f"The engine launcher {name!r} has not started the ranks within {timeout_s:.0f} s.") from None
    except Exception as error:
        raise StartError(f"The engine launcher {name!r} failed: {error}") from error
    started = int(cluster.engines["ranks"].n)
    if started < num_ranks:
        raise StartError(
            f"The engine launcher {name!r} has places for {started} of {num_ranks} ranks: "
            f"`ipcluster_config.py` in {_profile_folder()} names its hosts."
        )


def _await_engines(
    connection: Connection, cluster: ipp.Cluster, wanted: set[int], *, deaths: dict[int, int], timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    hint = _far_hint(connection, cluster.engine_launcher_class)
    while not connection.client.wait_registered(wanted, 0.1):
        _raise_if_dead(connection, deaths)
        _raise_if_ended(cluster.engines["ranks"], hint)
        if time.monotonic() > end:
            there, said = connection.client.registered, _last_words(cluster.engines["ranks"])
            raise StartError(
                f"Only engines {there} of {sorted(wanted)} registered within {timeout_s:.0f} s"
                f"{f', and the launcher says: {said}' if said else '.'}{hint}"
            )


def stop_engines(cluster: ipp.Cluster, engines: str) -> None:
    """End the engines of other launchers than ours; the host agent ends its own."""
    if engines == "axon":
        return
    with contextlib.suppress(Exception):  # whatever is left ends when it misses the controller's heartbeat
        for launcher in getattr(cluster.engines["ranks"], "launchers", {}).values():
            launcher._output = ""  # else the output file of each is fetched from its host first, and told as lost
        cluster.stop_engines_sync()


def shut_down_foreign(client: RankClient, launched: ipp.Cluster | None, *, engines: str, num_ranks: int) -> None:
    """End the engines of other launchers than ours; the host agent ends its own.

    Args:
        client: The cluster's client.
        launched: ipyparallel's own object of the engines; None: another process launched them.
        engines: Name of the launcher.
        num_ranks: How many engines there are.
    """
    if launched is not None:
        stop_engines(launched, engines)
    elif engines != "axon":
        with contextlib.suppress(Exception):
            client.shutdown(targets="all", hub=False, block=False)
            # A client that closes before the request is out takes it along.
            client.wait_unregistered(range(num_ranks), _SHUTDOWN_S)


def launcher_config() -> Config:
    """What the user has set for ipyparallel's launchers, such as the hosts of `ssh`.

    It is in `ipcluster_config.py` of IPython's default profile, where ipyparallel itself looks.
    """
    try:
        return PyFileConfigLoader("ipcluster_config.py", path=str(_profile_folder())).load_config()
    except ConfigFileNotFound:
        return Config()


def _profile_folder() -> Path:
    return Path(get_ipython_dir()) / "profile_default"


def launcher_class(engines: str) -> Any:
    """The ipyparallel launcher of that name, or the class that a dotted name says.

    Raises:
        UsageError: nobody has registered it.
    """
    if engines == "axon":
        return ForkedEngineSetLauncher
    if "." in engines:
        try:
            return import_item(engines)
        except ImportError as error:
            raise UsageError(f"--engines {engines}: {error}.") from None
    known = {point.name: point for point in entry_points(group="ipyparallel.engine_launchers")}
    if engines.lower() not in known:
        raise UsageError(
            f"--engines {engines}: no ipyparallel launcher of that name; there are {', '.join(sorted(known))}."
        )
    return known[engines.lower()].load()


def rank_environment(layout: Layout) -> dict[str, str]:
    """Environment variables of ranks besides the notebook's own."""
    env = {"OMP_NUM_THREADS": str(layout.threads)}
    if layout.visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = layout.visible
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers the cards, which named them
    return env


def _far_hint(connection: Connection, launcher: type) -> str:
    if launcher in (ForkedEngineSetLauncher, LocalEngineSetLauncher):
        return ""
    if connection.ip == LOOPBACK:
        return " If they are on other hosts: `--interface NAME` names the network interface by which they reach this."
    return f" They must reach {connection.ip}, and have axon_nb installed; `ipcluster_config.py` sets their Python."


def _precreate_logs(connection: Connection, num_ranks: int) -> None:
    # ipyparallel opens its logs with the user's umask; a file that is there keeps its mode.
    folder = connection.run_dir.profile / "log"
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in [*(f"ipengine--ranks-{index}" for index in range(num_ranks)), f"ipengine-ranks-{os.getpid()}"]:
        path = folder / f"{name}.log"
        path.touch(mode=0o600)
        path.chmod(0o600)


def _raise_if_dead(connection: Connection, deaths: dict[int, int]) -> None:
    if connection.agent.closed.is_set():
        raise StartError(connection.agent.end_reason or "The host agent ended while the ranks were starting.")
    for rank, code in deaths.items():
        log = connection.run_dir.profile / "log" / f"rank{rank}.log"
        lines = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
        raise StartError(
            f"Rank {rank} ended with code {code} while starting: {' | '.join(lines) or 'it wrote nothing'}"
        )


def _raise_if_ended(launcher: Any, hint: str) -> None:
    """Notice processes that ipyparallel's own launchers started on this host and that are gone again."""
    for part in _parts(launcher):
        process = getattr(part, "process", None)
        if process is not None and (not process.is_running() or _is_zombie(process)):
            raise StartError(f"An engine ended while starting: {_output(part) or 'it wrote nothing'}{hint}")


def _parts(launcher: Any) -> list[Any]:
    return list(getattr(launcher, "launchers", {}).values()) or [launcher]


def _is_zombie(process: psutil.Process) -> bool:
    # Nobody has waited for it yet: it counts as running for psutil.
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _last_words(launcher: Any) -> str:
    """What processes of ipyparallel's own launchers on this host wrote, where one of them still runs."""
    with contextlib.suppress(Exception):  # launchers of others, and files that are not there yet
        parts = [part for part in _parts(launcher) if getattr(part, "process", None) is not None]
        return next(filter(None, map(_output, parts)), "")
    return ""


def _output(part: Any) -> str:
    text = str(part.get_output()).strip().splitlines()
    return " | ".join([line for line in text if "Error" in line][-1:] or text[-5:])
