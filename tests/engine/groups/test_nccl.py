"""What is done for groups of NCCL: they are made by hand, staged on the host, and forgotten by graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.comm.collectives.movement import recv, send
from axon_nb.engine.groups import creation, recovery
from axon_nb.engine.groups.creation import init_default_group
from axon_nb.engine.groups.recovery import graphs_to_capture
from axon_nb.torch_api import torch_api
from tests.engine.groups.native_ranks import GLOO, join_native, run_on_ranks
from tests.support.fake_device import install

# In a process of its own: without a GPU torch ends the process when such a backend is freed.
MAKE_BACKEND = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from axon_nb.engine.groups import creation
from axon_nb.engine.groups.abort import swap_backend
store, device = dist.HashStore(), torch.device("cuda:0")
# Such a group connects on request, and not here.
dist.init_process_group("nccl", store=store, rank=0, world_size=1, enable_reconfigure=True)
group = dist.group.WORLD
first = group._get_backend(torch.device("cuda"))
owned = creation.install_native_groups(store, device=device, timeout=timedelta(seconds=5)).all() == [group]
second = creation._make_nccl(type(first), store, group, first.options, device)
swap_backend(group, second, device)
replaced = group._get_backend(torch.device("cuda")) is second
print(second.name(), owned, replaced, creation._is_nccl(second), isinstance(second, dist.ProcessGroupNCCL), flush=True)
os._exit(0)
"""


def test_required_nccl_variables_are_always_set() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_FR_BUFFER_SIZE": "7"}
    creation.set_nccl_environment(environ, one_host=True)
    assert {name: environ[name] for name in creation.REQUIRED} == dict.fromkeys(creation.REQUIRED, "0")
    assert {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_PROPAGATE_ERROR"} < set(creation.REQUIRED)
    assert environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"
    assert environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_user_may_request_blocking_connections() -> None:
    environ = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}
    creation.set_nccl_environment(environ, one_host=True)
    assert environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "0"


def test_user_socket_choice_and_multiple_hosts_are_respected() -> None:
    many: dict[str, str] = {}
    creation.set_nccl_environment(many, one_host=False)
    assert "NCCL_SOCKET_IFNAME" not in many
    wished = {"NCCL_SOCKET_IFNAME": "eth1"}
    creation.set_nccl_environment(wished, one_host=True)
    assert wished["NCCL_SOCKET_IFNAME"] == "eth1"


def test_sockets_use_the_stores_interface() -> None:
    environ: dict[str, str] = {}
    creation.set_nccl_interface("127.0.0.1", environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "=lo"}
    wished = {"NCCL_SOCKET_IFNAME": "eth1"}
    creation.set_nccl_interface("127.0.0.1", wished)
    assert wished == {"NCCL_SOCKET_IFNAME": "eth1"}


def test_failed_device_is_reported_with_fix() -> None:
    assert creation.device_problem(torch.device("cpu"), rank=1) == ""
    assert creation.device_problem(torch.device("cuda", 0), rank=1) == ""  # not in use
    problem = creation.device_problem(torch.device("cuda", 0), rank=1, launch=_lost)
    assert problem.startswith("Rank 1 cannot use cuda:0 any more (CUDA error: unspecified launch failure). ")
    assert problem.endswith("Run `%distributed repair --ranks 1`.")


def _lost() -> Callable[[], bool]:
    raise RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")


def test_hung_device_is_lost_and_busy_device_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "_BUSY_S", 0.5)
    monkeypatch.setattr(creation, "_DEVICE_TIMEOUT_S", 0.2)
    device = torch.device("cuda", 0)
    assert creation.device_problem(device, rank=1, launch=lambda: lambda: False) == ""
    assert creation.device_problem(device, rank=1, launch=lambda: lambda: True) == ""
    hang = threading.Event()
    problem = creation.device_problem(device, rank=1, launch=lambda: hang.wait)
    hang.set()
    assert problem.startswith("Rank 1 cannot use cuda:0 any more (it has not answered for ")


