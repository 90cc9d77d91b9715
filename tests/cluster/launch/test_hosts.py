"""What `start` needs to know of several hosts, and where ranks are placed."""

from __future__ import annotations

import pytest

from axon_nb.cluster.launch.placement import Layout, interface_ip, place_ranks, plan_layout
from axon_nb.errors import StartError, UsageError
from axon_nb.records.hooks import Verdict
from axon_nb.records.protocol.agent import EngineInfo
from axon_nb.records.protocol.wire import own_version


def test_interface_is_given_by_name_or_address() -> None:
    assert interface_ip("lo") == interface_ip("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"--interface nonesuch: this host has no such interface or address"):
        interface_ip("nonesuch")


def test_several_hosts_require_num_ranks() -> None:
    with pytest.raises(UsageError, match="Several hosts need `-n`"):
        plan_layout(None, several_hosts=True)
    with pytest.raises(UsageError, match="--devices must be auto or cpu with ranks on several hosts; got 0,1"):
        plan_layout(2, devices="0,1", several_hosts=True)


def _places(*hosts: str, gpus: int = 0) -> list[EngineInfo]:
    return [EngineInfo(host, 1, 6, gpus, own_version(), Verdict("", "", 0.0, ())) for host in hosts]


def test_placements_follow_the_hosts() -> None:
    layout = Layout(3, "nccl", ("cuda:0",) * 3, None, 1)
    found = place_ranks(layout, _places("a", "b", "a", gpus=2))
    shown = [(s.local_rank, s.local_world_size, s.node_rank, s.device, s.threads) for s in found]
    assert shown == [(0, 2, 0, "cuda:0", 3), (0, 1, 1, "cuda:0", 6), (1, 2, 0, "cuda:1", 3)]
    with pytest.raises(StartError, match="a has 2 ranks and 1 GPU"):
        place_ranks(layout, _places("a", "b", "a", gpus=1))
    assert place_ranks(layout, _places("a", "b", "a", gpus=2), threads_per_rank=2)[1].threads == 2


def test_ranks_that_are_all_on_one_other_host_use_all_its_gpus() -> None:
    layout = Layout(2, "nccl", ("cuda:0",) * 2, None, 1, hosts=("a", "a"))
    assert [s.device for s in place_ranks(layout, _places("a", "a", gpus=2))] == ["cuda:0", "cuda:1"]
