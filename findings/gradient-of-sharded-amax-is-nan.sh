#!/usr/bin/env bash
# Subject:  backward through amax(), amin() and norms of order infinity of a DTensor that is sharded.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: the gradient of the largest element is 1, and 0 elsewhere, as it is with max() and in one process.
# Happens:  the value is right, the gradient is NaN in all places but that of the maximum, and infinite there. A penalty
#           on the largest weight, or a scale for quantization that is trained, ends in NaN at the first step.
# Source:   torch divides the gradient by the number of elements that equal the extreme; it counts them in each rank's
#           shard, and 0 / 0 is NaN. pytorch#168358 is the same division in scatter_reduce, without DTensors.
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
rows = torch.arange(1.0, 9.0).view(4, 2)
for name, extreme in {
    "amax": torch.amax,
    "norm of order inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "max": torch.max,
}.items():
    whole = rows.clone().requires_grad_()
    extreme(whole).backward()
    sharded = distribute_tensor(rows, mesh, [Shard(0)]).requires_grad_()
    value = extreme(sharded).full_tensor()
    value.backward()
    gradient = sharded.grad.full_tensor()
    if rank == 0:
        print(f"{name}: {value.item()}, gradient {gradient.flatten().tolist()}", flush=True)
    assert value == extreme(whole)
    if name == "max":
        assert torch.equal(gradient, whole.grad)
    else:
        assert gradient.isnan().sum() == 7 and gradient[3, 1].isinf(), gradient
dist.barrier()
if rank == 0:
    print("unchanged: the gradient of amax is NaN, that of max is right")
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
