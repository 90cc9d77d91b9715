#!/usr/bin/env bash
# Subject:  backward through torch.distributed.nn.functional.all_reduce with MAX, MIN or PRODUCT.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: the gradient goes to the rank that holds the maximum, as with torch.maximum, or the call raises; a
#           product's gradient has the other factors.
# Happens:  backward reduces the incoming gradients with the same operator, whatever the values were: with MAX and MIN
#           each rank's value gets the gradient 1, also those that lost; with PRODUCT too, instead of the product of
#           the others. Only SUM is right.
# Source:   the function takes any operator and its documentation names none as unfit. I found no entry that says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

dist.init_process_group("gloo")
rank = dist.get_rank()
values = torch.tensor([[2.0, 5.0], [3.0, 4.0]])


def gradients(op) -> list:
    own = values[rank].clone().requires_grad_()
    all_reduce(own, op=op).sum().backward()
    parts = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(parts, own.grad)
    return torch.stack(parts).tolist()


def wanted(combine) -> list:
    together = values.clone().requires_grad_()
    combine(together).sum().backward()
    return together.grad.tolist()


cases = {
    "MAX": (dist.ReduceOp.MAX, lambda v: v.amax(0)),
    "MIN": (dist.ReduceOp.MIN, lambda v: v.amin(0)),
    "PRODUCT": (dist.ReduceOp.PRODUCT, lambda v: v.prod(0)),
}
for name, (op, combine) in cases.items():
    found, right = gradients(op), wanted(combine)
    if rank == 0:
        print(f"{name} of {values.tolist()}: gradients {found}, in one process {right}", flush=True)
    assert found == [[1.0, 1.0], [1.0, 1.0]] != right
dist.barrier()
if rank == 0:
    print("unchanged: every rank's value gets the gradient")
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