def _connects(rank: int, store: Any) -> dict[str, Any]:
    """Rank 1 connects later than rank 0: over a Gloo backend, which has no eager connect."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    done = threading.Event()

    def connect() -> None:
        creation.NCCL.start(backend, torch.device("cpu"))
        done.set()

    if rank == 0:
        threading.Thread(target=connect, daemon=True).start()
        early = done.wait(1.0)
        store.set("go on", "1")
        return {"early": early, "late": done.wait(60)}
    store.wait(["go on"])
    connect()
    return {"late": done.is_set()}


def test_connection_completes_once_all_ranks_connect(tmp_path: Path) -> None:
    assert run_on_ranks(_connects, 2, tmp_path) == {0: {"early": False, "late": True}, 1: {"late": True}}


def test_slow_ranks_get_torchs_connection_timeout() -> None:
    environ: dict[str, str] = {}
    creation.set_nccl_environment(environ, one_host=True)
    assert "TORCH_NCCL_NONBLOCKING_TIMEOUT" not in environ  # 30 min in torch


def test_gloo_rank_has_no_nccl_groups() -> None:
    assert creation.native_groups() is None


def test_other_backends_are_not_owned() -> None:
    assert not creation._is_nccl(None)
    assert not creation._is_nccl(dist.ProcessGroupGloo(dist.HashStore(), 0, 1))


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="this torch has no ProcessGroupNCCL2")
def test_groups_of_the_second_nccl_class_are_rebuilt_as_such() -> None:
    assert [kind.__name__ for kind in torch_api().nccl_classes()] == ["ProcessGroupNCCL", "ProcessGroupNCCL2"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    env["TORCH_DIST_USE_NCCL2"] = "1"  # the default from 2.15 on
    made = subprocess.run(
        [sys.executable, "-c", MAKE_BACKEND], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert made.stdout.split() == ["nccl2", "True", "True", "True", "False"], made.stderr[-2000:]


def _join(rank: int, store: Any, backend: str) -> torch.device:
    dist.destroy_process_group()
    device = install()
    place: dict[str, Any] = {"store": store, "rank": rank, "world_size": 2, "device": device}
    init_default_group(backend, **place, timeout_s=60, recoverable=True)
    return device


def _polls(rank: int, store: Any) -> list[list[float]]:
    """Rank 1 asks whether its message is there, and never waits for it."""
    device = _join(rank, store, "shm")
    if rank == 0:
        dist.send(torch.arange(6.0).view(2, 3).to(device), 1)
        return []
    buffer = torch.zeros(2, 3).to(device)
    work = dist.irecv(buffer, 0)
    end = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    return _values(buffer)


def test_polled_receive_has_its_values(tmp_path: Path) -> None:
    assert run_on_ranks(_polls, 2, tmp_path) == {0: [], 1: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]}


def _exchange(rank: int, store: Any) -> dict[str, Any]:
    device = _join(rank, store, "gloo")
    peer, found = 1 - rank, {}
    values = torch.arange(6.0).view(2, 3)

    def received(tensor: torch.Tensor) -> tuple[str, list[list[float]]]:
        return str(tensor.device), _values(tensor)

    buffer = torch.empty(2, 3, device=device).requires_grad_()  # as a pipeline stage's
    if rank == 0:
        dist.send(values.to(device), peer)
    else:
        dist.recv(buffer, peer)
        found["recv"] = received(buffer)

    mine, theirs = (values * (rank + 1)).to(device), torch.empty(2, 3, device=device)
    operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["batch"] = received(theirs)

    group: Any = dist.group.WORLD
    parts = [[torch.empty(2, 3, device=device)] for _ in range(2)]
    group.allgather_coalesced(parts, [mine]).wait()
    found["gather"] = [received(part) for (part,) in parts]

    if rank == 0:
        send(values.to(device), peer)
    else:
        found["new"] = received(recv(peer))
    return found


def _values(tensor: torch.Tensor) -> list[list[float]]:
    host = torch.empty(tensor.shape)
    with torch.no_grad():
        host.copy_(tensor)
    return host.tolist()


def test_tensors_on_a_card_travel_through_host_memory(tmp_path: Path) -> None:
    found = run_on_ranks(_exchange, 2, tmp_path)
    values = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    here = ("standin:0", values)
    doubled = ("standin:0", [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]])
    assert found[0] == {"batch": doubled, "gather": [here, doubled]}
    assert found[1] == {"recv": here, "batch": here, "gather": [here, doubled], "new": here}


class Graph:
    """Stands for `torch.cuda.CUDAGraph`, which needs a GPU."""


KIND = (__name__, "Graph")
SENTENCE = "CUDA graphs still hold the communicators of before: capture those that contain collectives again."


def test_surviving_cuda_graphs_need_recapture() -> None:
    assert graphs_to_capture(KIND) == []
    graph = Graph()
    assert graphs_to_capture(KIND) == [SENTENCE]
    del graph
    assert graphs_to_capture(KIND) == []


def _recovers(rank: int, store: Any) -> list[str]:

    join_native(rank, store, 2, kind=GLOO)
    recovery.graphs_to_capture.__defaults__ = (KIND,)
    kept = [Graph()] if rank == 0 else []
    said = recovery.recover(3).not_reset
    kept.clear()
    return [*said, *recovery.recover(4).not_reset]


def test_recovery_mentions_surviving_cuda_graphs(tmp_path: Path) -> None:
    assert run_on_ranks(_recovers, 2, tmp_path) == {0: [SENTENCE], 1: []}
