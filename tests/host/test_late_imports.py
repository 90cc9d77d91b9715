"""An agent on whose host no rank starts imports torch only when one is to be forked there."""

from __future__ import annotations

import queue

import psutil

from axon_nb.host.client import AgentClient, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.agent import GetInfo
from tests.support.agents import ENTRY, Served


def _has_torch(served: Served) -> bool:
    return any("libtorch" in one.path for one in served.process.memory_maps())


def test_torch_is_imported_for_the_first_rank() -> None:
    run_dir = RunDir.create()
    pid = spawn_agent(run_dir, controller=[], entry=ENTRY, imports_later=True)
    client = AgentClient(run_dir, owner="the tests", agent_pid=pid)
    served = Served(run_dir, client, psutil.Process(pid), queue.SimpleQueue())
    try:
        assert not client.call(GetInfo()).ready  # others import torch before they answer
        assert not _has_torch(served)
        rank, rank_pid = served.fork("wait")
        assert client.call(GetInfo()).ranks == {rank: rank_pid}
        assert _has_torch(served)
    finally:
        served.end()
