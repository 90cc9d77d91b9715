#!/usr/bin/env bash
# Subject:  Accelerate's gather_object, and gather_for_metrics, of a dict or a text.
# Versions: accelerate 1.15.0, torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: one entry for each process: [{'acc': 0}, {'acc': 1}]. In a single process the same call returns the dict.
# Happens:  what each process gave is iterated and joined: of dicts the keys remain, ['acc', 'acc'], and the values
#           are gone; a text becomes letters. gather_for_metrics does so with a dict of numbers, while it gathers a
#           dict of tensors by key. A list of one dict keeps it.
# Source:   the docstring says that nested lists, tuples and dictionaries are gathered. I found no entry about lost
#           values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
cat > check.py <<'PY'
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
found = {
    "dict": gather_object({"acc": rank}),
    "text": gather_object(f"r{rank}"),
    "list": gather_object([{"acc": rank}]),
    "metrics": accelerator.gather_for_metrics({"acc": rank}),
    "tensors": {key: v.tolist() for key, v in accelerator.gather_for_metrics({"acc": torch.tensor([rank])}).items()},
}
if rank == 0:
    print(found, flush=True)
assert found == {
    "dict": ["acc", "acc"],
    "text": ["r", "0", "r", "1"],
    "list": [{"acc": 0}, {"acc": 1}],
    "metrics": ["acc", "acc"],
    "tensors": {"acc": [0, 1]},
}
accelerator.wait_for_everyone()
if rank == 0:
    print("unchanged: values of dicts are lost")
accelerator.end_training()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
