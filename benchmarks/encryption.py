"""A controller on TCP with CurveZMQ against one without, which were started in turn: `make bench`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.engines import join_world, launch_engines
from axon_nb.cluster.launch.launchers import controller_command
from axon_nb.cluster.launch.placement import LOOPBACK, plan_layout
from axon_nb.cluster.rpc import connect, handshake
from axon_nb.cluster.settings import Settings
from axon_nb.host.client import AgentClient, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.recovery import ENGINE_ENTRY
from benchmarks.pairs import PairedRow
from benchmarks.report import write

PUSHED = 16_000_000
START_LIMIT, CELL_LIMIT = 1.1, 1.1
_TIMEOUT_S = 300.0
_PEER = "without CURVE"


def open_cluster(*, encrypted: bool) -> Connection:
    """Start two ranks whose controller listens on loopback."""
    run_dir = RunDir.create()
    command = controller_command(run_dir, ip=LOOPBACK)
    if not encrypted:
        command = [word for word in command if "enable_curve" not in word]
    pid = spawn_agent(run_dir, controller=command, entry=ENGINE_ENTRY)
    agent = AgentClient(run_dir, owner="benchmark", agent_pid=pid)
    client = connect(run_dir.client_file, timeout_s=_TIMEOUT_S, alive=lambda: True)
    connection = Connection(run_dir, agent, client)
    layout = plan_layout(2, devices="cpu", backend="auto", threads=1)
    launch_engines(connection, layout, engines="axon", timeout_s=_TIMEOUT_S)
    join_world(connection, layout, Settings(), timeout_s=_TIMEOUT_S)
    return connection


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _start_and_stop(*, encrypted: bool) -> float:
    start = time.perf_counter()
    connection = open_cluster(encrypted=encrypted)
    seconds = time.perf_counter() - start
    connection.stop()
    return seconds


def _cell(connection: Connection) -> float:
    return _seconds(lambda: handshake(connection.client, [0, 1], timeout_s=_TIMEOUT_S, give_up=lambda: False))


def _push(connection: Connection, data: bytes) -> float:
    return _seconds(lambda: connection.client[0].push({"data": data}, block=True))


def rows(*, starts: int, cells: int, pushes: int) -> list[PairedRow]:
    """A row for a start, an empty cell and a push."""
    pairs = [(_start_and_stop(encrypted=True), _start_and_stop(encrypted=False)) for _ in range(starts)]
    measured = [PairedRow.of_ratios("start of 2 ranks", pairs, START_LIMIT, peer=_PEER)]
    on, off = open_cluster(encrypted=True), open_cluster(encrypted=False)
    pairs = [(_cell(on), _cell(off)) for _ in range(cells)]
    measured.append(PairedRow.of_ratios("empty cell on 2 ranks", pairs, CELL_LIMIT, peer=_PEER))
    data = os.urandom(PUSHED)
    pairs = [(_push(on, data), _push(off, data)) for _ in range(pushes)]
    measured.append(PairedRow.of_ratios("16 MB to a rank over loopback", pairs, None, peer=_PEER))
    on.stop()
    off.stop()
    return measured


def main() -> None:
    """Measure, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs, as a smoke test")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    counts = {"starts": 1, "cells": 10, "pushes": 3} if options.quick else {"starts": 20, "cells": 200, "pushes": 20}
    print(write("encryption", rows(**counts), options.out))


if __name__ == "__main__":
    main()
