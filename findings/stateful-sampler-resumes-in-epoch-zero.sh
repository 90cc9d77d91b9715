#!/usr/bin/env bash
# Subject:  torchdata's StatefulDataLoader with its StatefulDistributedSampler, saved in the middle of a later epoch and
#           resumed in a new process.
# Versions: torchdata 0.11.0, torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU.
# Expected: load_state_dict brings all that decides the order, so the rest of the epoch follows: each sample once. With
#           shuffle=True and without a sampler it does.
# Happens:  the state holds how many samples were drawn, not the epoch. The new sampler stands in epoch 0 and skips that
#           many samples of another order: some samples come twice in the epoch, others never, without a word. It is
#           right if set_epoch is called again, before the first batch is drawn.
# Source:   meta-pytorch/data#1513 (open) and pull request 1515 (to put the epoch into the state).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchdata==0.11.0
cat > check.py <<'PY'
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

data = list(range(12))


def of_rank_zero():
    sampler = StatefulDistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
    return sampler, StatefulDataLoader(data, batch_size=2, sampler=sampler)


def drawn(batches) -> list[int]:
    return [int(number) for batch in batches for number in batch]


sampler, loader = of_rank_zero()
sampler.set_epoch(3)
batches = iter(loader)
first = drawn([next(batches)])
state = loader.state_dict()
rest = drawn(batches)

_, resumed = of_rank_zero()
resumed.load_state_dict(state)
informed, again = of_rank_zero()
again.load_state_dict(state)
informed.set_epoch(3)
without, with_epoch = drawn(resumed), drawn(again)
print(f"epoch 3: {first}, then {rest}; resumed: {without}; resumed with set_epoch: {with_epoch}")
assert with_epoch == rest
assert len(without) == len(rest) and without != rest
assert sorted(first + without) != sorted(first + rest)  # other samples, not only another order
assert "epoch" not in str(state)

torch.manual_seed(0)
plain = StatefulDataLoader(data, batch_size=2, shuffle=True)
drawn([next(batches := iter(plain))])
state, rest = plain.state_dict(), drawn(batches)
torch.manual_seed(1)
other = StatefulDataLoader(data, batch_size=2, shuffle=True)
other.load_state_dict(state)
assert drawn(other) == rest
print("unchanged: a resumed distributed sampler begins in epoch 0")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
