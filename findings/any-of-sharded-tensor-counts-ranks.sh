#!/usr/bin/env bash
# Subject:  any() of a sharded DTensor, counted or averaged: how many columns have an outlier.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: (x > 0).any(0).sum() counts columns, and .float().mean() is at most 1.
# Happens:  any() leaves a pending sum of bools. Converted to numbers or summed before it is combined, each rank that
#           found one adds 1: two columns count as four, their share is 2.0, and bool() of the right flags is int 2.
#           all() is right, and so is any() if full_tensor() is called first.
# Source:   the rule for any in torch.distributed.tensor is that of a sum. I found no entry.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 9.0]])
flags = (distribute_tensor(rows, mesh, [Shard(0)]) > 0).any(0)
found = {
    "sum": flags.sum().full_tensor().item(),
    "share": flags.float().mean().full_tensor().item(),
    "int": flags.int().full_tensor().tolist(),
    "whole first": flags.full_tensor().sum().item(),
    "all": (distribute_tensor(rows, mesh, [Shard(0)]) > 0).all(0).int().full_tensor().tolist(),
}
if rank == 0:
    print("placements of any(0):", flags.placements, "- two columns:", found, flush=True)
assert found == {"sum": 4, "share": 2.0, "int": [2, 2], "whole first": 2, "all": [1, 1]}
dist.barrier()
if rank == 0:
    print("unchanged: any counts ranks")
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
