#!/usr/bin/env bash
# Subject:  torchmetrics' SumMetric over integers, such as tokens or examples.
# Versions: torchmetrics 1.9.0, torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU.
# Expected: integers are counted exactly, as by torch's sum and by torchmetrics' own accuracies.
# Happens:  the sum is one float32 number: from 16777216 on, adding 1 changes nothing, and larger counts are rounded.
#           A count of tokens per rank stands still, or is off after compute() across ranks, without a word.
#           set_dtype(torch.float64) helps.
# Source:   the documentation says float or tensor as input and shows floats. I found no entry that names the limit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0
cat > check.py <<'PY'
import torch
from torchmetrics import MaxMetric, SumMetric

count = SumMetric()
count.update(2**24)
for _ in range(1000):
    count.update(torch.tensor(1))
tokens = SumMetric()
for _ in range(3):
    tokens.update(torch.tensor(16777217))
largest = MaxMetric()
largest.update(torch.tensor(16777217))
exact = SumMetric().set_dtype(torch.float64)
exact.update(2**24)
for _ in range(1000):
    exact.update(torch.tensor(1))
print(f"2**24 and 1000 ones: {int(count.compute())} in {count.compute().dtype}, in float64 {int(exact.compute())}")
print(f"3 times 16777217: {int(tokens.compute())} instead of {3 * 16777217}; the maximum is {int(largest.compute())}")
assert count.compute() == 2**24 and int(exact.compute()) == 2**24 + 1000
assert int(tokens.compute()) != 3 * 16777217 and int(largest.compute()) == 2**24
print("unchanged: sums stop at 2**24")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
