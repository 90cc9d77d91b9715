"""Ranks of the tests of `engine.groups.native`: plain processes, and a kind of groups over torch's own Gloo backends.

Gloo stands in for NCCL without a GPU: closing its connections aborts it, which is safe while no operation starts.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from axon_nb.engine.groups import gloo, recovery
from axon_nb.engine.groups.abort import BackendKind, NativeGroups
from axon_nb.engine.groups.creation import all_groups, init_default_group
from axon_nb.engine.groups.recovery import reset_wrappers
from axon_nb.engine.groups.state import current_groups
from axon_nb.records.protocol.recovery import GroupRecord

CPU = torch.device("cpu")
LIMIT = timedelta(seconds=60)


def _connect(store: Store, group: dist.ProcessGroup, ranks: list[int], limit: timedelta, device: torch.device) -> Any:
    state = current_groups()
    cancel = state.abort.raise_if_set
    return state.gloo.connect(store, group.rank(), group.size(), timeout=limit, raise_if_cancelled=cancel)


def _abort(backend: Any) -> None:
    gloo.close_connections(backend)
    current_groups().gloo.abandon(backend)


def _owns(backend: Any) -> bool:
    return isinstance(backend, ProcessGroupGloo) and not any(backend is own._get_backend(CPU) for own in all_groups())


GLOO = BackendKind(
    torch_name="cpu:gloo,cuda:gloo",  # not "gloo", with which recoverable groups are made
    owns=_owns,
    start=lambda backend, device: None,
    connect=_connect,
    abort=_abort,
    connect_timeout_s=60.0,
)


def groups_on(store: Store) -> NativeGroups:
    """The Gloo groups of this process, as those of a kind with an abort."""
    return NativeGroups(GLOO, store, device=CPU, timeout=LIMIT, abort=current_groups().abort)


def rebuild_all(groups: NativeGroups, epoch: int) -> None:
    """Give each of these groups a fresh backend; collective over all ranks."""
    groups.begin_rebuild()
    for group in groups.all():
        groups.rebuild(group, epoch)
    groups.end_rebuild()


def wait_for_threads() -> None:
    """Return when no other thread of this process runs or wants to: what an operation has to do here has begun.

    Gloo hangs when an abort meets an operation that is just beginning.
    """
    quiet = 0
    while quiet < 3:
        states = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if int(task.name) != threading.get_native_id():
                    states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        quiet = quiet + 1 if set(states) <= {"S", "Z", "X"} else 0
        time.sleep(0.01)


def run_on_ranks(body: Callable[..., Any], size: int, folder: Path, **environ: str) -> dict[int, Any]:
    """What `body(rank, store)` returns in each of `size` processes with a default group of torch's own; plain values.

    Args:
        body: A function of a module.
        size: Number of processes.
        folder: An empty one.
        **environ: Environment variables of the processes.
    """
    code = "import sys; from tests.engine.groups.native_ranks import be_rank; be_rank(*sys.argv[1:])"
    arguments = [body.__module__, body.__name__, str(size), str(folder)]
    env = {**os.environ, **environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    processes = []
    for rank in range(size):
        with (folder / f"{rank}.err").open("w") as errors:
            command = [sys.executable, "-c", code, *arguments, str(rank)]
            processes.append(subprocess.Popen(command, env=env, stderr=errors))
    try:
        codes = [process.wait(150) for process in processes]
        # Of all: the one that failed first closes its connections, and the others say just that.
        assert codes == [0] * size, "\n".join((folder / f"{rank}.err").read_text() for rank in range(size))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {rank: ast.literal_eval((folder / f"{rank}.out").read_text()) for rank in range(size)}


def be_rank(module: str, name: str, size: str, folder: str, rank: str) -> None:
    """The life of such a process."""
    torch.set_num_threads(1)
    base = Path(folder)
    store = dist.FileStore(str(base / "default"), int(size))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size), timeout=LIMIT)
    body = getattr(importlib.import_module(module), name)
    result = body(int(rank), dist.FileStore(str(base / "forms"), int(size)))
    dist.barrier()
    (base / f"{rank}.out").write_text(repr(result))
    os._exit(0)  # a closed Gloo backend cannot be freed


def be_newcomer(folder: str, groups: str, epoch: str) -> None:
    """The life of a process that takes the place of rank 1 of 2, as `engine.bootstrap.join` does on NCCL.

    Its groups come up without peers, which torch's own Gloo cannot: torch's "fake" backend stands in until the rebuild.
    """
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    kind = replace(
        GLOO,
        torch_name="fake",
        owns=lambda backend: _owns(backend) or isinstance(backend, fake_pg.FakeProcessGroup),
        abort=lambda backend: None,
    )
    store = dist.FileStore(str(Path(folder) / "forms"), 2)
    join_native(1, store, 2, kind=kind, epoch=int(epoch))
    store.set("the newcomer is up", "1")  # which takes longer than the others wait where a machine is busy
    records = [GroupRecord(**group) for group in ast.literal_eval(groups)]
    fakes = [replace(group, backend="fake") if group.backend == GLOO.torch_name else group for group in records]
    recovery.join_groups(fakes, epoch=int(epoch))
    recovery.sync_group_count()
    print(sums(1), flush=True)
    os._exit(0)


def join_native(rank: int, store: Store, size: int, *, kind: BackendKind = GLOO, epoch: int = 0) -> None:
    """Join the default group as a rank of an NCCL world does, with groups of another kind."""
    if dist.is_initialized():
        dist.destroy_process_group()
    init_default_group(
        "nccl",
        store=store,
        rank=rank,
        world_size=size,
        device=CPU,
        timeout_s=60,
        epoch=epoch,
        recoverable=True,
        kind=kind,
    )


def sums(rank: int) -> list[float]:
    """An all_reduce in each group that is there, and in a new one: the same on all ranks."""
    found = []
    dist.new_group([0, 1], backend=GLOO.torch_name)
    names = sorted(dist.distributed_c10d._world.pg_names, key=lambda group: (len(group.group_name), group.group_name))
    for group in names:
        tensor = torch.full((2,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        found += tensor.tolist()
    dist.barrier()
    return found


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same small model on all ranks, wrapped, with an optimizer that has state."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(plain)
    else:
        for layer in (plain[0], plain[2]):
            fully_shard(layer)
        model = fully_shard(plain)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int, between: Callable[[str], None]
) -> None:
    """One training step on this rank's own data; `between` is called with where it is."""
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))
    middle = next(module for module in model.modules() if isinstance(module, nn.Tanh))

    def within(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        between("in forward")
        output.register_hook(lambda gradient: between("in backward"))

    optimizer.zero_grad()
    handle = middle.register_forward_hook(within)
    try:
        loss = model(data).square().mean()
        loss.backward()
    finally:
        handle.remove()
    between("step")
    optimizer.step()


def weights(model: nn.Module) -> list[float]:
    """All parameters, whole."""
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [float(x) for x in torch.cat([part.detach().flatten() for part in parts])]


class Stop(Exception):
    """Raised during a step."""


def trained(kind: str, rank: int, groups: NativeGroups, stops: list[str]) -> list[float]:
    """Weights after as many steps as `stops` has; each is first run up to its place, aborted and run again.

    Args:
        kind: ``ddp`` or ``fsdp``.
        rank: This rank.
        groups: The groups that are aborted and rebuilt.
        stops: For each step, where it stops; empty: it does not.
    """
    model, optimizer = make(kind)
    for number, place in enumerate(stops):

        def between(here: str, place: str = place) -> None:
            if here == place:
                raise Stop

        try:
            step(model, optimizer, number, rank, between)
        except Stop:
            wait_for_threads()
            assert groups.abort(timeout_s=60) == []
            rebuild_all(groups, 1000 * (1 + ["ddp", "fsdp"].index(kind)) + 10 * number)
            reset_wrappers()
            step(model, optimizer, number, rank, lambda here: None)
    return weights(model)
