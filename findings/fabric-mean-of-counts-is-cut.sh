#!/usr/bin/env bash
# Subject:  Fabric.all_reduce of integers with its mean, as of counts of right answers.
# Versions: lightning-fabric 2.6.6, torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes, Gloo.
# Expected: the mean of 1 and 2 is 1.5, as for floats; or an error, as torch.mean raises for integers and as
#           Accelerate's reduce raises.
# Happens:  it is 1: the mean is written back into an integer tensor and loses its fraction. A plain Python number in a
#           dict is treated alike: {"right": 1} and {"right": 2} give 1, {"right": 1.0} and {"right": 2.0} give 1.5. The
#           mean of a True and a False is True. The error is up to one in each figure, and small accuracies become 0.
# Source:   Lightning-AI/pytorch-lightning#18235 (merged) writes the mean back in place, on another ground; the
#           documentation of all_reduce names tensors and collections, without types. I found no entry about integers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 lightning-fabric==2.6.6
cat > check.py <<'PY'
import torch
from lightning_fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
rank = fabric.global_rank
results = {
    "floats": fabric.all_reduce(torch.tensor(rank + 1.0)),
    "integers": fabric.all_reduce(torch.tensor(rank + 1)),
    "a dict's float": fabric.all_reduce({"right": rank + 1.0})["right"],
    "a dict's int": fabric.all_reduce({"right": rank + 1})["right"],
    "truths": fabric.all_reduce(torch.tensor(rank == 0)),
    "one right on one rank": fabric.all_reduce(torch.tensor(rank)),
}
sums = fabric.all_reduce(torch.tensor(rank + 1), reduce_op="sum")
if rank == 0:
    print({name: value.item() for name, value in results.items()}, "sum:", sums.item(), flush=True)
assert results["floats"] == results["a dict's float"] == 1.5
assert results["integers"] == results["a dict's int"] == 1
assert results["truths"].item() is True and results["one right on one rank"] == 0
assert sums == 3
fabric.barrier()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: means of integers lose their fraction"
