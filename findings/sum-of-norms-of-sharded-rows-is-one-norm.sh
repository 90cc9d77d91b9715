#!/usr/bin/env bash
# Subject:  the sum or the maximum of norms of a DTensor, such as a group lasso of a weight that is sharded by rows.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: weight.norm(dim=0).sum() is the sum of the columns' norms, as full_tensor() of the norms, summed, is.
# Happens:  each rank's norms are summed first, and the sums then combined as norms are: sqrt(a * a + b * b). The
#           result is too small, here 20.866 instead of 20.870, and 8.602 instead of 10 when each column lies on a
#           rank of its own. The norms themselves, and norm() of everything, are right.
# Source:   torch.distributed.tensor treats a sum as linear in any partial placement, also in that of norms. I found
#           no entry.
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
for rows in (
    torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 9.0]]),
    torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 7.0], [0.0, 0.0]]),
):
    weight = distribute_tensor(rows, mesh, [Shard(0)])
    norms = weight.norm(dim=0)
    found, right = norms.sum().full_tensor().item(), rows.norm(dim=0).sum().item()
    parts = rows.view(2, 2, 2).norm(dim=1).sum(-1)  # what each rank has
    if rank == 0:
        print(f"{norms.placements}: the sum of the norms is {found:.4f}, of the whole tensor {right:.4f}", flush=True)
    torch.testing.assert_close(norms.full_tensor(), rows.norm(dim=0))
    torch.testing.assert_close(weight.norm().full_tensor(), rows.norm())
    assert abs(found - parts.norm().item()) < 1e-4 and found < right - 1e-3
dist.barrier()
if rank == 0:
    print("unchanged: the sum of norms is too small")
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
