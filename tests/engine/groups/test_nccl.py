"""The part of NCCL support that needs no GPU: its environment, and that it stays off without NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.engine.groups import creation
from axon_nb.torch_api import torch_api
from tests.engine.groups.native_ranks import run_on_ranks

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
