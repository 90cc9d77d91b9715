#!/usr/bin/env bash
# Subject:  a row of a sharded DTensor that is written in place, such as a new token's embedding under fully_shard.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: weight[1].zero_(), weight[2].fill_(8) and weight[3] = other change the parameter, as for tensors, or
#           raise. `weight[1] = 0.0` raises.
# Happens:  a row across the shards is a gathered copy, not a view: the write goes there and is lost, without a word.
#           The same in nn.Embedding.reset_parameters, which sets the row of padding_idx to zero: after meta,
#           fully_shard and to_empty that row is random.
# Source:   nothing in the documentation of DTensor or fully_shard. I found no entry that names lost writes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))


def lookup() -> nn.Embedding:
    layer = nn.Embedding(4, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, 9.0).view(4, 2))
    return layer


@torch.no_grad()
def write(weight) -> None:
    weight[1].zero_()
    weight[2].fill_(8.0)
    weight[3].copy_(weight[0])
    weight[0] = weight[1] * 3


plain, layer = lookup(), lookup()
fully_shard(layer, mesh=mesh)
before = layer.weight.full_tensor()
write(plain.weight)
write(layer.weight)
after = layer.weight.full_tensor()
try:
    layer.weight.detach()[1] = 0.0
    raise AssertionError("a number was written")
except NotImplementedError as error:
    refused = str(error)
with torch.device("meta"):
    padded = nn.Embedding(4, 2, padding_idx=1)
fully_shard(padded, mesh=mesh)
padded.to_empty(device="cpu")
torch.manual_seed(rank)
padded.reset_parameters()
row = padded.weight.full_tensor()[1]
if rank == 0:
    print("a module alone:", plain.weight.tolist())
    print("fully_shard:   ", after.tolist(), "- a number:", refused)
    print("row of padding_idx after reset_parameters:", row.tolist())
assert torch.equal(after, before) and not torch.equal(after, plain.weight)
assert row.count_nonzero() == 2
dist.barrier()
if rank == 0:
    print("unchanged: writes to rows are lost")
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
