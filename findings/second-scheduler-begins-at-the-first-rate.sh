#!/usr/bin/env bash
# Subject:  a second learning-rate scheduler for an optimizer whose rate was set anew.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, one process.
# Expected: the schedule begins at the rate that the optimizer has, here 0.01.
# Happens:  LambdaLR, of which all of transformers' schedules are made, and CosineAnnealingWarmRestarts begin at 0.1, the
#           rate when the first scheduler was made; StepLR, LinearLR and CosineAnnealingLR begin at 0.01. A notebook's
#           cell that lowers the rate after a loss that exploded, and makes the scheduler again, trains at the old rate.
# Source:   each scheduler keeps `initial_lr` in the parameter groups and uses what is there; pytorch#33416, #21965.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import warnings

import torch
from torch.optim import lr_scheduler

warnings.simplefilter("error")
weight = torch.nn.Parameter(torch.ones(2))
first_rate, new_rate = 0.1, 0.01


def rates(make):
    """The rates of the second schedule at its begin and after a step."""
    optimizer = torch.optim.SGD([weight], lr=first_rate)
    first = lr_scheduler.ConstantLR(optimizer, factor=1.0)
    optimizer.step()
    first.step()
    for group in optimizer.param_groups:
        group["lr"] = new_rate
    second = make(optimizer)
    begin = optimizer.param_groups[0]["lr"]
    optimizer.step()
    second.step()
    return begin, optimizer.param_groups[0]["lr"]


found = {
    "LambdaLR": rates(lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.5**epoch)),
    "CosineAnnealingWarmRestarts": rates(lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, T_0=10)),
    "StepLR": rates(lambda one: lr_scheduler.StepLR(one, step_size=1, gamma=0.5)),
    "LinearLR": rates(lambda one: lr_scheduler.LinearLR(one, start_factor=0.5, total_iters=5)),
    "CosineAnnealingLR": rates(lambda one: lr_scheduler.CosineAnnealingLR(one, T_max=10)),
}
for name, (begin, after) in found.items():
    print(f"{name}: begins at {begin:.4g}, then {after:.4g}; the optimizer had {new_rate}")
assert found["LambdaLR"] == (first_rate, first_rate / 2)
assert all(max(found[name]) > new_rate for name in list(found)[:2])
assert all(max(found[name]) <= new_rate for name in list(found)[2:])
print("unchanged: two of five schedulers return to the first rate")
PY
venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
