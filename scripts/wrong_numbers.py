"""Reproduce what torch computes wrong without an error: `axon_nb/wrong_numbers.toml` lists it.

Prints, by name, whether the installed torch is wrong. `--record` also writes its version into the list.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from axon_nb.wrong_numbers import DATA, faults

SIZE = 3
RELEASE = ".".join(torch.__version__.split(".")[:2])


def broadcast_gradient(rank: int) -> bool:
    """Broadcast from rank 1 among ranks 1 and 2, whose gradients are added there."""
    from torch.distributed.nn import functional

    group = dist.new_group([1, 2])
    if rank == 0:
        return True
    x = torch.ones(1, requires_grad=True)
    functional.broadcast(x, 1, group).backward()
    return x.grad is not None and x.grad.item() == (2.0 if rank == 1 else 0.0)


def fsdp2_reduce_dtype(rank: int) -> bool:
    """Add gradients of which bfloat16 loses the small ones, with and without a frozen first forward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def gradient(*, frozen: bool) -> torch.Tensor:
        model: Any = nn.Linear(2, SIZE, bias=False, dtype=torch.bfloat16)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)), mp_policy=policy)
        x = torch.full((1, 2), 1.0 if rank == 0 else 2.0**-8, dtype=torch.bfloat16)
        if frozen:
            model.requires_grad_(False)(x)
        model.requires_grad_(True)(x).sum().backward()
        whole: torch.Tensor = model.weight.grad.full_tensor()
        return whole

    return torch.equal(gradient(frozen=False), gradient(frozen=True))


def alike_shards(_: int) -> bool:
    """Initialize a sharded layer: no two ranks should have the same rows."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = nn.Linear(4, 2 * SIZE, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    model.to_empty(device="cpu").reset_parameters()
    first, second, _third = model.weight.full_tensor().chunk(SIZE)
    return not torch.equal(first, second)


def first_state_dict(_: int) -> bool:
    """Train two steps with and without a look at the state before them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def weights(*, looked_at: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if looked_at:
            get_state_dict(model, optimizer)
        for _step in range(2):
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    return torch.equal(weights(looked_at=False), weights(looked_at=True))


def bool_sum(rank: int) -> bool:
    """Add a True of two ranks eight times."""
    group = dist.new_group([0, 1])
    flag = torch.tensor([True])
    for _ in range(8 if rank < 2 else 0):
        dist.all_reduce(flag, group=group)
    return bool(flag.item())


def max_of_nan(rank: int) -> bool:
    """Find the greatest of numbers of which rank 1 has a NaN."""
    x = torch.tensor([float("nan") if rank == 1 else 1.0])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return bool(x.isnan().item())


def memory_layout(rank: int) -> bool:
    """Broadcast to a rank whose tensor is stored by columns."""
    rows = torch.arange(4.0).view(2, 2)
    x = rows.clone() if rank != 1 else torch.zeros(2, 2).t()
    dist.broadcast(x, 0)
    return torch.equal(x, rows)


REPRODUCTIONS: dict[str, Callable[[int], bool]] = {
    one.__name__: one
    for one in (
        *(broadcast_gradient, fsdp2_reduce_dtype, alike_shards, first_state_dict),
        *(bool_sum, max_of_nan, memory_layout),
    )
}
"""By name of the fault; each says whether its rank has the right result. Faults that need GPUs have none."""


def _run(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", SIZE), rank=rank, world_size=SIZE)
    found = {}
    for name, is_right in REPRODUCTIONS.items():
        dist.barrier()
        found[name] = is_right(rank)
    Path(folder, f"{rank}").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def reproduce() -> dict[str, bool]:
    """Return whether the installed torch is wrong, by name of the fault, on three ranks with torch's own Gloo."""
    with tempfile.TemporaryDirectory() as folder:
        vars(mp)["start_processes"](_run, (folder,), SIZE, start_method="fork")
        ranks = [json.loads(Path(folder, f"{rank}").read_text(encoding="utf-8")) for rank in range(SIZE)]
    return {name: not all(rank[name] for rank in ranks) for name in REPRODUCTIONS}


def record(found: dict[str, bool]) -> None:
    """Write into the list of faults in which of its two lists the installed torch belongs."""
    text = DATA.read_text(encoding="utf-8")
    for fault in faults():
        if fault.name in found:
            for key, belongs in (("wrong", found[fault.name]), ("right", not found[fault.name])):
                versions = {*getattr(fault, key)} - {RELEASE} | ({RELEASE} if belongs else set())
                listed = json.dumps(sorted(versions, key=lambda version: [*map(int, version.split("."))]))
                text = re.sub(rf'(name = "{fault.name}"(?:\n.+)*\n{key} = ).*', rf"\g<1>{listed}", text)
    DATA.write_text(text, encoding="utf-8")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the version of torch into the list")
    options = parser.parse_args()
    found = reproduce()
    print(json.dumps(found))
    if options.record:
        record(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
