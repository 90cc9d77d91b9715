#!/usr/bin/env bash
# Subject:  split_between_processes of Accelerate with a dict of lists or tensors.
# Versions: accelerate 1.15.0, torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes.
# Expected: the block gets this process's part, and the argument stays whole, as a list does: the next epoch, or the
#           same cell run once more, splits the same data again.
# Happens:  the part is written into the caller's dict. After the block the dict holds half the data, and the next split
#           deals out half of that half: each process then works on a quarter, and the items in between are lost,
#           without an error. At last parts are empty. Lists, tuples and tensors are left alone.
# Source:   the documentation describes the argument as input only; huggingface/accelerate#2750 and #3393 (closed) are
#           about uneven lengths. I found no entry about the dict.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
cat > check.py <<'PY'
import torch
from accelerate import PartialState

state = PartialState(cpu=True)
assert state.num_processes == 2
items = [f"prompt {number}" for number in range(8)]
table = {"prompt": list(items), "seed": torch.arange(8)}
rounds = []
for epoch in range(3):
    with state.split_between_processes(table) as part:
        rounds.append(list(part["prompt"]))
        assert part["seed"].tolist() == [int(text[-1]) for text in part["prompt"]]
    with state.split_between_processes(items) as part:
        assert len(part) == 4  # a list is dealt out alike each time
for turn in range(2):
    if turn == state.process_index:
        for epoch, part in enumerate(rounds):
            print(f"process {turn}, round {epoch}: {part}", flush=True)
        print(f"process {turn}: the caller's own dict: {table['prompt']}", flush=True)
    state.wait_for_everyone()
assert len(items) == 8
assert [len(part) for part in rounds] == [4, 2, 1]
assert table["prompt"] == rounds[-1] == [items[0 if state.process_index == 0 else 7]]
state.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: each split shrinks the caller's dict"
