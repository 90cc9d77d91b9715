"""Where ranks wait, or are busy, when a fault is injected. Sent as a cell after the workload, whose names it uses."""

from __future__ import annotations

import resource
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

rank, world_size = dist.get_rank(), dist.get_world_size()

COLLECTIVES = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(99_999)),
    "all_reduce of 16 MiB": lambda: dist.all_reduce(torch.ones(1 << 22)),
    "all_gather": lambda: dist.all_gather([torch.empty(999) for _ in range(world_size)], torch.ones(999)),
    "all_gather_object": lambda: dist.all_gather_object([None] * world_size, {"rank": rank}),
    "all_to_all": lambda: dist.all_to_all_single(torch.empty(4000), torch.ones(4000)),
    "barrier": dist.barrier,
    "broadcast": lambda: dist.broadcast(torch.ones(99_999), 1),
    "broadcast_object_list": lambda: dist.broadcast_object_list([{"a": 1}] if rank == 2 else [None], 2),
    "functional": lambda: functional.all_reduce(torch.ones(999), "sum", dist.group.WORLD) + 1,
    "many at once": lambda: [w.wait() for w in [dist.all_reduce(torch.ones(999), async_op=True) for _ in range(9)]],
    "new_group": lambda: dist.new_group([0, 1, 2, 3]),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(1000), torch.ones(4000)),
    "ring": lambda: [
        w.wait()
        for w in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(1 << 20), (rank + 1) % world_size),
                dist.P2POp(dist.irecv, torch.empty(1 << 20), (rank - 1) % world_size),
            ]
        )
    ],
    "send and recv": lambda: (
        dist.send(torch.ones(1 << 22), rank + 1) if rank % 2 == 0 else dist.recv(torch.empty(1 << 22), rank - 1)
    ),
    "subgroups": lambda: [
        dist.all_reduce(torch.ones(999), group=g) for g in (pair, rest) if rank in dist.get_process_group_ranks(g)
    ],
}


def collect(name: str, count: int) -> None:
    """One collective, again and again."""
    for _ in range(count):
        point("collective")
        COLLECTIVES[name]()


def stay(kind: str) -> None:
    """Be busy for ever, in a way that only an end from outside ends."""
    while True:
        if kind == "sleep":
            time.sleep(600)
        elif kind == "multiply":
            torch.ones(300, 300) @ torch.ones(300, 300)
        elif kind == "recv":
            dist.recv(torch.empty(8), (rank + 1) % world_size) if rank == 0 else dist.barrier()
        elif kind == "barrier":
            dist.barrier() if rank else time.sleep(600)
        elif kind == "loader":
            data = torch.utils.data.TensorDataset(torch.ones(64, 4))
            for _ in torch.utils.data.DataLoader(data, batch_size=2):
                pass
        elif kind == "swallow":
            try:
                dist.barrier()
                time.sleep(0.001)
            except BaseException:
                if not swallowed:
                    swallowed.append(1)
                    continue
                swallowed.clear()
                raise


def fill(kind: str) -> None:
    """Take memory until there is no more: of the 256 MiB that are left below a limit, which is gone afterwards."""
    limits, held = resource.getrlimit(resource.RLIMIT_AS), []
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    x = torch.ones(1 << 20, requires_grad=True)
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), limits[1]))
    try:
        while True:
            if kind == "tensors":
                held.append(torch.ones(8 << 20))
            elif kind == "bytes":
                held.append(bytearray(32 << 20))
            elif kind == "gradients":  # saved for a backward that never comes
                held.append(x := x.exp().repeat(2)[: 8 << 20])
    finally:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)


swallowed: list[int] = []
