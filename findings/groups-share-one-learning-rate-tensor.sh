#!/usr/bin/env bash
# Subject:  an optimizer with parameter groups and a tensor as learning rate, as torch.compile advises, under a
#           scheduler.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU.
# Expected: each group has its own rate, as with a float: LambdaLR takes one function for each group.
# Happens:  all groups hold the same tensor, and schedulers write in place: the last group's function sets the rate of
#           all of them. A loop that halves each group's rate in place divides it by four. state_dict and get_last_lr
#           show the same wrong number for each group.
# Source:   the documentation allows a tensor lr and does not say that groups share it. I found no entry.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import torch
from torch.optim.lr_scheduler import LambdaLR


def rates(lr, each: bool = False) -> list[float]:
    one, two = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [one]}, {"params": [two]}]
    if each:
        for group in groups:
            group["lr"] = lr.clone()
    optimizer = torch.optim.AdamW(groups, lr=lr)
    LambdaLR(optimizer, [lambda epoch: 1.0, lambda epoch: 0.01])
    return [round(float(group["lr"]), 6) for group in optimizer.param_groups]


def halved(lr) -> list[float]:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=lr)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return [round(float(group["lr"]), 6) for group in optimizer.param_groups]


number, tensor, own = rates(0.1), rates(torch.tensor(0.1)), rates(torch.tensor(0.1), True)
print(f"functions 1 and 0.01: lr=0.1 gives {number}, a tensor {tensor}, a tensor for each group {own}")
print(f"halved in a loop: lr=0.1 gives {halved(0.1)}, a tensor {halved(torch.tensor(0.1))}")
assert number == own == [0.1, 0.001] and tensor == [0.001, 0.001]
assert halved(0.1) == [0.05, 0.05] and halved(torch.tensor(0.1)) == [0.025, 0.025]
print("unchanged: the groups share the tensor")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
